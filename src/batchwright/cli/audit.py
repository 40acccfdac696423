"""`batchwright audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from batchwright.cli.options import (
    Command,
    parse_shape,
    settle_target,
    shared,
    target_or_script,
)
from batchwright.report.display import print_result, report_progress
from batchwright.targets import find_target, load_workload

if TYPE_CHECKING:
    from batchwright.auditing.audit_result import Audit
    from batchwright.scripts.script import Script

_MOVED = {
    "--splits": 'in Python: bw.audit(workload, splits="4x2,3+3+2")',
    "--dtype": 'in Python: bw.audit(workload, dtype="fp64")',
    "--dropout": 'in Python: bw.audit(workload, dropout="replayed")',
    "--batch-flag": "{micro_batch} in its place: -- python train.py --bs {micro_batch}",
    "--accumulation-flag": "{accumulation} in its place: -- python train.py --accum {accumulation}",
    "--cwd": "batchwright audit started in that folder",
}


@click.command("audit", cls=Command, moved=_MOVED)
@target_or_script
@shared("--micro-batch", default=2)
@shared("--accumulation", default=4)
@shared("--shape")
@shared("--show-output")
@shared("--json")
@click.pass_context
def command(ctx: click.Context, /, target: str | Script, as_json: bool, **options: Any) -> int:
    """Compare the accumulated gradient with that of the big batch.

    TARGET is a workload: path.py:function or module:function. Its `window`, your own accumulation loop, is judged; if
    it has none, its loss under plain accumulation. Behind -- stands your own command instead: it is run at one batch
    and at the split, and the gradients before the first step are compared. Exits with status 1 if they differ.

    \b
    batchwright audit train.py:workload --micro-batch 2 --accumulation 4
    batchwright audit -- python train.py --batch-size {micro_batch} --grad-accum {accumulation}

    In Python, bw.audit also takes splits (such as "4x2,1x8,3+3+2"), dtype and dropout.
    """
    options["shape"] = parse_shape(options.pop("shapes"))
    target = settle_target(ctx, target, options, for_scripts=("--micro-batch", "--accumulation", "--shape"))
    answer = _audit(target, options) if isinstance(target, str) else _audit_script(target, options)
    print_result(answer, as_json=as_json)
    return 0 if answer.exact else 1


def _audit_script(script: Script, options: dict[str, Any]) -> Audit:
    from batchwright.scripts.audit_script import audit_script

    with report_progress(script) as say:
        return audit_script(script, **options, progress=say)


def _audit(target: str, options: dict[str, Any]) -> Audit:
    find_target(target)

    from batchwright.auditing.audit import audit_workload

    with report_progress(target) as say:
        workload = load_workload(target)
        say("comparing gradients")
        return audit_workload(workload, **options)
