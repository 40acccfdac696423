"""A run as one HTML page.

Promises:
- the file is whole by itself: it asks nothing of the network, and its policy forbids it to;
- every section is there, in the same order; one that was skipped says why in its place;
- text from the run cannot become HTML, and no script but our own few lines can run.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from batchwright.report.page.answer import draw_answer, subtitle
from batchwright.report.page.audit_section import draw_audit
from batchwright.report.page.changes_section import draw_changes
from batchwright.report.page.config_section import SCRIPT, draw_configs
from batchwright.report.page.critical_section import draw_critical
from batchwright.report.page.fit_section import draw_fit
from batchwright.report.page.markup import breakable, element, html, joined
from batchwright.report.page.memory_section import draw_memory
from batchwright.report.page.plan_section import draw_plan
from batchwright.report.page.reading import section_of, text_in
from batchwright.report.page.rests_section import draw_footer, draw_rests
from batchwright.report.page.speed_section import draw_speed
from batchwright.report.page.style import style_sheet
from batchwright.report.page.time_section import draw_time

if TYPE_CHECKING:
    from batchwright.report.page.reading import Data

_SECTIONS = (
    draw_memory,
    draw_fit,
    draw_speed,
    draw_critical,
    draw_time,
    draw_plan,
    draw_changes,
    draw_audit,
    draw_configs,
    draw_rests,
)


def draw_page(run: Data) -> str:
    """Draw a run as one HTML page, from its JSON as `json.load` returns it.

    >>> page = draw_page({"workload": {"name": "<tiny>"}, "fit": {"skipped": "no time"}})
    >>> "&lt;tiny&gt;" in page, "Not in this run: no time." in page
    (True, True)
    """
    name = text_in(section_of(run, "workload"), "name") or "a run"
    head = joined(
        [
            element("p", "batchwright", class_="brand"),
            element("h1", breakable(name)),
            element("p", subtitle(run), class_="subtitle"),
        ]
    )
    body = joined(
        [
            element("header", head),
            element("main", draw_answer(run), *(draw(run) for draw in _SECTIONS)),
            draw_footer(run),
        ]
    )
    return _FRAME.format(
        policy=html(_policy()), title=html(f"{name}: the batch size"), style=style_sheet(), body=body, script=SCRIPT
    )


def _policy() -> str:
    # The hash lets this one script run and no other, wherever it may have come from.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'"
    return f"{nothing}; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="batchwright">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""
