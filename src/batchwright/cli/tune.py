"""`batchwright tune`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchwright.cli.options import DEFAULT_DEVICE, Amount, Count, json_option, print_found, target_argument
from batchwright.errors import InvalidInputError
from batchwright.planning.dialects import FRAMEWORKS, find_dialect
from batchwright.ranks.place import is_first_rank, read_place
from batchwright.units import parse_whole_number

if TYPE_CHECKING:
    from batchwright.tuning.tune import Tuned


@click.command("tune")
@target_argument
@click.option("--on", metavar="DEVICE", help=f"cpu, cuda, mps, xpu; or a card of the catalogue.  {DEFAULT_DEVICE}")
@click.option("--memory", type=Amount(), metavar="AMOUNT", help="A budget such as 16GiB.  [default: what is free]")
@click.option("--devices", type=Count(), help="Data-parallel ranks.  [default: 1, under torchrun its ranks]")
@click.option("--effective-batch", type=Count(), help="The effective batch to keep.  [default: the one that pays]")
@click.option("--limit", type=Count(), help="The largest micro-batch of interest.")
@click.option("--shape", "shapes", metavar="NAME=VALUE", multiple=True, help="An argument of the workload's batch.")
@click.option("--steps", type=Count(), default=200, show_default=True, help="Optimizer steps to train for the noise.")
@click.option("--noise-batch", type=Count(), help="The effective batch to train them at.  [default: 64]")
@click.option("--branches", metavar="LIST", help="Also train short branches at these batches, such as 16,32,64,128.")
@click.option("--seed", type=Count(least=0), default=0, show_default=True, help="For weights, order and samples.")
@click.option("--skip", metavar="STAGES", help="Leave out fit, estimate, throughput, audit, noise or branches.")
@click.option(
    "--run-file", "file", metavar="FILE", default="run.json", show_default=True, help="Where the run is written."
)
@click.option("--for", "framework", metavar="FRAMEWORK", help=f"Print what to paste into: {', '.join(FRAMEWORKS)}.")
@click.option("--resume", is_flag=True, help="Go on with the run that is in that file.")
@json_option
def command(target: str, framework: str | None, as_json: bool, **options: Any) -> int:
    """Tune a workload: what fits, how fast, is accumulation right, how large pays, and what to type.

    TARGET is a workload (path.py:function or module:function). Each stage can be skipped; one that fails does not take
    the others with it. What was measured is in the run's file after every stage.

    \b
    batchwright tune train.py:workload --memory 16GiB
    batchwright tune train.py:workload --on a100-40gb --devices 8
    batchwright tune train.py:workload --memory 16GiB --resume --for transformers
    torchrun --nproc-per-node 2 -m batchwright tune train.py:workload
    """
    from batchwright.cli.estimate import parse_shape
    from batchwright.report.display import render_plain
    from batchwright.targets import find_target
    from batchwright.user_files import check_place

    options["shape"] = parse_shape(options.pop("shapes"))
    options["skip"] = tuple(name.strip() for name in (options["skip"] or "").split(",") if name.strip())
    options["branch_batches"] = _batches(options.pop("branches"))
    ranks = read_place().world_size
    if options["devices"] is None:
        options["devices"] = ranks
    elif ranks > 1 and options["devices"] != ranks:
        raise InvalidInputError(
            f"--devices {options['devices']} under torchrun with {ranks} ranks.", remedy=f"--devices {ranks}"
        )
    if framework is not None:
        find_dialect(framework)
    find_target(target)
    file = Path(options["file"]).absolute()
    check_place(file, what="the run", option="--run-file FILE")
    speaks = is_first_rank()
    found = _tune(target, options, speaks=speaks)
    if not speaks:
        return 0
    advised = found.run["recommendation"]
    if framework is not None and "skipped" not in advised and not as_json:
        # Only what is to be pasted goes to stdout, so that `> config.json` is a config.
        click.echo(render_plain(found), err=True)
        click.echo(advised["configs"][framework.lower()])
        return 0
    print_found(found, as_json=as_json)
    if found.file is None:
        click.echo(f"Error: the run is not in {options['file']}, which could not be written.", err=True)
        return 1
    click.echo(f"the run is in {options['file']}; the page: batchwright report {options['file']}", err=True)
    if "skipped" not in advised:
        command, *arguments = found.run["workload"]["command"].partition(" -- ")
        options_to_add = f"--run-file {options['file']} --resume --for {FRAMEWORKS[0]}"
        click.echo(f"what to type: {command} {options_to_add}{''.join(arguments)}", err=True)
        return 0
    return 3 if any(isinstance(section, dict) and section.get("raised") for section in found.run.values()) else 1


def _tune(target: str, options: dict[str, Any], *, speaks: bool) -> Tuned:
    from batchwright.report.display import Progress
    from batchwright.tuning.tune import tune

    # What the user's code prints must not get into the answer.
    with Progress() as progress, redirect_stdout(sys.stderr):
        say = progress.say if speaks else lambda _: None
        say(f"loading {target}")
        return tune(target, **options, progress=say)


def _batches(text: str | None) -> tuple[int, ...]:
    return tuple(parse_whole_number(part, "--branches") for part in text.split(",")) if text else ()
