"""Numbers as people write and read them: whole counts, seconds, bytes.

Promises:
- a count is a whole number from 1 to `LARGEST_COUNT`, or an error names the value received;
- inside the program memory is bytes and time is seconds; other units exist only in text.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from batchwright.errors import InvalidInputError


@dataclass(frozen=True)
class PeakBytes:
    """The three ways to read a peak: handed out, taken from the driver, and what the device itself shows."""

    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None

    @property
    def of_allocator(self) -> tuple[int, int]:
        """Allocated and reserved, where there is an allocator that tells both."""
        assert self.allocated is not None
        assert self.reserved is not None
        return self.allocated, self.reserved


# Below 2**53, so that readers of our JSON that keep numbers as doubles lose no digit.
LARGEST_COUNT = 10**15

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def whole_number(value: object, name: str, *, least: int = 1) -> int:
    """Return `value` as an int, or say why it is not a usable count.

    >>> whole_number(32, "effective batch")
    32
    >>> whole_number(2.5, "effective batch")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: effective batch must be a whole number from 1 to 10^15; received 2.5.
    """
    accepted = f"{name} must be a whole number from {least} to 10^15"
    if isinstance(value, bool):
        raise InvalidInputError(f"{accepted}; received {value!r}.")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the call itself is the check
    except TypeError:
        raise InvalidInputError(f"{accepted}; received {shortened(value)}.") from None
    if not least <= number <= LARGEST_COUNT:
        raise InvalidInputError(f"{accepted}; received {shortened(number)}.")
    return number


def parse_whole_number(text: str, name: str, *, least: int = 1) -> int:
    """Read a count that a person typed: digits, with `_` between them if they like.

    >>> parse_whole_number("10_000", "samples")
    10000
    >>> parse_whole_number("10,000", "samples")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: samples must be a whole number ..., such as 32 or 10_000; received '10,000'.
    """
    try:
        # int() reads at most 4300 digits and raises ValueError beyond, which is just what is wanted here.
        number = int(text) if text.isascii() else None
    except ValueError:
        number = None
    if number is None:
        raise InvalidInputError(
            f"{name} must be a whole number from {least} to 10^15, such as 32 or 10_000; received {shortened(text)}."
        )
    return whole_number(number, name, least=least)


def finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it: None for what is infinite or undefined."""
    return value if value is not None and math.isfinite(value) else None


def one_of(what: str, value: object, known: Iterable[str]) -> str:
    """Return `value` as one of the words that are known, in lower case, or say which they are.

    >>> one_of("task", "QA", ("generation", "qa"))
    'qa'
    """
    names = tuple(known)
    if isinstance(value, str) and value.lower() in names:
        return value.lower()
    raise InvalidInputError(f"{what} must be one of {', '.join(names)}; received {shortened(value)}.")


def format_seconds(value: float) -> str:
    """Write a duration with three figures, in the unit that it is read in.

    >>> format_seconds(0.000123), format_seconds(0.0123), format_seconds(1.234), format_seconds(7384)
    ('123 us', '12.3 ms', '1.23 s', '2.05 h')
    """
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if value < limit:
            return f"{float(f'{value * scale:.3g}'):g} {unit}"
    return f"{float(f'{value / 3600:.3g}'):g} h"


def positive_seconds(value: object, name: str) -> float:
    """Return `value` as seconds, or say why it is not a usable duration.

    >>> positive_seconds("0.11", "time of micro-batch 4")
    0.11
    >>> positive_seconds("fast", "time of micro-batch 4")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: time of micro-batch 4 must be a positive number of seconds; received 'fast'.
    """
    # From a nanosecond to thirty years: beyond it sums overflow, and nobody measured it.
    return positive_number(value, f"{name} must be a positive number of seconds", least=1e-9, most=1e9)


def positive_number(value: object, accepted: str, *, least: float, most: float) -> float:
    """Return `value` as a number from `least` to `most`, or raise an error that says what is accepted."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # the call is the check
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise InvalidInputError(f"{accepted}; received {shortened(value)}.")
    return number


def shortened(value: object, width: int = 40) -> str:
    """Return the `repr` of a value received, cut where it would flood an error message.

    >>> shortened(10**60)
    '1000000000000000000...00000000000000000'
    """
    # A number of more than 4300 digits refuses to become text at all.
    text = (
        f"a number of {value.bit_length()} bits"
        if isinstance(value, int) and value.bit_length() > 9999
        else repr(value)
    )
    text = " ".join(text.split()) if "\n" in text else text
    head, tail = (width - 3 + 1) // 2, (width - 3) // 2 - 1
    return text if len(text) <= width else f"{text[:head]}...{text[-tail:]}"


def as_list(given: Any) -> list[Any]:
    """Return none, one or several things as a list.

    >>> as_list(None), as_list(3), as_list((3, 4))
    ([], [3], [3, 4])
    """
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def counted(number: int, noun: str) -> str:
    """Write a count with its noun in the right number.

    >>> counted(1, "update"), counted(2500, "update"), counted(2, "micro-batch")
    ('1 update', '2,500 updates', '2 micro-batches')
    """
    plural = f"{noun}es" if noun.endswith(("ch", "s", "sh", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def format_bytes(num_bytes: float) -> str:
    """Write bytes in the largest binary unit that keeps the number at one or more.

    >>> format_bytes(512), format_bytes(1536), format_bytes(25.7 * 2**30)
    ('512 B', '1.5 KiB', '25.7 GiB')
    """
    amount, unit = float(num_bytes), 0
    while abs(amount) >= 1024 and unit < len(_BINARY_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return (
        f"{amount:.0f} B"
        if unit == 0
        else f"{amount:.3g} {_BINARY_UNITS[unit]}"
        if amount < 1000
        else f"{amount:,.0f} {_BINARY_UNITS[unit]}"
    )


# Binary where the unit says so (GiB) and where people mean it without saying (24g, as for docker and java);
# decimal for GB, as drives and cloud price lists have it.
_UNIT_BYTES = {
    **{unit: 1024**power for power, name in enumerate(("k", "m", "g", "t", "p"), 1) for unit in (name, f"{name}ib")},
    **{f"{name}b": 1000**power for power, name in enumerate(("k", "m", "g", "t", "p"), 1)},
    "b": 1,
}


def parse_bytes(value: str | int, name: str = "memory") -> int:
    """Read an amount of memory: 24GiB, 24GB, 24g or 1.5 TiB as text, bytes as a number.

    >>> parse_bytes("24GiB"), parse_bytes("24GB"), parse_bytes("24g"), parse_bytes("1.5 KiB")
    (25769803776, 24000000000, 25769803776, 1536)
    >>> parse_bytes("lots")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: memory must be an amount such as 24GiB, 24GB or 24g; received 'lots'.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return whole_number(value, name)
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower(), re.ASCII) if isinstance(value, str) else None
    )
    unit = _UNIT_BYTES.get(match[2]) if match else None
    num_bytes = int(float(match[1]) * unit) if match and unit else 0
    if not 1 <= num_bytes <= LARGEST_COUNT:
        raise InvalidInputError(f"{name} must be an amount such as 24GiB, 24GB or 24g; received {shortened(value)}.")
    return num_bytes
