"""`batchwright audit`."""

from __future__ import annotations

import click

from batchwright.cli.options import Command, parse_shape, shared, target_argument
from batchwright.cli.streams import print_result, report_progress

_MOVED = {
    "--splits": 'in Python: bw.audit(workload, splits="4x2,3+3+2")',
    "--dtype": 'in Python: bw.audit(workload, dtype="fp64")',
    "--dropout": 'in Python: bw.audit(workload, dropout="replayed")',
}


@click.command("audit", cls=Command, moved=_MOVED)
@target_argument
@shared("--micro-batch", default=2)
@shared("--accumulation", default=4)
@shared("--shape")
@shared("--json")
def command(target: str, micro_batch: int, accumulation: int, shapes: tuple[str, ...], as_json: bool) -> int:
    """Compare the accumulated gradient with that of the big batch.

    TARGET is a workload: path.py:function or module:function. Its `window`, your own accumulation loop, is judged; if
    it has none, its loss under plain accumulation. Exits with status 1 if the gradients differ.

    \b
    batchwright audit train.py:workload --micro-batch 2 --accumulation 4

    In Python, bw.audit also takes splits (such as "4x2,1x8,3+3+2"), dtype and dropout.
    """
    from batchwright.targets import find_target

    shape = parse_shape(shapes)
    find_target(target)

    from batchwright.auditing.audit import audit_workload
    from batchwright.targets import load_workload

    with report_progress(target) as say:
        workload = load_workload(target)
        say("comparing gradients")
        answer = audit_workload(workload, micro_batch=micro_batch, accumulation=accumulation, shape=shape)
    print_result(answer, as_json=as_json)
    return 0 if answer.exact else 1
