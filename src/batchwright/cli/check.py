"""`batchwright check`."""

from __future__ import annotations

import click

from batchwright.cli.options import Command, shared
from batchwright.report.display import print_result, report_progress


@click.command("check", cls=Command)
@shared("--json")
def command(as_json: bool) -> int:
    """Try every part on this machine, and say what to paste into an issue.

    Says what this machine is, which devices and versions it has, whether each part works, and what a small training
    step takes on each device: predicted, then measured. About a minute. Names no user, host or path of yours.

    \b
    batchwright check
    batchwright check --json > check.json
    """
    from batchwright.checkup.check import check_machine

    with report_progress("every part") as say:
        answer = check_machine(progress=say)
    print_result(answer, as_json=as_json)
    return 0 if answer.works else 1
