"""The answer: one sentence, the product it stands for, and the numbers around it."""

from __future__ import annotations

from batchwright.report.page import figures
from batchwright.report.page.markup import Html, element, figure_with, joined, mark, missing
from batchwright.report.page.run_reading import (
    Data,
    good_range,
    mapping_in,
    number_in,
    rows_in,
    section_of,
    text_in,
    why_missing,
)
from batchwright.units import counted


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
        return f"Train with an effective batch of {figures.count(effective)}{split}{_at_rate(rate)}."
    if micro is not None:
        return f"Train with micro-batches of {figures.count(micro)}; which effective batch is best was not found."
    fits = number_in(section_of(run, "fit"), "micro_batch")
    if fits is not None:
        return f"The largest micro-batch that fits is {figures.count(fits)}; no batch was recommended."
    return "No batch was recommended."


def draw_answer(run: Data) -> Html:
    """Return the top of the page: the sentence, the product and the numbers around it."""
    advice = section_of(run, "recommendation")
    pieces = [element("p", _unbroken(answer_sentence(run)), class_="answer")]
    if run.get("finished") is False:
        pieces.append(
            element("p", "This run was not finished. What it had measured until then is here.", class_="missing")
        )
    if advice is None:
        pieces.append(missing(why_missing(run, "recommendation")))
    else:
        pieces += [_product(run, advice), _around(run, advice)]
    return element("section", *pieces, id="answer", aria_label="The answer")


def _unbroken(sentence: str) -> Html:
    word = "micro-batches"
    return joined(sentence.split(word), element("span", word, class_="word"))


def _split(micro: float, accumulation: float | None, devices: float | None) -> str:
    sizes = f"micro-batches of {figures.count(micro)}"
    steps = "" if accumulation is None else f", {figures.count(accumulation)} of them per step"
    if accumulation == 1:
        steps = ", one per step"
    if devices is None:
        return f"{sizes}{steps}"
    return f"{sizes}{steps} on {'one device' if devices == 1 else f'each of {figures.count(devices)} devices'}"


def _at_rate(rate: float | None) -> str:
    return "" if rate is None else f", at a learning rate of {figures.small(rate)}"


def _four(advice: Data | None) -> tuple[float | None, float | None, float | None, float | None]:
    effective, micro, accumulation, devices = (
        number_in(advice, key) for key in ("effective_batch", "micro_batch", "accumulation", "devices")
    )
    return effective, micro, accumulation, devices


def _product(run: Data, advice: Data) -> Html:
    effective, micro, accumulation, devices = _four(advice)
    source = text_in(advice, "source")
    terms = (
        ("", micro, "micro-batch", micro_batch_source(run)),
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


def micro_batch_source(run: Data) -> str:
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
