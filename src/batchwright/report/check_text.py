"""The check of a config as text: the verdict first, then the numbers, then what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from batchwright.planning.config_check import ConfigCheck


def check_lines(check: ConfigCheck) -> list[str]:
    """Say the verdict, what it rests on and what to change, a line each."""
    verdict = "agrees" if check.agrees else "disagrees"
    kind = "DeepSpeed config" if check.kind == "deepspeed" else "TrainingArguments"
    lines = [f"{check.path}: {kind} {verdict} for {check.devices:,} device{'s' if check.devices != 1 else ''}"]
    lines += [f"  {finding}" for finding in check.findings]
    if check.changes:
        lines.append("change one of these:" if len(check.changes) > 1 and check.kind == "deepspeed" else "change:")
        lines += [f"  {change}" for change in check.changes]
    return lines


def draw_check(check: ConfigCheck) -> RenderableType:
    """Draw the check for a terminal."""
    from rich.console import Group
    from rich.text import Text

    first, *rest = check_lines(check)
    return Group(Text(first, style="bold"), *(Text(line) for line in rest))
