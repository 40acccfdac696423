"""`batchwright fit`, and the job behind `--then`.

Promises:
- what can be known to be wrong before torch is imported, which takes seconds, is refused before;
- a job is checked before anything runs, and filled in and run at each answer.
"""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from batchwright.catalogue.cards import names_a_card
from batchwright.cli.options import (
    PLACES,
    RANKS_ON_CARD,
    Command,
    Count,
    own_command,
    parse_shapes,
    settle_target,
    shared,
    target_or_script,
)
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.fitting.request import FitRequest
from batchwright.ranks.meeting import is_first_rank
from batchwright.report.display import print_result, report_progress
from batchwright.targets import find_target
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batchwright.fitting.fit_result import Fit
    from batchwright.scripts.script import Script


_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class JobFailedError(BatchwrightError):
    """The command behind --then failed: it has told of itself already."""

    exit_code = 3


def run_jobs(template: str, rows: Iterable[Fit], *, as_json: bool) -> None:
    """Run the user's job at each answer, its output behind ours; on stderr where stdout is JSON."""
    import subprocess

    for row in rows:
        if row.micro_batch is None:
            continue
        job = fill_in(template, {"micro_batch": row.micro_batch, **row.shape})
        click.echo(f"running {job}", err=True)
        sys.stdout.flush()
        # The number, not sys.stderr: a job writes past Python's own streams.
        code = subprocess.run(job, shell=True, stdout=2 if as_json else None).returncode
        if code:
            raise JobFailedError(f"the job ended with exit code {code}: {job}")


def check_job(template: str, names: list[str]) -> None:
    """Refuse a job with braces that nothing can be filled into.

    >>> check_job("python eval.py --batch {size}", ["micro_batch"])
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: --then has '{size}'; what can be filled in: {micro_batch}.
      try: {{ and }} for braces that are meant for the shell
    """
    for match in _BRACES.finditer(template):
        if match[0] not in ("{{", "}}") and match[1] not in names:
            raise InvalidInputError(
                f"--then has {shortened(match[0])}; what can be filled in: {', '.join(f'{{{n}}}' for n in names)}.",
                remedy="{{ and }} for braces that are meant for the shell",
            )


def fill_in(template: str, values: Mapping[str, object]) -> str:
    """Fill values into a job that was checked, quoted for the shell.

    >>> fill_in("eval -b {micro_batch} -c {max_crops} > ${{OUT}}", {"micro_batch": 19, "max_crops": 12})
    'eval -b 19 -c 12 > ${OUT}'
    """
    return _BRACES.sub(lambda match: match[0][0] if match[1] is None else shlex.quote(str(values[match[1]])), template)


_MOVED = {
    "--margin": "in Python: bw.fit(target, margin=0.05)",
    "--clip-norm": "in Python: bw.fit(target, clip_norm=1.0)",
    "--accumulation": "--accumulate-to EFFECTIVE; in Python: bw.fit(target, accumulation=2)",
    "--allocator": 'in Python: bw.fit(target, on="a100-40gb", allocator="expandable_segments:True")',
}


_FOR_SCRIPTS = (
    *("--on", "--memory", "--devices", "--limit", "--shape", "--shape-from", "--start-at", "--scale"),
    *("--powers-of-two", "--max-trials", "--accumulate-to", "--then"),
)


@click.command("fit", cls=Command, moved=_MOVED)
@target_or_script
@shared("--on", help=f"{PLACES}  [default: the accelerator, else cpu]")
@shared("--memory", help="[default: what is free]")
@shared("--devices", help=RANKS_ON_CARD)
@shared(
    "--shape",
    help="An argument of the workload's batch, such as seq_len=512; several values, max_crops=2,4, give a table.",
)
@shared("--limit")
@click.option("--shape-from", type=Count(least=0), help="Leave out values of --shape below this one.")
@click.option("--start-at", "start", type=Count(), help="Start from this size and grow by half.")
@click.option("--scale", metavar="TABLE", help="Start from a share of --limit: max_crops:2=1.0,4=0.8,else=0.5.")
@click.option("--powers-of-two", is_flag=True, help="Try powers of two only.")
@click.option("--max-trials", type=Count(), help="Probes per shape.  [default: 40; 5 with --start-at or --scale]")
@click.option("--evaluate", is_flag=True, help="Also find the size for evaluation.")
@click.option("--accumulate-to", type=Count(), metavar="EFFECTIVE", help="Also plan this effective batch.")
@click.option("--then", metavar="CMD", help="Run a job at the answer, for each shape: {micro_batch} is filled in.")
@click.option("--no-cache", is_flag=True, help="Neither start from a remembered answer nor remember this one.")
@own_command("--batch-flag")
@shared("--json")
@click.pass_context
def command(ctx: click.Context, /, target: str | Script, as_json: bool, **options: Any) -> int:
    """Find the largest micro-batch that fits, by running it.

    TARGET is a workload: path.py:function or module:function. Each probe runs full steps in a process of its own.
    Behind -- stands your own command instead, run unmodified with other batch sizes.

    \b
    batchwright fit train.py:workload --memory 16GiB --limit 64
    batchwright fit train.py:workload --on cuda --accumulate-to 256
    batchwright fit --on a100-40gb -- python train.py --batch-size {micro_batch}
    batchwright fit eval.py:workload --shape max_crops=2,4,6 --then "python eval.py -b {micro_batch} -c {max_crops}"

    In Python, bw.fit also takes margin, accumulation, clip_norm, allocator and isolate.
    """
    target = settle_target(ctx, target, options, for_scripts=_FOR_SCRIPTS)
    shapes = start_from(parse_shapes(options["shapes"]), options["shape_from"])
    if options["then"] is not None:
        check_job(options["then"], ["micro_batch", *shapes])
    is_card = options["on"] is not None and names_a_card(options["on"])
    if options["devices"] is not None and options["accumulate_to"] is None and not is_card:
        raise InvalidInputError("--devices changes nothing without --accumulate-to.", remedy="--accumulate-to 256")
    # What contradicts itself is refused as the library would, once it is loaded. How a search starts depends on the
    # names of a shape; any of the values will do.
    named = {name: options[name] for name in ("limit", "start", "scale", "powers_of_two", "max_trials")}
    FitRequest.read(**named, shapes={name: values[:1] for name, values in shapes.items()})
    if isinstance(target, str):
        find_target(target)
    # Under torchrun every rank comes to the same answer; one of them prints it.
    prints = is_first_rank()
    answer = _run_fit(target, shapes, options, prints=prints)
    if not prints:
        return 0
    print_result(answer, as_json=as_json)
    rows = answer.shapes or (answer,)
    if options["then"] is not None:
        run_jobs(options["then"], rows, as_json=as_json)
    return int(any(row.micro_batch is None for row in rows))


def _run_fit(target: str | Script, shapes: dict[str, list[int]], options: dict[str, Any], *, prints: bool) -> Fit:
    from batchwright.fitting.fit import fit
    from batchwright.fitting.fit_result import name_shape

    is_card = options["on"] is not None and names_a_card(options["on"])
    accumulates = options["accumulate_to"] is not None
    names = ("on", "memory", "limit", "start", "scale", "powers_of_two", "max_trials", "evaluate")
    with report_progress(target, prints=prints) as say:
        answer = fit(
            target,
            shapes=shapes,
            # With several micro-batches per optimizer step the gradients of one live through the forward of the next.
            accumulation=2 if accumulates else 1,
            devices=(options["devices"] or 1) if is_card else 1,
            cache=not options["no_cache"],
            progress=say,
            **{name: options[name] for name in names},
        )
        for row in answer.shapes or (answer,):
            size = "no micro-batch fits" if row.micro_batch is None else f"using micro-batch {row.micro_batch:,}"
            say(f"{size} for {name_shape(row.shape)}" if row.shape else size)
    return _add_plan(answer, options["accumulate_to"], options["devices"]) if accumulates else answer


def _add_plan(answer: Fit, effective_batch: int, devices: int | None) -> Fit:
    from dataclasses import replace

    from batchwright.planning.plan import plan

    def with_plan(row: Fit) -> Fit:
        if row.micro_batch is None:
            return row
        return replace(row, plan=plan(effective_batch, micro_batch=row.micro_batch, devices=devices or row.ranks))

    note = "probes accumulated 2 micro-batches per optimizer step, so that gradients are there during forward"
    return replace(with_plan(answer), shapes=tuple(map(with_plan, answer.shapes)), notes=(*answer.notes, note))


def start_from(shapes: dict[str, list[int]], first: int | None) -> dict[str, list[int]]:
    """Leave out the values below `first` of the one shape that has several.

    >>> start_from({"max_crops": [8, 10, 12, 13], "seq_len": [512]}, 12)
    {'max_crops': [12, 13], 'seq_len': [512]}
    """
    if first is None:
        return shapes
    tables = [name for name, values in shapes.items() if len(values) > 1]
    if len(tables) != 1:
        raise InvalidInputError(
            f"--shape-from goes with one --shape of several values; received {', '.join(tables) or 'none'}.",
            remedy=f"--shape max_crops=2,4,6,8,10,12,13 --shape-from {first}",
        )
    values = [value for value in shapes[tables[0]] if value >= first]
    if not values:
        received = ",".join(map(str, shapes[tables[0]]))
        raise InvalidInputError(f"--shape-from {first} leaves nothing of {tables[0]}={received}.")
    return {**shapes, tables[0]: values}
