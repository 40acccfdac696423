"""`batchwright noise`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any

import click

from batchwright.cli.options import DEFAULT_DEVICE, Count, json_option, print_found, target_argument
from batchwright.ranks.place import is_first_rank


@click.command("noise")
@target_argument
@click.option("--effective-batch", type=Count(), default=64, show_default=True, help="Samples per optimizer step.")
@click.option("--steps", type=Count(), default=200, show_default=True, help="Optimizer steps to train.")
@click.option(
    "--micro-batch", type=Count(), help="Samples in one forward and backward. Default: a quarter of a step's."
)
@click.option("--on", metavar="DEVICE", help=f"Where to train: cpu, cuda, mps, xpu.  {DEFAULT_DEVICE}")
@click.option("--shape", "shapes", metavar="NAME=VALUE", multiple=True, help="An argument of the workload's batch.")
@click.option("--every", type=Count(), default=1, show_default=True, help="Look at one step in so many.")
@click.option("--clip-norm", type=float, help="Clip the gradient of a step to this norm.")
@click.option("--unit", help="What the workload's units are, such as tokens.")
@click.option("--times", metavar="LIST", help="Seconds of whole steps by batch, such as 32=0.11,64=0.19,128=0.36.")
@click.option("--seed", type=Count(least=0), default=0, show_default=True, help="For weights, order and samples.")
@click.option("--plot", metavar="FILE", help="Draw the trend to a .png, .svg or .pdf file.")
@json_option
def command(target: str, as_json: bool, **options: Any) -> int:
    """Train for some steps and measure the critical batch size, with its interval.

    TARGET is a workload (path.py:function or module:function). It is trained for real, on its own data; nothing is
    kept of it. Ends with 1 where the upper end of the critical batch is not resolved (under torchrun with 0).

    \b
    batchwright noise train.py:workload --effective-batch 64 --steps 200
    batchwright noise train.py:workload --times 32=0.11,64=0.19,128=0.36 --plot trend.png
    torchrun --nproc-per-node 2 -m batchwright noise train.py:workload
    """
    from batchwright.cli.estimate import parse_shape
    from batchwright.planning.soonest import parse_step_times
    from batchwright.targets import find_target

    shape = parse_shape(options.pop("shapes"))
    times = None if options["times"] is None else parse_step_times(options["times"])
    plot = options.pop("plot")
    if plot is not None:
        from batchwright.report.pictures import check_ending

        check_ending(plot)
    find_target(target)
    # Under torchrun every rank comes to the same answer; one of them tells it.
    speaks = is_first_rank()
    found = _measure(target, {**options, "shape": shape, "times": times}, speaks=speaks)
    if not speaks:
        return 0
    if plot is not None:
        from batchwright.report.pictures import plot_noise

        plot_noise(found, plot)
    print_found(found, as_json=as_json)
    # torchrun would report any other code of a rank as a crash.
    return 0 if found.critical_batch.resolved or found.ranks > 1 else 1


def _measure(target: str, options: dict[str, Any], *, speaks: bool) -> Any:
    from batchwright.device.device import default_device
    from batchwright.noise.noise_run import measure_noise
    from batchwright.ranks.session import process_group, together
    from batchwright.report.display import Progress
    from batchwright.targets import load_workload

    # What the user's code prints must not get into the answer.
    with Progress() as progress, redirect_stdout(sys.stderr), together("noise") as ranks:
        say = ranks.ticking(progress.say if speaks else lambda _: None)
        say(f"loading {target}")
        with ranks.at(f"loading {target}"):
            workload = load_workload(target)
        with process_group(options["on"] or default_device()) as device:
            return measure_noise(workload, **{**options, "on": device}, progress=say)
