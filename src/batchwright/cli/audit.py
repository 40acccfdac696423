"""`batchwright audit`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

import click

from batchwright.cli.options import Count, json_option, print_found, target_argument


@click.command("audit")
@target_argument
@click.option("--micro-batch", type=Count(), default=2, show_default=True, help="Samples in one forward and backward.")
@click.option("--accumulation", type=Count(), default=4, show_default=True, help="Micro-batches per optimizer step.")
@click.option("--splits", metavar="LIST", help="Splits to try instead, such as 4x2,3+3+2.")
@click.option("--shape", "shapes", metavar="NAME=VALUE", multiple=True, help="An argument of the workload's batch.")
@click.option("--dtype", default="fp32", show_default=True, help="Compare in fp32 or fp64.")
@click.option("--dropout", default="off", show_default=True, help="off, or replayed micro-batch by micro-batch.")
@json_option
def command(
    target: str,
    micro_batch: int,
    accumulation: int,
    splits: str | None,
    shapes: tuple[str, ...],
    dtype: str,
    dropout: str,
    as_json: bool,
) -> int:
    """Compare the accumulated gradient with that of the big batch.

    TARGET is a workload (path.py:function or module:function). Its `window`, the user's own accumulation loop, is
    judged; without one, its loss under plain accumulation. Ends with 1 where the gradients differ.

    \b
    batchwright audit train.py:workload --micro-batch 2 --accumulation 4
    batchwright audit train.py:workload --splits 4x2,1x8,3+3+2 --dtype fp64
    """
    from batchwright.auditing.audit import read_splits
    from batchwright.cli.estimate import parse_shape
    from batchwright.targets import find_target

    read_splits(splits, micro_batch, accumulation)
    shape = parse_shape(shapes)
    find_target(target)

    from batchwright.auditing.audit import audit_workload
    from batchwright.report.display import Progress
    from batchwright.targets import load_workload

    # What the user's code prints must not get into the answer.
    with Progress() as progress, redirect_stdout(sys.stderr):
        progress.say(f"loading {target}")
        workload = load_workload(target)
        progress.say("comparing gradients")
        found = audit_workload(
            workload,
            micro_batch=micro_batch,
            accumulation=accumulation,
            splits=splits,
            dtype=dtype,
            dropout=dropout,
            shape=shape,
        )
    print_found(found, as_json=as_json)
    return 0 if found.exact else 1
