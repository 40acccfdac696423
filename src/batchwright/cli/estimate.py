"""`batchwright estimate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from batchwright.cli.options import (
    PLACES,
    RANKS_ON_CARD,
    Command,
    own_command,
    parse_shape,
    settle_target,
    shared,
    target_or_script,
    typed_options,
)
from batchwright.errors import InvalidInputError
from batchwright.report.display import print_result, report_progress
from batchwright.targets import load_workload
from batchwright.timing.collectives import read_network

if TYPE_CHECKING:
    from batchwright.scripts.script import Script

_NAMED = "batchwright recommend NAME --memory 24GiB, or in Python bw.estimate_named(NAME, ...)"
_MOVED = {
    "--clip-norm": "in Python: bw.estimate(workload, clip_norm=1.0)",
    "--routing": 'in Python: bw.estimate(workload, routing="worst")',
    "--allocator": 'in Python: bw.estimate(workload, on="a100-40gb", allocator="expandable_segments:True")',
    "--snapshot": 'in Python: bw.estimate(workload, on="a100-40gb", snapshot="run.pickle")',
    **dict.fromkeys(
        ("--price-per-hour", "--samples"), "batchwright tune TARGET --on CARD --samples 1000000 --price-per-hour 2.5"
    ),
    "--calibrate": 'in Python: bw.estimate(workload, on="a100-40gb", calibrate="run.json")',
    **dict.fromkeys(("--seq-len", "--precision", "--optimizer", "--checkpointing", "--zero", "--tuning"), _NAMED),
}

_FOR_SCRIPTS = (
    *("--on", "--memory", "--micro-batch", "--accumulation", "--shape", "--devices", "--network", "--max", "--steps"),
)


@click.command("estimate", cls=Command, moved=_MOVED)
@target_or_script
@shared("--micro-batch", default=1)
@shared("--on", help=f"{PLACES} all: every card.  [default: the card here, else cpu]")
@shared("--memory", help="A memory budget, such as 16GiB, for --max; on a card, the memory it has.")
@click.option("--context", metavar="SIZE", help="What CUDA takes of a card beside PyTorch on your machine: 1.2GiB.")
@shared("--devices", default=1, help=RANKS_ON_CARD)
@shared("--network")
@shared("--shape")
@shared("--accumulation", default=1)
@click.option("--max", "find_max", is_flag=True, help="Find the largest micro-batch within --memory, or on the card.")
@click.option("--what-if", is_flag=True, help="Also print what each change of the set-up would save.")
@shared("--steps", default=None, help="Optimizer steps to train your own command for, until it is cut.  [default: 2]")
@own_command()
@shared("--json")
@click.pass_context
def command(ctx: click.Context, /, target: str | Script, as_json: bool, **options: Any) -> int:
    """Predict the peak memory of a training step before it runs, and on a card its time.

    TARGET is a workload: path.py:function or module:function. Behind -- stands your own command instead: it runs
    unmodified until its second optimizer step (or --steps). For a model by name, use `recommend`.

    \b
    batchwright estimate train.py:workload --micro-batch 8
    batchwright estimate train.py:workload --max --memory 16GiB --what-if
    batchwright estimate train.py:workload --micro-batch 8 --on a100-40gb
    batchwright estimate train.py:workload --on all
    batchwright estimate --on a100-40gb -- python train.py --batch-size 12

    In Python, bw.estimate also takes clip_norm, routing, allocator, snapshot and calibrate.
    """
    typed = typed_options(ctx)
    target = settle_target(ctx, target, options, for_scripts=_FOR_SCRIPTS)
    read_network(options["network"])
    steps = options.pop("steps")
    if not isinstance(target, str):
        script = target if steps is None else replace(target, steps=steps)
        answer = _run_script(script, options, typed)
        print_result(answer, as_json=as_json)
        return int(not answer.fits)
    if steps is not None:
        raise InvalidInputError(
            "--steps is for a command of your own: a workload is one step.", remedy="-- python train.py"
        )
    is_workload = ":" in target or target.endswith(".py")
    answer = _trace(target, options, typed) if is_workload else _use_formula(target, options["micro_batch"], typed)
    print_result(answer, as_json=as_json)
    return int(answer.fits is False)


def _run_script(script: Script, options: dict[str, Any], typed: set[str]) -> Any:
    if options["on"] == "all":
        raise InvalidInputError("--on all cannot be used with a command of your own.", remedy="--on a100-40gb")
    from batchwright.scripts.estimate_script import estimate_script

    def value_of(name: str) -> Any:
        return options[name] if f"--{name.replace('_', '-')}" in typed else None

    with report_progress(script) as say:
        return estimate_script(
            script,
            on=options["on"],
            micro_batch=value_of("micro_batch"),
            accumulation=value_of("accumulation"),
            shape=parse_shape(options["shapes"]),
            memory=options["memory"],
            find_max=options["find_max"],
            devices=options["devices"],
            network=options["network"],
            progress=say,
        )


def _trace(target: str, options: dict[str, Any], typed: set[str]) -> Any:
    wants_size = options["find_max"] or options["memory"] is not None
    is_host = options["on"] == "cpu" or (options["on"] is None and wants_size and _runs_on_cpu())
    if is_host and options["find_max"] != (options["memory"] is not None):
        raise InvalidInputError("--max and --memory go together.", remedy="--max --memory 16GiB")
    if options["find_max"] and "--micro-batch" in typed:
        raise InvalidInputError("--max finds the micro-batch, so --micro-batch is left out.")
    refused = typed & {"--max", "--memory", "--what-if", "--context"}
    if options["on"] == "all" and refused:
        raise InvalidInputError(f"--on all cannot be combined with {', '.join(sorted(refused))}.")
    from batchwright.memory.estimate import estimate, estimate_every_card

    shape = parse_shape(options.pop("shapes"))
    with report_progress(target) as say:
        workload = load_workload(target)
        if options["on"] == "all":
            step = {name: options[name] for name in ("micro_batch", "accumulation", "devices", "network")}
            return estimate_every_card(workload, shape=shape, progress=say, **step)
        return estimate(workload, shape=shape, progress=say, **options)


def _runs_on_cpu() -> bool:
    from batchwright.memory.on_card import default_place

    return default_place()[0] == "cpu"


def _use_formula(name: str, micro_batch: int, typed: set[str]) -> Any:
    refused = sorted(typed - {"TARGET", "--micro-batch", "--json"})
    if refused:
        raise InvalidInputError(
            f"{', '.join(refused)} cannot be used with a model by name, such as {name!r}.",
            remedy=f"batchwright recommend {name} --memory 24GiB",
        )
    from batchwright.memory.formulas import estimate_named

    answer = estimate_named(name, micro_batch=micro_batch, seq_len=1024)
    click.echo(
        f"{name} is a model by name, at 1,024 tokens in bf16 with AdamW: "
        f"`batchwright recommend {name} --memory 24GiB` takes other settings.",
        err=True,
    )
    return answer
