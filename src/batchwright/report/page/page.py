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
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from batchwright.report.page import figures
from batchwright.report.page.device_sections import draw_devices
from batchwright.report.page.markup import (
    MARKS,
    Html,
    breakable,
    capitalized,
    element,
    figure_with,
    html,
    joined,
    mark,
    missing,
    remarks,
    sentence,
    table,
    with_note,
)
from batchwright.report.page.memory_sections import draw_fit, draw_memory
from batchwright.report.page.run_reading import (
    Data,
    good_range,
    mapping_in,
    number_in,
    rows_in,
    section_of,
    text_in,
    texts_in,
    why_missing,
)
from batchwright.report.page.time_sections import draw_critical, draw_speed, draw_time
from batchwright.units import counted


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
    texts = [(name, text) for name in mapping_in(record, "configs") if (text := text_in(record, "configs", name))]
    if not texts:
        return [missing("nothing was recommended")]
    return [_draw_config(name, text, number == 0) for number, (name, text) in enumerate(texts)]


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
    "race": "the race",
    "rate": "a sweep of learning rates",
    "plan": "the plan",
    "recommendation": "the recommendation",
}


def _draw_rests(record: Data | None, run: Data) -> list[str]:
    # Trained only where asked for, so a file may say nothing of them.
    expected = [name for name in STAGES if name not in ("branches", "race", "rate") or name in run]
    gone = [f"{STAGES[name]}: {why_missing(run, name)}" for name in expected if section_of(run, name) is None]
    rule = text_in(record, "learning_rate", "rule")
    lists = (
        ("Why", texts_in(record, "reasons")),
        ("Assumed", texts_in(record, "assumes")),
        ("The learning rate", [rule] if rule else []),
        ("Not in this run", gone),
        ("Notes", texts_in(record, "notes")),
    )
    pieces = [joined([element("h3", title), remarks(lines)]) for title, lines in lists if lines]
    marks = (element("div", element("dt", mark(name)), element("dd", words)) for name, words in MARKS.items())
    return [*pieces, element("h3", "The marks"), element("dl", *marks, class_="marks")]


def draw_footer(*runs: Data) -> Html:
    """Return the last lines: of each run versions, date, how long it took, and the command."""
    return element("footer", *(line for run in runs for line in _footer_lines(run)))


def _footer_lines(run: Data) -> Iterator[Html]:
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
    yield element("p", " \N{MIDDLE DOT} ".join(part for part in first if part))
    if command:
        yield element("p", element("code", command))


_VERDICTS: dict[bool | None, tuple[str, str, str]] = {
    True: ("Yes.", "The accumulated gradient is that of the big batch", "good"),
    False: ("No.", "The accumulated gradient is not that of the big batch", "bad"),
    None: ("Not known.", "The audit came to no verdict", "open"),
}


def _draw_audit(record: Data, run: Data) -> list[str]:
    lines = [
        element("p", element("b", f"{name}: "), words)
        for name, key in (("Why", "explanation"), ("What to do", "remedy"))
        if (words := text_in(record, key))
    ]
    return [_verdict(record), *lines, _splits(record), remarks(texts_in(record, "notes"))]


def _verdict(record: Data) -> Html:
    exact, source = record.get("exact"), text_in(record, "source") or "measured"
    word, claim, style = _VERDICTS[exact if isinstance(exact, bool) else None]
    compared = text_in(record, "compared_with") or "the big batch"
    if exact is False and record.get("random") is True:
        word, claim, style = (
            "Not known.",
            "The loss is random, and the accumulated gradient cannot be judged",
            "open",
        )
    elif exact is False and record.get("gradient_exact") is True:
        claim = f"The accumulated gradient is that of {compared}, but the loop is not right"
    elif exact is True:
        claim = f"The accumulated gradient is that of {compared}"
    error, dtype = number_in(record, "relative_error"), text_in(record, "dtype")
    pieces: list[str] = [element("b", word, class_=f"verdict {style}"), " ", claim]
    if error is not None:
        pieces += [
            ": they differ by ",
            figure_with(figures.small(error), source),
            f" of its length{f' in {dtype}' if dtype else ''}",
        ]
    cause, what = text_in(record, "cause"), text_in(record, "what")
    pieces += [f". The cause is {cause}" if cause else "", f". Looked at: {what}" if what else ""]
    return sentence(*pieces)


_EXACT = {"True": "exact", "False": "differs"}


def _splits(record: Data) -> Html:
    rows = rows_in(record, "splits")
    if not rows:
        return Html("")
    mine = mark(text_in(record, "source"))
    columns: list[tuple[str, list[str]]] = [
        ("split", [with_note(text_in(row, "split") or figures.UNKNOWN, text_in(row, "note")) for row in rows]),
        ("verdict", [_EXACT.get(str(row.get("exact")), figures.UNKNOWN) for row in rows]),
        (joined(["length over the big batch's ", mine]), [figures.exact(number_in(r, "ratio"), ".6f") for r in rows]),
        (joined(["relative error ", mine]), [figures.small(number_in(row, "relative_error")) for row in rows]),
    ]
    return table(columns, label="Table of splits that were compared", words=2, stacks=True)


def _draw_changes(record: Data | None, run: Data) -> list[str]:
    rows = rows_in(record, "changes")
    savings = [row for row in rows_in(section_of(run, "estimate"), "what_if") if text_in(row, "change")]
    if not rows and not savings:
        reason = why_missing(run, "recommendation") if record is None else "no other set-up was tried"
        return [missing(reason)]
    return [_changes(rows), _savings(savings, run)]


def _changes(rows: list[Data]) -> Html:
    if not rows:
        return Html("")
    columns: list[tuple[str, list[str]]] = [
        (_MICRO_BATCH, [figures.count(number_in(row, "micro_batch")) for row in rows]),
        ("accumulation", [figures.count(number_in(row, "accumulation")) for row in rows]),
        ("effective batch", [figures.count(number_in(row, "effective_batch")) for row in rows]),
        ("time to the loss", [figures.times(number_in(row, "time_ratio")) for row in rows]),
    ]
    names = ("with", [_set_up(row) for row in rows])
    return table([names, *_known(columns)], label="Table of other set-ups", stacks=True)


_MICRO_BATCH = element("span", "micro-batch", class_="word")


def _known(columns: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Leave out the columns in which nothing is known."""
    return [(name, cells) for name, cells in columns if any(cell != figures.UNKNOWN for cell in cells)]


def _set_up(row: Data) -> Html:
    note = text_in(row, "note")
    known = any(number_in(row, key) is not None for key in ("micro_batch", "effective_batch", "time_ratio"))
    source = mark(text_in(row, "source")) if known or any(map(str.isdigit, note)) else ""
    return with_note(joined([text_in(row, "change") or figures.UNKNOWN, " ", source]), note)


def _savings(savings: list[Data], run: Data) -> Html:
    if not savings:
        return Html("")
    record = section_of(run, "estimate")
    size = number_in(record, "micro_batch")
    where = "" if size is None else f" at micro-batch {figures.count(size)}"
    names = [with_note(text_in(row, "change"), text_in(row, "note")) for row in savings]
    peaks = [figures.memory(number_in(row, "peak_bytes")) for row in savings]
    now = number_in(record, "peak_bytes", "allocated")
    title = element("h3", f"What each would leave of the allocated peak{where} ", mark(text_in(record, "source")))
    columns = [("with", ["as it is", *names]), ("peak", [figures.memory(now), *peaks])]
    return joined([title, table(columns, label="Table of peaks under each change", style="first-chosen")])


def _draw_plan(record: Data, run: Data) -> list[str]:
    reason = text_in(record, "reason")
    lead = sentence(capitalized(reason)) if reason else Html("")
    rows = rows_in(record, "table")
    shown = table(_columns(record, rows), label="Table of splits", words=0, style="first-chosen") if rows else Html("")
    return [lead, shown, _last_window(record), remarks(texts_in(record, "notes"))]


def _columns(record: Data, rows: list[Data]) -> list[tuple[str, list[str]]]:
    source = text_in(record, "source") or "formula"
    # A time by a fitted model is no measurement of that split.
    timed = "predicted" if text_in(record, "time_model", "source") == "measured" else "formula"
    times = [
        f"{'~' if row.get('is_extrapolated') is True else ''}{figures.times(number_in(row, 'relative_time'))}"
        for row in rows
    ]
    columns: list[tuple[str, list[str]]] = [
        (_marked(_MICRO_BATCH, source), [_size(row) for row in rows]),
        (_marked("accumulation", source), [figures.count(number_in(row, "accumulation")) for row in rows]),
        (_marked("effective batch", source), [figures.count(number_in(row, "effective_batch")) for row in rows]),
        (_marked("forwards an epoch", source), [figures.count(number_in(row, "forwards_per_epoch")) for row in rows]),
        (_marked("updates an epoch", source), [figures.count(number_in(row, "updates_per_epoch")) for row in rows]),
        (_marked("time", timed), times),
        (_marked("activations", source), [figures.times(number_in(row, "relative_activations")) for row in rows]),
        (_marked("peak", "formula"), [figures.memory(number_in(row, "peak_bytes")) for row in rows]),
    ]
    return _known(columns)


def _marked(name: str, source: str) -> Html:
    return joined([name, " ", mark(source)])


def _size(row: Data) -> str:
    size, least = number_in(row, "micro_batch"), number_in(row, "smallest_micro_batch")
    uneven = "" if least in (None, size) else f"{figures.count(least)} to "
    return f"{uneven}{figures.count(size)}"


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
    return sentence(*pieces, class_=None) if rest or dropped else Html("")


def answer_sentence(run: Data) -> str:
    """Say the answer in one sentence of plain text.

    >>> answer_sentence({"recommendation": {"micro_batch": 8, "accumulation": 4, "devices": 2, "effective_batch": 64}})
    'Train with an effective batch of 64: micro-batches of 8, 4 of them per step on each of 2 devices.'
    """
    advice = section_of(run, "recommendation")
    effective, micro, accumulation, devices = _four(advice)
    if effective is not None:
        split = "" if micro is None else f": {_split(micro, accumulation, devices)}"
        rate = number_in(advice, "learning_rate", "recommended")
        at = "" if rate is None else f", at a learning rate of {figures.small(rate)}"
        return f"Train with an effective batch of {figures.count(effective)}{split}{at}."
    if micro is not None:
        return f"Train with micro-batches of {figures.count(micro)}; which effective batch is best was not found."
    fits = number_in(section_of(run, "fit"), "micro_batch")
    if fits is not None:
        return f"The largest micro-batch that fits is {figures.count(fits)}; no batch was recommended."
    return "No batch was recommended."


def draw_answer(run: Data) -> Html:
    """Return the top of the page: the sentence, the product and the numbers around it."""
    advice = section_of(run, "recommendation")
    unbroken = joined(answer_sentence(run).split("micro-batches"), element("span", "micro-batches", class_="word"))
    pieces = [element("p", unbroken, class_="answer")]
    if run.get("finished") is False:
        pieces.append(
            element("p", "This run was not finished. What it had measured until then is here.", class_="missing")
        )
    if advice is None:
        pieces.append(missing(why_missing(run, "recommendation")))
    else:
        pieces += [_product(run, advice), _around(run, advice)]
    return element("section", *pieces, id="answer", aria_label="The answer")


def _split(micro: float, accumulation: float | None, devices: float | None) -> str:
    sizes = f"micro-batches of {figures.count(micro)}"
    steps = "" if accumulation is None else f", {figures.count(accumulation)} of them per step"
    if accumulation == 1:
        steps = ", one per step"
    if devices is None:
        return f"{sizes}{steps}"
    return f"{sizes}{steps} on {'one device' if devices == 1 else f'each of {figures.count(devices)} devices'}"


def _four(advice: Data | None) -> tuple[float | None, float | None, float | None, float | None]:
    effective, micro, accumulation, devices = (
        number_in(advice, key) for key in ("effective_batch", "micro_batch", "accumulation", "devices")
    )
    return effective, micro, accumulation, devices


def _product(run: Data, advice: Data) -> Html:
    effective, micro, accumulation, devices = _four(advice)
    source = text_in(advice, "source")
    terms = (
        ("", micro, "micro-batch", _micro_batch_source(run)),
        ("\N{MULTIPLICATION SIGN}", accumulation, "accumulation", "formula"),
        ("\N{MULTIPLICATION SIGN}", devices, "devices", "given"),
        ("=", effective, "effective batch", source),
    )
    items = (
        element(
            "li",
            element("span", sign, class_="sign", aria_hidden=None if sign else "true"),
            element("b", figures.count(value)),
            element("span", name, class_="name"),
            mark(where) if value is not None else Html(""),
        )
        for sign, value, name, where in terms
    )
    return element("ul", *items, class_="product")


def _micro_batch_source(run: Data) -> str:
    """Return where the recommended micro-batch comes from: measured only where a step of at least its size ran."""
    advice, fit = section_of(run, "recommendation"), section_of(run, "fit")
    size, fits = number_in(advice, "micro_batch"), number_in(fit, "micro_batch")
    if size is not None and fits is not None and size <= fits:
        return "measured" if mapping_in(run, "fit").get("certified") is True else "predicted"
    return text_in(advice, "source")


def _around(run: Data, advice: Data) -> Html:
    """Return the numbers that go with the answer; those nobody knows are left out."""
    facts: list[tuple[str, str]] = []
    rate = mapping_in(advice, "learning_rate")
    if (value := number_in(rate, "recommended")) is not None:
        span = figures.interval(*(figures.small(number_in(rate, end)) for end in ("low", "high")))
        source = text_in(rate, "source") or "formula"
        facts.append(("learning rate", joined([figure_with(figures.small(value), source, span), _was(rate)])))
    if (ends := good_range(run)) is not None:
        text = " to ".join(figures.count(end) for end in ends)
        chosen = number_in(advice, "effective_batch")
        is_inside = chosen is None or ends[0] <= chosen <= ends[1]
        name = f"{'as good' if is_inside else 'soonest'}, within 5\N{NO-BREAK SPACE}%"
        facts.append((name, figure_with(text, "predicted")))
    critical = mapping_in(advice, "critical_batch")
    if critical:
        facts.append(("critical batch", _critical(critical, text_in(advice, "critical_batch_from"))))
    if (step := number_in(advice, "seconds_per_step")) is not None:
        where = "measured" if _was_timed(run, advice) else "predicted"
        rate_text = number_in(advice, "samples_per_second")
        facts.append(("one step takes", figure_with(figures.seconds(step), where)))
        if rate_text is not None:
            facts.append(("samples per second", figure_with(figures.count(rate_text), where)))
    rows = (element("div", element("dt", name), element("dd", value)) for name, value in facts)
    return element("dl", *rows, class_="facts") if facts else Html("")


def _was(rate: Data) -> Html:
    now, batch = number_in(rate, "now"), number_in(rate, "at_batch")
    if now is None:
        return Html("")
    where = "" if batch is None else f" at batch {figures.count(batch)}"
    return element("span", f"was {figures.small(now)}{where}", class_="aside")


def _critical(critical: Data, where_from: str) -> Html:
    value, low, high = (figures.count(number_in(critical, key)) for key in ("value", "low", "high"))
    unit = text_in(critical, "unit") or "samples"
    # An upper end that is not resolved: the lower one is what is known, as everywhere in batchwright.
    shown = f"at least {low}" if high == figures.UNKNOWN and low not in ("0", figures.UNKNOWN) else value
    span = "" if shown != value else figures.interval(low, high)
    aside = element("span", f"{unit}{f', by {where_from}' if where_from else ''}", class_="aside")
    return joined([figure_with(shown, "measured", span), aside])


def _was_timed(run: Data, advice: Data) -> bool:
    wanted = [number_in(advice, key) for key in ("micro_batch", "accumulation")]
    timed = section_of(run, "throughput")
    if text_in(timed, "source") == "predicted":
        return False
    rows = rows_in(timed, "rows") if number_in(timed, "devices") == number_in(advice, "devices") else []
    return any([number_in(row, key) for key in ("micro_batch", "accumulation")] == wanted for row in rows)


def subtitle(run: Data) -> str:
    """Say what was tuned and where, in one line."""
    work = section_of(run, "workload")
    size, devices = number_in(work, "num_parameters"), number_in(work, "devices")
    trained, samples = number_in(work, "num_trained"), number_in(work, "samples")
    parts = [
        f"on {text_in(work, 'on')}" if text_in(work, "on") else "",
        counted(int(devices), "device") if devices else "",
        f"{_large(size)} parameters" if size else "",
        f"{_large(trained)} of them trained" if trained and trained != size else "",
        text_in(work, "optimizer"),
        counted(int(samples), "sample") if samples else "",
    ]
    return " \N{MIDDLE DOT} ".join(part for part in parts if part)


def _large(value: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return figures.count(value)


# Name, heading, the stage of the run that is shown, and how: from its record, and the run, to the pieces.
_SECTIONS: tuple[tuple[str, str, str, Callable[[Any, Data], list[str]]], ...] = (
    ("memory", "What a step holds in memory", "estimate", draw_memory),
    ("fit", "What fits", "fit", draw_fit),
    ("speed", "How fast it runs", "throughput", draw_speed),
    ("critical", "How large a batch pays", "noise", draw_critical),
    ("time", "Which batch gets there soonest", "recommendation", draw_time),
    ("devices", "How many devices pay", "recommendation", draw_devices),
    ("plan", "Every way to split it", "plan", _draw_plan),
    ("changes", "What would change the answer", "recommendation", _draw_changes),
    ("audit", "Is accumulation right?", "audit", _draw_audit),
    ("config", "What to paste", "recommendation", _draw_configs),
    ("rests", "What this rests on", "recommendation", _draw_rests),
)
# Also if their stage is not in the run: then the record is None.
_ALWAYS_DRAWN = ("critical", "changes", "rests")


def _draw_sections(run: Data) -> Iterator[Html]:
    """Draw every section; one whose stage is not in the run says why in its place."""
    for name, heading, stage, draw in _SECTIONS:
        record, title = section_of(run, stage), element("h2", heading, id=f"{name}-heading")
        is_drawn = record is not None or name in _ALWAYS_DRAWN
        pieces = draw(record, run) if is_drawn else [missing(why_missing(run, stage))]
        if not pieces or (name == "devices" and not is_drawn):
            continue  # most runs compare no devices
        yield element("section", title, *pieces, id=name, aria_labelledby=f"{name}-heading")


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
            element("main", draw_answer(run), *_draw_sections(run)),
            draw_footer(run),
        ]
    )
    return frame_page(f"{name}: the batch size", body)


def frame_page(title: str, body: Html) -> str:
    """Return a whole page around its body."""
    return _FRAME.format(policy=html(_policy()), title=html(title), style=style_sheet(), body=body, script=SCRIPT)


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
