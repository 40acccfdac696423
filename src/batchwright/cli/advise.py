"""`batchwright advise`."""

from __future__ import annotations

import click

from batchwright.cli.options import Command, Count, shared
from batchwright.report.display import print_result

_MOVED = {
    "--optimizer": 'in Python: bw.advise("slow", micro_batch=8, optimizer="sgd")',
    "--critical-batch": 'in Python: bw.advise("slow", micro_batch=8, critical_batch=256)',
}


@click.command("advise", cls=Command, moved=_MOVED)
@click.argument("problem", metavar="[out-of-memory|unstable|slow]")
@shared("--micro-batch", required=True)
@shared("--accumulation", default=1)
@shared("--devices", default=1)
@click.option("--learning-rate", metavar="RATE", help="Learning rate as it is now.")
@click.option("--max-micro-batch", type=Count(), help="Largest micro-batch that fits, if known.")
@shared("--json")
def command(
    problem: str,
    micro_batch: int,
    accumulation: int,
    devices: int,
    learning_rate: str | None,
    max_micro_batch: int | None,
    as_json: bool,
) -> int:
    """Say what to change when out of memory, unstable or slow.

    \b
    batchwright advise out-of-memory --micro-batch 8
    batchwright advise unstable --micro-batch 4 --accumulation 4 --devices 5
    batchwright advise slow --micro-batch 4 --accumulation 4 --max-micro-batch 8 --learning-rate 1e-5

    In Python, bw.advise also takes the optimizer, which decides how the learning rate follows the batch, and the
    critical batch, beyond which none is advised.
    """
    from batchwright.planning.advice import advise
    from batchwright.planning.learning_rate import checked_learning_rate

    advice = advise(
        problem,
        micro_batch=micro_batch,
        accumulation=accumulation,
        devices=devices,
        learning_rate=None if learning_rate is None else checked_learning_rate(learning_rate),
        max_micro_batch=max_micro_batch,
    )
    print_result(advice, as_json=as_json)
    return 0
