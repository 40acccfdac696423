"""`batchwright fit`.

Promises:
- what can be known to be wrong before torch is imported, which takes seconds, is said before.
"""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from batchwright.catalogue.cards import names_a_card
from batchwright.cli.options import DEFAULT_DEVICE, Amount, Count, json_option, print_found, target_argument
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.fitting.request import FitRequest
from batchwright.ranks.place import is_first_rank
from batchwright.targets import find_target
from batchwright.units import parse_whole_number, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batchwright.fitting.fit_result import Fit


# The job behind `fit --then`: checked before anything runs, filled in and run at each answer.

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


@click.command("fit")
@target_argument
@click.option("--on", help=f"Where probes run: cpu, cuda, cuda:1, mps, xpu; or a card.  {DEFAULT_DEVICE}")
@click.option("--memory", type=Amount(), metavar="AMOUNT", help="A budget such as 16GiB.  [default: what is free]")
@click.option("--limit", type=Count(), help="The largest micro-batch of interest.")
@click.option(
    "--shape",
    "shapes",
    metavar="NAME=VALUE,...",
    multiple=True,
    help="An argument of the workload's batch; several values give a table.",
)
@click.option("--shape-from", type=Count(least=0), help="Leave out values of --shape below this one.")
@click.option("--start-at", "start", type=Count(), help="Start from this size and grow by half.")
@click.option("--scale", metavar="TABLE", help="Start from a share of --limit: max_crops:2=1.0,4=0.8,else=0.5.")
@click.option("--powers-of-two", is_flag=True, help="Try powers of two only.")
@click.option("--max-trials", type=Count(), help="Probes per shape.  [default: 40; 5 with --start-at or --scale]")
@click.option("--margin", default="0%", show_default=True, help="Memory to keep free: 5% or 0.05.")
@click.option("--evaluate", is_flag=True, help="Also find the size for evaluation.")
@click.option("--accumulate-to", type=Count(), metavar="EFFECTIVE", help="Also plan this effective batch.")
@click.option("--devices", type=Count(), help="Data-parallel ranks: for --accumulate-to, and on a card to be one of.")
@click.option("--allocator", metavar="SETTINGS", help="On a card: as in PYTORCH_ALLOC_CONF.")
@click.option("--accumulation", type=Count(), help="Micro-batches per optimizer step.  [default: 1]")
@click.option("--clip-norm", type=float, help="Clip the gradient norm, as the step would.")
@click.option("--then", metavar="CMD", help="Run a job at the answer, for each shape: {micro_batch} is filled in.")
@click.option("--no-cache", is_flag=True, help="Neither start from a remembered answer nor remember this one.")
@json_option
def command(target: str, as_json: bool, **options: Any) -> int:
    """Find the largest micro-batch that fits, by running it.

    TARGET is a workload: path.py:function or module:function. Each probe runs full steps in a process of its own.

    \b
    batchwright fit train.py:workload --memory 16GiB --limit 64
    batchwright fit train.py:workload --on cuda --margin 5% --accumulate-to 256
    batchwright fit eval.py:workload --shape max_crops=2,4,6 --then "python eval.py -b {micro_batch} -c {max_crops}"
    """
    shapes = start_from(parse_shapes(options["shapes"]), options["shape_from"])
    margin = parse_margin(options["margin"])
    if options["then"] is not None:
        check_job(options["then"], ["micro_batch", *shapes])
    is_card = options["on"] is not None and names_a_card(options["on"])
    if options["devices"] is not None and options["accumulate_to"] is None and not is_card:
        raise InvalidInputError("--devices changes nothing without --accumulate-to.", remedy="--accumulate-to 256")
    if options["allocator"] is not None and not is_card:
        raise InvalidInputError("--allocator is for a simulated card.", remedy="--on a100-40gb")
    check_question(shapes, options)
    find_target(target)
    # Under torchrun every rank comes to the same answer; one of them tells it.
    speaks = is_first_rank()
    found = _find(target, shapes, margin, options, speaks=speaks)
    if not speaks:
        return 0
    print_found(found, as_json=as_json)
    rows = found.shapes or (found,)
    if options["then"] is not None:
        run_jobs(options["then"], rows, as_json=as_json)
    return int(any(row.micro_batch is None for row in rows))


def _find(target: str, shapes: dict[str, list[int]], margin: float, options: dict[str, Any], *, speaks: bool) -> Fit:
    from batchwright.fitting.fit import fit
    from batchwright.fitting.fit_result import name_shape
    from batchwright.report.display import Progress

    # With several micro-batches per optimizer step the gradients of one live through the forward of the next.
    accumulates = options["accumulate_to"] is not None and options["accumulation"] is None
    with Progress() as progress:
        say = progress.say if speaks else lambda _: None
        say(f"loading {target}")
        found = fit(
            target,
            on=options["on"],
            memory=options["memory"],
            limit=options["limit"],
            shapes=shapes,
            start=options["start"],
            scale=options["scale"],
            powers_of_two=options["powers_of_two"],
            max_trials=options["max_trials"],
            margin=margin,
            evaluate=options["evaluate"],
            accumulation=2 if accumulates else options["accumulation"] or 1,
            clip_norm=options["clip_norm"],
            **_card_options(options),
            cache=not options["no_cache"],
            progress=say,
        )
        for row in found.shapes or (found,):
            size = "no micro-batch fits" if row.micro_batch is None else f"using micro-batch {row.micro_batch:,}"
            say(f"{size} for {name_shape(row.shape)}" if row.shape else size)
    if options["accumulate_to"] is None:
        return found
    note = "probes accumulated 2 micro-batches per optimizer step, so that gradients are there during forward"
    return _planned(found, options["accumulate_to"], options["devices"], note if accumulates else "")


def _card_options(options: dict[str, Any]) -> dict[str, Any]:
    """What is asked of a simulated card only."""
    if options["on"] is None or not names_a_card(options["on"]):
        return {}
    return {"allocator": options["allocator"], "devices": options["devices"] or 1}


def _planned(found: Fit, effective_batch: int, devices: int | None, note: str) -> Fit:
    from dataclasses import replace

    from batchwright.planning.plan import plan

    def with_plan(row: Fit) -> Fit:
        if row.micro_batch is None:
            return row
        return replace(row, plan=plan(effective_batch, micro_batch=row.micro_batch, devices=devices or row.ranks))

    planned = replace(with_plan(found), shapes=tuple(map(with_plan, found.shapes)))
    return replace(planned, notes=(*planned.notes, note)) if note else planned


def parse_shapes(pairs: Iterable[str]) -> dict[str, list[int]]:
    """Read `max_crops=2,4,6` and its like.

    >>> parse_shapes(["max_crops=2,4,6", "seq_len=512"])
    {'max_crops': [2, 4, 6], 'seq_len': [512]}
    """
    shapes: dict[str, list[int]] = {}
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidInputError(
                "--shape is written name=value or name=value,value, such as seq_len=512,1024; "
                f"received {shortened(pair)}."
            )
        if name in shapes:
            raise InvalidInputError(f"--shape {name} was given twice.", remedy=f"--shape {name}=2,4,6")
        numbers = [parse_whole_number(value, f"--shape {name}") for value in values.split(",")]
        if len(set(numbers)) < len(numbers):
            raise InvalidInputError(f"--shape {name} names a value twice; received {shortened(numbers)}.")
        shapes[name] = numbers
    return shapes


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


def check_question(shapes: dict[str, list[int]], options: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other, as the library would once it is loaded."""
    named = ("limit", "start", "scale", "powers_of_two", "max_trials")
    FitRequest.read(**{name: options[name] for name in named}, shapes=shapes)


def parse_margin(text: str) -> float:
    """Read a share as people write it.

    >>> parse_margin("5%"), parse_margin("0.05")
    (0.05, 0.05)
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise InvalidInputError(
            f"--margin must be at least 0% and below 100%, such as 5% or 0.05; received {shortened(text)}."
        )
    return share
