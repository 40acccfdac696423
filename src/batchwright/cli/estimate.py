"""`batchwright estimate`."""

from __future__ import annotations

from typing import Any

import click

from batchwright.cli.options import Count, json_option, print_found, target_argument
from batchwright.errors import InvalidInputError
from batchwright.units import parse_whole_number, shortened


@click.command("estimate")
@target_argument
@click.option("--micro-batch", type=Count(), default=1, show_default=True, help="Samples in one forward and backward.")
@click.option("--on", help="Where the step would run: cpu, a card, or all cards.  [default: the card here, else cpu]")
@click.option("--shape", "shapes", metavar="NAME=VALUE", multiple=True, help="An argument of the workload's batch.")
@click.option("--accumulation", type=Count(), default=1, show_default=True, help="Micro-batches per optimizer step.")
@click.option("--clip-norm", type=float, help="Clip the gradient norm, as the step would.")
@click.option("--routing", default="balanced", show_default=True, help="How experts share tokens: balanced or worst.")
@click.option("--max", "find_max", is_flag=True, help="Find the largest micro-batch within --memory, or on the card.")
@click.option("--memory", metavar="AMOUNT", help="A budget such as 16GiB, for --max; on a card, what it has.")
@click.option("--allocator", metavar="SETTINGS", help="On a card: as in PYTORCH_ALLOC_CONF.")
@click.option("--snapshot", metavar="FILE", help="On a card: write PyTorch's memory snapshot of the predicted run.")
@click.option("--calibrate", metavar="RUN.json", help="On a card: set fixed parts right by a run of bw.record_run.")
@click.option("--what-if", is_flag=True, help="Also print what each change of the set-up would save.")
@click.option("--seq-len", type=Count(), help="Named models: tokens per sample.  [default: 1024]")
@click.option("--precision", help="Named models: fp32, bf16 or mixed.  [default: bf16]")
@click.option("--optimizer", help="Named models: adamw, sgd, ...  [default: adamw]")
@click.option("--checkpointing", is_flag=True, help="Named models: with activation checkpointing.")
@click.option("--zero", type=Count(least=0), help="Named models: ZeRO stage 1, 2 or 3 over --devices.")
@click.option("--devices", type=Count(), help="Data-parallel ranks: for --zero, or on a card, for the workload's wrap.")
@click.option("--tuning", help="Named models: full, lora or qlora.  [default: full]")
@json_option
@click.pass_context
def command(ctx: click.Context, /, target: str, as_json: bool, **options: Any) -> int:
    """Predict the peak memory of a training step before it runs.

    TARGET is a workload (path.py:function or module:function), or a model by name, for which formulas answer at once.

    \b
    batchwright estimate train.py:workload --micro-batch 8
    batchwright estimate train.py:workload --max --memory 16GiB --what-if
    batchwright estimate train.py:workload --micro-batch 8 --on a100-40gb
    batchwright estimate train.py:workload --on all
    batchwright estimate llama-3-8b --seq-len 4096 --precision bf16 --zero 3 --devices 8
    """

    given = {name for name in options if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    is_workload = ":" in target or target.endswith(".py")
    answer = _traced(target, options, given) if is_workload else _by_formula(target, options, given)
    print_found(answer, as_json=as_json)
    return int(answer.fits is False)


_FOR_NAMED = {"seq_len", "precision", "optimizer", "checkpointing", "zero", "tuning"}
_FOR_WORKLOADS = {
    "shapes",
    "accumulation",
    "clip_norm",
    "routing",
    "find_max",
    "memory",
    "what_if",
    "on",
    "allocator",
    "snapshot",
    "calibrate",
}


def _traced(target: str, options: dict[str, Any], given: set[str]) -> Any:
    _refuse(given & _FOR_NAMED, "a workload", "a model by name")
    is_asking = options["find_max"] or options["memory"] is not None
    is_host = options["on"] == "cpu" or (options["on"] is None and is_asking and _runs_on_the_cpu())
    if is_host and options["find_max"] != (options["memory"] is not None):
        raise InvalidInputError("--max and --memory go together.", remedy="--max --memory 16GiB")
    if options["find_max"] and "micro_batch" in given:
        raise InvalidInputError("--max finds the micro-batch, so --micro-batch is left out.")
    on_all = options["on"] == "all"
    if on_all and given & {"find_max", "memory", "what_if", "snapshot", "calibrate"}:
        raise InvalidInputError(
            "--on all asks every card by itself: --max, --memory, --what-if, --snapshot and --calibrate have no say."
        )
    from batchwright.memory.estimate import estimate, estimate_every_card
    from batchwright.report.display import Progress
    from batchwright.targets import load_workload

    step = ("micro_batch", "accumulation", "clip_norm", "routing", "allocator")
    told: dict[str, Any] = {name: options[name] for name in step} | {"shape": parse_shape(options["shapes"])}
    with Progress() as progress:
        progress.say(f"loading {target}")
        workload = load_workload(target)
        if on_all:
            return estimate_every_card(workload, progress=progress.say, devices=options["devices"] or 1, **told)
        more = {name: options[name] for name in ("on", "memory", "find_max", "what_if", "snapshot", "calibrate")}
        return estimate(workload, progress=progress.say, devices=options["devices"] or 1, **told, **more)


def _runs_on_the_cpu() -> bool:
    from batchwright.memory.on_card import default_place

    return default_place()[0] == "cpu"


def _by_formula(target: str, options: dict[str, Any], given: set[str]) -> Any:
    _refuse(given & _FOR_WORKLOADS, "a model by name", "a workload")
    from batchwright.memory.formulas import estimate_named

    if (options["zero"] or 0) > 0 and (options["devices"] or 1) < 2:
        raise InvalidInputError(
            "--zero shards over devices: it needs --devices of at least 2.", remedy="--zero 3 --devices 8"
        )
    if options["devices"] is not None and options["zero"] is None:
        raise InvalidInputError("--devices changes nothing without --zero.", remedy="--zero 3 --devices 8")
    chosen = {name: options[name] for name in (*_FOR_NAMED, "devices") if options[name] is not None}
    return estimate_named(target, micro_batch=options["micro_batch"], **{"seq_len": 1024, **chosen})


def _refuse(names: set[str], kind: str, other: str) -> None:
    if names:
        flags = {"shapes": "--shape", "find_max": "--max"}
        said = ", ".join(sorted(flags.get(name, f"--{name.replace('_', '-')}") for name in names))
        raise InvalidInputError(f"{said} belongs to {other}, and the target is {kind}.")


def parse_shape(pairs: tuple[str, ...]) -> dict[str, int]:
    """Read `seq_len=512` and its like.

    >>> parse_shape(("seq_len=512", "crops=4"))
    {'seq_len': 512, 'crops': 4}
    """
    shape = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidInputError(f"--shape is written name=value, such as seq_len=512; received {shortened(pair)}.")
        shape[name] = parse_whole_number(value, f"--shape {name}")
    return shape
