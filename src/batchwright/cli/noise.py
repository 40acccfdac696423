"""`batchwright noise`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchwright.cli.options import (
    Command,
    own_command,
    parse_shape,
    settle_target,
    shared,
    target_or_script,
)
from batchwright.ranks.meeting import is_first_rank
from batchwright.report.display import print_result, report_progress
from batchwright.targets import find_target, load_workload

if TYPE_CHECKING:
    from batchwright.noise.noise_result import NoiseRun
    from batchwright.scripts.script import Script

_LOOP = "in your own loop: bw.NoiseScale(accumulator, {}=...)"
_MOVED = {
    "--every": _LOOP.format("every"),
    "--unit": _LOOP.format("unit"),
    "--clip-norm": "in your own loop: bw.Accumulator(..., clip_norm=1.0) and bw.NoiseScale",
    "--times": "batchwright tune TARGET, which measures them; or bw.best_batch(critical_batch, {32: 0.11, 64: 0.19})",
    "--plot": "batchwright tune TARGET, and batchwright report: the page draws it",
}


@click.command("noise", cls=Command, moved=_MOVED)
@target_or_script
@shared("--on", help="[default: the accelerator, else cpu]")
@shared("--effective-batch", default=64)
@shared("--micro-batch", help="[default: a quarter of a step's]")
@shared("--steps")
@shared("--shape")
@own_command()
@shared("--json")
@click.pass_context
def command(ctx: click.Context, /, target: str | Script, as_json: bool, **options: Any) -> int:
    """Train for some steps and measure the critical batch size, with its interval.

    TARGET is a workload: path.py:function or module:function. It is trained for real, on its own data; nothing is
    kept of it. Behind -- stands your own command instead, which trains unmodified, at its own batch. Exits with status
    1 if the critical batch has no upper bound yet (under torchrun with 0).

    \b
    batchwright noise train.py:workload --effective-batch 64 --steps 200
    torchrun --nproc-per-node 2 -m batchwright noise train.py:workload
    batchwright noise --steps 100 -- python train.py --batch-size 16

    In your own loop, bw.NoiseScale measures the same, and also takes every and unit.
    """
    options["shape"] = parse_shape(options.pop("shapes"))
    target = settle_target(ctx, target, options, for_scripts=("--on", "--micro-batch", "--steps", "--shape"))
    if not isinstance(target, str):
        answer = _measure_script(target, options)
        print_result(answer, as_json=as_json)
        return 0 if answer.critical_batch.resolved else 1
    find_target(target)
    # Under torchrun every rank comes to the same answer; one of them prints it.
    prints = is_first_rank()
    answer = _measure(target, options, prints=prints)
    if not prints:
        return 0
    print_result(answer, as_json=as_json)
    # torchrun would report any other code of a rank as a crash.
    return 0 if answer.critical_batch.resolved or answer.ranks > 1 else 1


def _measure_script(script: Script, options: dict[str, Any]) -> NoiseRun:
    from batchwright.scripts.noise_script import measure_noise_of_script

    del options["effective_batch"]
    with report_progress(script) as say:
        return measure_noise_of_script(script, **options, progress=say)


def _measure(target: str, options: dict[str, Any], *, prints: bool) -> NoiseRun:
    from batchwright.device.device import default_device
    from batchwright.noise.noise_run import measure_noise
    from batchwright.ranks.session import process_group, together

    with report_progress(target, prints=prints) as say, together("noise") as ranks:
        say = ranks.ticking(say)
        with ranks.at(f"loading {target}"):
            workload = load_workload(target)
        with process_group(options["on"] or default_device()) as device:
            return measure_noise(workload, **{**options, "on": device}, progress=say)
