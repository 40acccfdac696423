"""A run as one HTML page.

Promises:
- the file is whole by itself: it asks nothing of the network, and its policy forbids it to;
- every section is there, in the same order; one that was skipped says why in its place;
- text from the run cannot become HTML, and no script but our own few lines can run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from batchwright.report.page import figures
from batchwright.report.page.answer import draw_answer, subtitle
from batchwright.report.page.markup import (
    MARKS,
    Html,
    Section,
    breakable,
    element,
    figure_with,
    html,
    joined,
    mark,
    missing,
    remarks,
    section,
    table,
)
from batchwright.report.page.memory_sections import FIT, MEMORY
from batchwright.report.page.run_reading import (
    Data,
    mapping_in,
    number_in,
    rows_in,
    section_of,
    text_in,
    texts_in,
    why_missing,
)
from batchwright.report.page.time_sections import CRITICAL, SPEED, TIME


@cache
def style_sheet() -> str:
    """Return page.css without its comments.

    >>> "/*" in style_sheet(), "prefers-color-scheme: dark" in style_sheet()
    (False, True)
    """
    text = files("batchwright.report.page").joinpath("page.css").read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/\s*", "", text, flags=re.DOTALL).strip()


# All the script there is. Without it, or where a browser keeps the clipboard from files, the text can be selected.
SCRIPT = """
for (const button of document.querySelectorAll("button.copy")) {
  const text = button.parentElement.querySelector("pre");
  button.hidden = false;
  button.addEventListener("click", async () => {
    let copied = false;
    try {
      await navigator.clipboard.writeText(text.textContent);
      copied = true;
    } catch {
      const range = document.createRange();
      range.selectNodeContents(text);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      copied = document.execCommand("copy");
    }
    button.firstChild.textContent = copied ? "Copied" : "Selected: press Ctrl+C";
    setTimeout(() => { button.firstChild.textContent = "Copy"; }, 2000);
  });
}
""".strip()


def _draw_configs(record: Data, run: Data) -> list[str]:
    texts = {name: text_in(record, "configs", name) for name in mapping_in(record, "configs")}
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        return [missing("nothing was recommended")]
    return [_draw_config(name, text, number == 0) for number, (name, text) in enumerate(texts.items())]


CONFIGS = Section("config", "What to paste", "recommendation", _draw_configs)


def _draw_config(name: str, text: str, is_first: bool) -> Html:
    # Out of sight until the script runs; the rest of its name is for those who hear it.
    words = joined([element("span", "Copy"), element("span", f" the settings for {name}", class_="unseen")])
    button = Html(f'<button type="button" class="copy" hidden>{words}</button>')
    code = element("pre", element("code", text), tabindex="0", role="region", aria_label=f"Settings for {name}")
    inside = joined([element("summary", name), element("div", button, code, class_="paste")])
    return Html(f"<details{' open' if is_first else ''}>{inside}</details>")


# As a person calls them; the order in which a run is made.
STAGES = {
    "workload": "what was tuned",
    "estimate": "the predicted memory",
    "fit": "the largest micro-batch",
    "throughput": "the throughput",
    "audit": "the audit of accumulation",
    "noise": "the critical batch",
    "branches": "short branches",
    "plan": "the plan",
    "recommendation": "the recommendation",
}


def _draw_rests(record: Data | None, run: Data) -> list[str]:
    # Branches are trained only where asked for, so a file may say nothing of them.
    expected = [name for name in STAGES if name != "branches" or name in run]
    gone = [f"{STAGES[name]}: {why_missing(run, name)}" for name in expected if section_of(run, name) is None]
    rule = text_in(record, "learning_rate", "rule")
    lists = (
        ("Why", texts_in(record, "reasons")),
        ("Taken for granted", texts_in(record, "assumes")),
        ("The learning rate", [rule] if rule else []),
        ("Not in this run", gone),
        ("To know", texts_in(record, "notes")),
    )
    pieces = [joined([element("h3", title), remarks(lines)]) for title, lines in lists if lines]
    return [*pieces, _marks()]


RESTS = Section("rests", "What this rests on", "recommendation", _draw_rests, is_always_drawn=True)


def _marks() -> Html:
    rows = (element("div", element("dt", mark(name)), element("dd", words)) for name, words in MARKS.items())
    return joined([element("h3", "The marks"), element("dl", *rows, class_="marks")])


def draw_footer(run: Data) -> Html:
    """Return the last lines: versions, date, how long it took, and the command."""
    work = section_of(run, "workload")
    versions = [
        f"{name} {version}"
        for name, key in (("batchwright", "batchwright"), ("PyTorch", "torch"), ("Python", "python"))
        if (version := text_in(work, key))
    ]
    took = [number_in(work, "seconds", stage) for stage in mapping_in(work, "seconds")]
    in_all = sum(seconds for seconds in took if seconds is not None)
    first = [*versions, figures.date(text_in(run, "created")), f"took {figures.seconds(in_all)}" if in_all else ""]
    target = text_in(work, "target")
    command = text_in(run, "command") or text_in(work, "command") or (f"batchwright tune {target}" if target else "")
    return element(
        "footer",
        element("p", " \N{MIDDLE DOT} ".join(part for part in first if part)),
        element("p", element("code", command)) if command else Html(""),
    )


_VERDICTS: dict[bool | None, tuple[str, str, str]] = {
    True: ("Yes.", "The accumulated gradient is that of the big batch", "good"),
    False: ("No.", "The accumulated gradient is not that of the big batch", "bad"),
    None: ("Not known.", "The audit came to no verdict", "open"),
}


def _draw_audit(record: Data, run: Data) -> list[str]:
    pieces: list[str] = [_verdict(record)]
    for name, key in (("Why", "explanation"), ("What to do", "remedy")):
        words = text_in(record, key)
        if words:
            pieces.append(element("p", element("b", f"{name}: "), words))
    return [*pieces, _splits(record), remarks(texts_in(record, "notes"))]


AUDIT = Section("audit", "Is accumulation right?", "audit", _draw_audit)


def _verdict(record: Data) -> Html:
    exact, source = record.get("exact"), text_in(record, "source") or "measured"
    word, sentence, style = _VERDICTS[exact if isinstance(exact, bool) else None]
    compared = text_in(record, "compared_with") or "the big batch"
    if exact is False and record.get("random") is True:
        word, sentence, style = (
            "Not known.",
            "The loss is random, and the accumulated gradient cannot be judged",
            "open",
        )
    elif exact is False and record.get("gradient_exact") is True:
        sentence = f"The accumulated gradient is that of {compared}, but the loop is not right"
    elif exact is True:
        sentence = f"The accumulated gradient is that of {compared}"
    error, dtype = number_in(record, "relative_error"), text_in(record, "dtype")
    pieces: list[str] = [element("b", word, class_=f"verdict {style}"), " ", sentence]
    if error is not None:
        pieces += [
            ": they differ by ",
            figure_with(figures.small(error), source),
            f" of its length{f' in {dtype}' if dtype else ''}",
        ]
    cause, what = text_in(record, "cause"), text_in(record, "what")
    pieces.append(f". The cause is {cause}" if cause else "")
    pieces.append(f". Looked at: {what}" if what else "")
    return element("p", joined(pieces), ".", class_="lead")


def _splits(record: Data) -> Html:
    rows = rows_in(record, "splits")
    if not rows:
        return Html("")
    verdicts = {True: "exact", False: "differs"}
    shown = [
        verdicts.get(exact, figures.UNKNOWN) if isinstance(exact := row.get("exact"), bool) else figures.UNKNOWN
        for row in rows
    ]
    mine = mark(text_in(record, "source"))
    names = [
        joined([text_in(row, "split") or figures.UNKNOWN, element("span", text_in(row, "note"), class_="under")])
        for row in rows
    ]
    columns: list[tuple[str, list[str]]] = [
        ("split", list(names)),
        ("verdict", shown),
        (joined(["length over the big batch's ", mine]), [_ratio(number_in(row, "ratio")) for row in rows]),
        (joined(["relative error ", mine]), [figures.small(number_in(row, "relative_error")) for row in rows]),
    ]
    return table(columns, label="Table of splits that were compared", words=2, stacks=True)


def _ratio(value: float | None) -> str:
    return figures.UNKNOWN if value is None else f"{value:.6f}"


def _draw_changes(record: Data | None, run: Data) -> list[str]:
    rows = rows_in(record, "changes")
    savings = [row for row in rows_in(section_of(run, "estimate"), "what_if") if text_in(row, "change")]
    if not rows and not savings:
        reason = why_missing(run, "recommendation") if record is None else "no other set-up was looked at"
        return [missing(reason)]
    return [_changes(rows), _savings(savings, run)]


CHANGES = Section("changes", "What would change the answer", "recommendation", _draw_changes, is_always_drawn=True)


def _changes(rows: list[Data]) -> Html:
    if not rows:
        return Html("")
    columns: list[tuple[str, list[str]]] = [("with", [_with_note(row) for row in rows])]
    for name, key in (
        (element("span", "micro-batch", class_="word"), "micro_batch"),
        ("accumulation", "accumulation"),
        ("effective batch", "effective_batch"),
    ):
        cells = [figures.count(number_in(row, key)) for row in rows]
        columns += [(name, cells)] if any(cell != figures.UNKNOWN for cell in cells) else []
    times = [number_in(row, "time_ratio") for row in rows]
    if any(ratio is not None for ratio in times):
        sign = "\N{MULTIPLICATION SIGN}"
        columns.append(
            ("time to the loss", [figures.UNKNOWN if t is None else f"{figures.ratio(t)}{sign}" for t in times])
        )
    return table(columns, label="Table of other set-ups", stacks=True)


def _with_note(row: Data) -> Html:
    note = text_in(row, "note")
    known = any(number_in(row, key) is not None for key in ("micro_batch", "effective_batch", "time_ratio"))
    return joined(
        [
            text_in(row, "change") or figures.UNKNOWN,
            " ",
            mark(text_in(row, "source")) if known or any(map(str.isdigit, note)) else "",
            element("span", note, class_="under") if note else "",
        ]
    )


def _savings(savings: list[Data], run: Data) -> Html:
    if not savings:
        return Html("")
    record = section_of(run, "estimate")
    size = number_in(record, "micro_batch")
    where = "" if size is None else f" at micro-batch {figures.count(size)}"
    names = [joined([text_in(row, "change"), element("span", text_in(row, "note"), class_="under")]) for row in savings]
    peaks = [figures.memory(number_in(row, "peak_bytes")) for row in savings]
    now = number_in(record, "peak_bytes", "allocated")
    title = element("h3", f"What each would leave of the allocated peak{where} ", mark(text_in(record, "source")))
    columns = [("with", ["as it is", *names]), ("peak", [figures.memory(now), *peaks])]
    return joined([title, table(columns, label="Table of peaks under each change", style="first-chosen")])


def _draw_plan(record: Data, run: Data) -> list[str]:
    reason = text_in(record, "reason")
    lead = element("p", f"{reason[:1].upper()}{reason[1:].rstrip('.')}.", class_="lead") if reason else Html("")
    rows = rows_in(record, "table")
    shown = table(_columns(record, rows), label="Table of splits", words=0, style="first-chosen") if rows else Html("")
    return [lead, shown, _last_window(record), remarks(texts_in(record, "notes"))]


PLAN = Section("plan", "Every way to split it", "plan", _draw_plan)


def _columns(record: Data, rows: list[Data]) -> list[tuple[str, list[str]]]:
    source = text_in(record, "source") or "formula"
    # A time by a fitted model is no measurement of that split.
    timed = "predicted" if text_in(record, "time_model", "source") == "measured" else "formula"
    columns = [
        (element("span", "micro-batch", class_="word"), source, [_size(row) for row in rows]),
        ("accumulation", source, [figures.count(number_in(row, "accumulation")) for row in rows]),
        ("effective batch", source, [figures.count(number_in(row, "effective_batch")) for row in rows]),
        ("forwards an epoch", source, [figures.count(number_in(row, "forwards_per_epoch")) for row in rows]),
        ("updates an epoch", source, [figures.count(number_in(row, "updates_per_epoch")) for row in rows]),
        ("time", timed, [f"{_tilde(row)}{_times(row, 'relative_time')}" for row in rows]),
        ("activations", source, [_times(row, "relative_activations") for row in rows]),
        ("peak", "formula", [figures.memory(number_in(row, "peak_bytes")) for row in rows]),
    ]
    known = [column for column in columns if any(cell != figures.UNKNOWN for cell in column[2])]
    return [(joined([name, " ", mark(where)]), cells) for name, where, cells in known]


def _size(row: Data) -> str:
    size, least = number_in(row, "micro_batch"), number_in(row, "smallest_micro_batch")
    uneven = "" if least in (None, size) else f"{figures.count(least)} to "
    return f"{uneven}{figures.count(size)}"


def _times(row: Data, key: str) -> str:
    value = number_in(row, key)
    return figures.UNKNOWN if value is None else f"{figures.ratio(value)}\N{MULTIPLICATION SIGN}"


def _tilde(row: Data) -> str:
    return "~" if row.get("is_extrapolated") is True else ""


def _last_window(record: Data) -> Html:
    """Say what an epoch is made of; the samples that do not fill a step are the part people get wrong."""
    samples, window = number_in(record, "samples"), mapping_in(record, "last_window")
    if samples is None:
        return Html("")
    pieces: list[str] = ["An epoch of ", figure_with(figures.count(samples), "given"), " samples"]
    rest, dropped = number_in(window, "samples"), number_in(record, "dropped_samples")
    if rest:
        ends = "and still updates" if window.get("update") is True else "without an update"
        pieces.append(f" ends in a step of {figures.count(rest)} samples {ends}")
    if dropped:
        pieces.append(f"{'; ' if rest else ' '}leaves out {figures.count(dropped)}")
    return element("p", joined(pieces), ".") if rest or dropped else Html("")


_SECTIONS = (MEMORY, FIT, SPEED, CRITICAL, TIME, PLAN, CHANGES, AUDIT, CONFIGS, RESTS)


def draw_section(part: Section, run: Data) -> Html:
    """Draw a section; one whose stage is not in the run says why in its place."""
    record = section_of(run, part.stage)
    if record is None and not part.is_always_drawn:
        pieces: list[str] = [missing(why_missing(run, part.stage))]
    else:
        pieces = part.draw(record, run)
    below = [] if part.below is None else [part.below(run)]
    return section(part.name, part.heading, *pieces, *below)


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
            element("main", draw_answer(run), *(draw_section(part, run) for part in _SECTIONS)),
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
