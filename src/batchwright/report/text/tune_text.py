"""A whole run as text: the answer, what would change it, and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.display import Columns, draw_table, or_dash
from batchwright.report.page.run_reading import in_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.tuning.tune import Tuned


def summarize_tuned(tuned: Tuned) -> str:
    """Say the answer in one line."""
    advised = tuned.run["recommendation"]
    if "skipped" in advised:
        return f"no recommendation: {advised['skipped']}"
    split = (
        f"micro-batch {advised['micro_batch']:,} x accumulation {advised['accumulation']:,} x devices "
        f"{advised['devices']:,} = effective batch {advised['effective_batch']:,}"
    )
    good = advised["range_within_5_percent"]
    text = f"{split} ({advised['source']})"
    if good is None:
        return text
    if not good[0] <= advised["effective_batch"] <= good[1]:
        return f"{text}; {advised['best_effective_batch']:,} would be soonest"
    return text if good[0] == good[1] else f"{text}; {good[0]:,} to {good[1]:,} are as good"


def tuned_columns(tuned: Tuned) -> Columns:
    """What the answer is, and what other set-ups would give."""
    advised = tuned.run["recommendation"]
    if "skipped" in advised:
        return []
    rows = [{"change": "recommended", "time_ratio": 1.0 if advised["seconds_per_step"] else None, **advised}]
    rows += advised["changes"]
    return [
        ("set-up", [row["change"] for row in rows]),
        *((name.replace("_", " "), [or_dash("{:,}".format, row[name]) for row in rows]) for name in _SIZES),
        ("time to\nthe loss", [or_dash("{:.2f}x".format, row["time_ratio"]) for row in rows]),
    ]


_SIZES = ("micro_batch", "accumulation", "effective_batch")


def tuned_remarks(tuned: Tuned) -> Iterator[str]:
    """What the answer rests on, a line each, and what is missing."""
    run = tuned.run
    advised = run["recommendation"]
    if "skipped" not in advised:
        if "command" in advised:
            yield f"type: {advised['command']}"
        rate = advised["learning_rate"]
        if rate is not None:
            line = f"{rate['now']:g} -> {rate['recommended']:.3g} [{rate['low']:.3g}, {rate['high']:.3g}]"
            if rate["at_batch"]:
                line += f" if {rate['now']:g} suits batch {rate['at_batch']:,}; another is named as the noise batch"
            yield f"learning rate: {line}."
        yield from (f"why: {reason}." for reason in advised["reasons"])
        yield from (f"assumed: {text}." for text in advised["assumes"])
        yield from (f"{change['change']}: {change['note']}." for change in advised["changes"] if change["note"])
        yield from (f"note: {note}." for note in advised["notes"])
    yield from (f"throughput: {note}." for note in run["throughput"].get("notes", ()))
    if not_covered := run["fit"].get("restored", {}).get("not_covered"):
        yield f"not restored: {', '.join(not_covered)}."
    audit = run["audit"]
    if isinstance(audit.get("exact"), bool):
        verdict = (
            "exact" if audit["exact"] else f"NOT the gradient of the big batch ({audit['cause'] or 'cause unknown'})"
        )
        yield f"accumulation: {verdict}, for {audit['what']}."
        if not audit["exact"] and audit.get("remedy"):
            yield f"accumulation: {audit['remedy']}"
    for name, section in run.items():
        why = section.get("skipped") if isinstance(section, dict) else None
        # Without a recommendation its reason is the summary, and the plan's is the same.
        if isinstance(why, str) and why != "not asked for" and name not in ("plan", "recommendation"):
            yield f"{name}: {in_one_line(why)}"


def draw_tuned(tuned: Tuned) -> RenderableType:
    """Draw the answer for a terminal."""
    return draw_table(summarize_tuned(tuned), tuned_columns(tuned), tuned_remarks(tuned), left=1)
