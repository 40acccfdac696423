"""`batchwright recommend`."""

from __future__ import annotations

from dataclasses import replace

import click

from batchwright.cli.options import Count, shared, to_flags
from batchwright.report.display import print_result


@click.command("recommend")
@click.argument("sizes", nargs=-1, required=True, metavar="SIZE...")
@shared("--memory", type=str, multiple=True, help="A memory budget, such as 16GiB; a list is fine.")
@click.option("--on", multiple=True, metavar="CARD", help="A card instead, such as a100-40gb; a list is fine.")
@click.option("--task", default="classification", show_default=True, help="classification, generation or qa.")
@click.option("--tuning", default="lora", show_default=True, help="full, lora or qlora.")
@click.option("--seq-len", type=Count(), default=512, show_default=True, help="Tokens of the longest sample.")
@click.option("--precision", default="bf16", show_default=True, help="fp32, bf16 or mixed.")
@click.option("--checkpointing", is_flag=True, help="Recompute each layer in the backward pass.")
@shared("--json")
@click.pass_context
def command(
    ctx: click.Context,
    sizes: tuple[str, ...],
    memory: tuple[str, ...],
    on: tuple[str, ...],
    task: str,
    tuning: str,
    seq_len: int,
    precision: str,
    checkpointing: bool,
    as_json: bool,
) -> int:
    """Recommend a micro-batch from a model's size and the memory there is.

    SIZE is a number of parameters, such as 7b, or a model by name, such as qwen2.5-7b.

    \b
    batchwright recommend 7b --memory 24GiB --task generation
    batchwright recommend 7b,13b,30b --memory 8GB,16GB,24GB,40GB --tuning qlora
    batchwright recommend 7b --on a100-40gb,rtx-4090-24gb --task generation
    batchwright recommend qwen2.5-7b --memory 80GiB --tuning full --seq-len 2048 --checkpointing

    In Python, bw.estimate_named predicts the peak of a model by name, also with ZeRO and other optimizers.
    """
    from batchwright.memory.recommend import recommend

    recommendation = recommend(
        _listed(sizes),
        _listed(memory),
        on=_listed(on),
        task=task,
        tuning=tuning,
        seq_len=seq_len,
        precision=precision,
        checkpointing=checkpointing,
    )
    in_flags = (replace(answer, remedy=to_flags(answer.remedy, ctx.command)) for answer in recommendation.answers)
    print_result(replace(recommendation, answers=tuple(in_flags)), as_json=as_json)
    return 0 if recommendation.fits else 1


def _listed(values: tuple[str, ...]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]
