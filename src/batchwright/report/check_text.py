"""The check of a config as text: the verdict first, then the numbers, then what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.planning.config_check import ConfigCheck

_KINDS = {"deepspeed": "DeepSpeed config", "transformers": "TrainingArguments"}


def summarize_check(check: ConfigCheck) -> str:
    """Say the verdict in one line."""
    verdict = "agrees" if check.agrees else "disagrees"
    return f"{check.path}: {_KINDS[check.kind]} {verdict} for {counted(check.devices, 'device')}"


def check_remarks(check: ConfigCheck) -> Iterator[str]:
    """Say what the verdict rests on and what to change, a line each."""
    for finding in check.findings:
        yield f"  {finding}"
    if check.changes:
        # DeepSpeed's three numbers agree again after any one of the changes; arguments need all of theirs.
        yield "change one of these:" if check.kind == "deepspeed" and len(check.changes) > 1 else "change:"
    for change in check.changes:
        yield f"  {change}"


def draw_check(check: ConfigCheck) -> RenderableType:
    """Draw the check for a terminal."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(summarize_check(check), style="bold"), *(Text(remark) for remark in check_remarks(check)))
