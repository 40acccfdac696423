"""Numbers as the page prints them; what is not known is a dash."""

from __future__ import annotations

from datetime import datetime

from batchwright.units import format_bytes

_MONTHS = "January February March April May June July August September October November December"
UNKNOWN = "\N{EN DASH}"


def count(value: float | None) -> str:
    """Write a size or a count.

    >>> count(1032), count(212.4), count(3.14159), count(None) == UNKNOWN
    ('1,032', '212', '3.14', True)
    """
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def short(value: float) -> str:
    """Write a size beside an axis, where there is little room.

    >>> short(8), short(2500), short(250_000), short(10_000_000), short(0.25)
    ('8', '2,500', '250k', '10M', '0.25')
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size and value >= 1e4:
            return f"{value / size:.4g}{unit}"
    return count(value)


def ratio(value: float | None) -> str:
    """Write a factor.

    >>> ratio(1.9), ratio(0.934), ratio(12.34)
    ('1.90', '0.93', '12.3')
    """
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if 0.095 <= abs(value) < 9.995 else f"{value:.3g}"


def times(value: float | None) -> str:
    r"""Write how many times as much.

    >>> times(1.9) == "1.90\N{MULTIPLICATION SIGN}", times(None) == UNKNOWN
    (True, True)
    """
    return UNKNOWN if value is None else f"{ratio(value)}\N{MULTIPLICATION SIGN}"


def exact(value: float | None, form: str) -> str:
    """Write a number in a form of Python's.

    >>> exact(1234.56, ",.1f")
    '1,234.6'
    """
    return UNKNOWN if value is None else format(value, form)


def small(value: float | None) -> str:
    """Write a learning rate or an error as people type it.

    >>> small(4.2e-4), small(0.00874), small(2.1259e-07)
    ('4.2e-4', '0.00874', '2.13e-7')
    """
    if value is None:
        return UNKNOWN
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def memory(value: float | None) -> str:
    """Write bytes; the unit stays on the number's line.

    >>> memory(532668416).split()
    ['508', 'MiB']
    """
    return UNKNOWN if value is None else format_bytes(value).replace(" ", "\N{NO-BREAK SPACE}")


def seconds(value: float | None) -> str:
    """Write a duration.

    >>> seconds(0.0378), seconds(2.31), seconds(154), seconds(9000)
    ('37.8 ms', '2.31 s', '2 min 34 s', '2 h 30 min')
    """
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    if value < 99.5:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def interval(low: str, high: str) -> str:
    """Write an interval; an end that is not resolved is said.

    >>> interval("168", "291"), interval("168", UNKNOWN), interval("0", UNKNOWN), interval(UNKNOWN, UNKNOWN)
    ('[168, 291]', '[168 or more]', '[not resolved]', '')
    """
    if low == high == UNKNOWN:
        return ""
    if high == UNKNOWN:
        return "[not resolved]" if low == "0" else f"[{low} or more]"
    return f"[up to {high}]" if low == UNKNOWN else f"[{low}, {high}]"


def date(text: str) -> str:
    """Write a moment; what is no ISO text stays as it is.

    >>> date("2026-11-16T15:41:01+00:00"), date("yesterday")
    ('16 November 2026, 15:41 UTC', 'yesterday')
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    # The calendar's own names follow the reader's locale; the page is English.
    day = f"{moment.day} {_MONTHS.split()[moment.month - 1]} {moment.year}"
    if len(text) <= 10:
        return day
    return f"{day}, {moment:%H:%M}{f' {moment.tzname()}' if moment.tzname() else ''}"
