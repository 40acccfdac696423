"""`batchwright advise`."""

from __future__ import annotations

import click

from batchwright.cli.options import Count, json_option, print_found


@click.command("advise")
@click.argument("problem", metavar="[out-of-memory|unstable|slow]")
@click.option("--micro-batch", type=Count(), required=True, help="Micro-batch as it is now.")
@click.option("--accumulation", type=Count(), default=1, show_default=True, help="Accumulation as it is now.")
@click.option("--devices", type=Count(), default=1, show_default=True, help="Data-parallel ranks.")
@click.option(
    "--optimizer", default="adamw", show_default=True, help="Decides how the learning rate follows the batch."
)
@click.option("--learning-rate", metavar="RATE", help="Learning rate as it is now.")
@click.option("--max-micro-batch", type=Count(), help="Largest micro-batch that fits, if known.")
@click.option("--critical-batch", type=Count(), help="Critical batch, if known.")
@json_option
def command(
    problem: str,
    micro_batch: int,
    accumulation: int,
    devices: int,
    optimizer: str,
    learning_rate: str | None,
    max_micro_batch: int | None,
    critical_batch: int | None,
    as_json: bool,
) -> int:
    """Say what to change when out of memory, unstable or slow.

    \b
    batchwright advise out-of-memory --micro-batch 8
    batchwright advise unstable --micro-batch 4 --accumulation 4 --devices 5
    batchwright advise slow --micro-batch 4 --accumulation 4 --max-micro-batch 8 --learning-rate 1e-5
    """
    from batchwright.planning.advice import advise
    from batchwright.planning.learning_rate import checked_learning_rate

    advice = advise(
        problem,
        micro_batch=micro_batch,
        accumulation=accumulation,
        devices=devices,
        optimizer=optimizer,
        learning_rate=None if learning_rate is None else checked_learning_rate(learning_rate),
        max_micro_batch=max_micro_batch,
        critical_batch=critical_batch,
    )
    print_found(advice, as_json=as_json)
    return 0
