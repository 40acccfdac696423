"""One drawing: a frame with axes, and what is put into it.

Promises:
- text inside is as large as text outside: a chart is drawn for two widths, not stretched from one;
- a label is put where nothing else is written and inside the drawing, or it is left out;
- colours come from the page's style, so that a drawing follows light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from batchwright.report.page.markup import Html, element, html, joined


@dataclass(frozen=True)
class Scale:
    """A straight or logarithmic axis from `low` at `start` to `high` at `end`, in pixels.

    >>> Scale(0, 10, 0, 100)(5), Scale(1, 16, 0, 100, is_log=True)(4)
    (50.0, 50.0)
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value; one beyond the axis is put at its end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def even_ticks(low: float, high: float, most: int, *, least: float = 0.0) -> list[float]:
    """Return round values a straight axis is cut at, at most about so many; `least` apart, 1 for sizes.

    >>> even_ticks(0, 93, 6), even_ticks(0, 3, 6, least=1)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [0, 1, 2, 3])
    """
    wanted = (high - low) / most
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(digit * power for digit in (1, 2, 5, 10, 20) if digit * power >= wanted * (1 - 1e-9))
    return _multiples(max(step, least), low, high)


def byte_ticks(high: float, most: int) -> list[float]:
    """Return amounts of memory that are round in binary.

    >>> [tick / 2**20 for tick in byte_ticks(600 * 2**20, 5)]
    [0.0, 128.0, 256.0, 384.0, 512.0]
    """
    return _multiples(2.0 ** math.ceil(math.log2(high / most)), 0, high)


def doubling_ticks(low: float, high: float, most: int) -> list[float]:
    """Return powers of two for an axis of batches.

    >>> doubling_ticks(5, 1000, 4)
    [8.0, 32.0, 128.0, 512.0]
    """
    powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    return [2.0**power for power in powers[:: max(math.ceil(len(powers) / most), 1)]]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round values for a logarithmic axis.

    >>> log_ticks(1, 8, 6)
    [1.0, 1.5, 2.0, 3.0, 5.0, 7.0]
    >>> log_ticks(3, 80_000, 5)
    [10.0, 100.0, 1000.0, 10000.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.2, 1.5, 2, 3, 4, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def size_scale(sizes: list[float], start: float, end: float, *, spread: float = 8) -> Scale:
    """Return the axis for sizes: in doublings where they differ much, else straight from 0."""
    least, most = min(sizes), max(sizes)
    if most >= spread * least > 0:
        return Scale(least / 1.25, most * 1.25, start, end, is_log=True)
    return Scale(0, max(most, 1) * 1.12, start, end)


def size_ticks(scale: Scale, most: int) -> list[float]:
    """Return the ticks for an axis of sizes."""
    ends = scale.low, scale.high
    return doubling_ticks(*ends, most) if scale.is_log else even_ticks(*ends, most, least=1)


def _multiples(step: float, low: float, high: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


WIDE, NARROW = 712, 320
# A little more than the widest of usual fonts take at 12 pixels, digits and small letters mixed.
_LETTER, _BOLD_LETTER, _LINE = 7.2, 8.4, 15.0
_LABEL = "note strong"

Point = tuple[float, float]


class Box(NamedTuple):
    """A place that something is written in."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether two places share a spot."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class Chart:
    """A frame of the given size; the scales say where in it the axes run."""

    def __init__(self, width: float, height: float, *, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self.pieces: list[Html] = []
        self.taken: list[Box] = []

    def x_axis(
        self, scale: Scale, ticks: Iterable[float], write: Callable[[float], str], title: str, *, y: float
    ) -> None:
        """Draw the lower axis at height `y`, with its title below."""
        self.line([(scale.start, y), (scale.end, y)], "axis")
        last = -1e9
        for tick in ticks:
            x, text = scale(tick), write(tick)
            half = text_width(text) / 2
            if x - half < max(last + 6, -2) or x + half > self.width + 2:
                continue
            last = x + half
            self.line([(x, y), (x, y + 4)], "axis")
            self.text((x, y + 18), text, "tick", "middle")
        self.text((scale.end, y + 36), title, "title", "end")

    def y_axis(
        self,
        scale: Scale,
        ticks: Iterable[float],
        write: Callable[[float], str],
        title: str,
        *,
        across: Scale,
        above: float = 14,
    ) -> None:
        """Draw lines across with their values at the left, and the title above them, where it reads without turning."""
        for tick in ticks:
            y = scale(tick)
            self.line([(across.start, y), (across.end, y)], "grid")
            self.text((across.start - 8, y + 4), write(tick), "tick", "end")
        self.text((0, scale.end - above), title, "title", "start")

    def line(self, points: Sequence[Point], style: str, *, is_kept_free: bool = False) -> None:
        """Draw a line through points; labels keep off one that `is_kept_free`."""
        self._add("polyline", style, f'points="{_places(points)}"')
        if is_kept_free:
            self.keep_free(points)

    def area(self, points: Sequence[Point], style: str) -> None:
        """Fill what the points surround."""
        self._add("polygon", style, f'points="{_places(points)}"')

    def bar(self, left: float, top: float, right: float, bottom: float, style: str, label: str) -> None:
        """Fill a rectangle."""
        size = f'width="{max(right - left, 0):g}" height="{max(bottom - top, 0):g}"'
        self._add("rect", style, f'x="{left:g}" y="{top:g}" {size}', label)

    def dot(self, at: Point, style: str, label: str = "", radius: float = 4) -> None:
        """Draw a point."""
        x, y = at
        self._add("circle", style, f'cx="{x:g}" cy="{y:g}" r="{radius:g}"', label)
        self.taken.append(Box(x - radius, y - radius, x + radius, y + radius))

    def cross(self, at: Point, style: str, label: str) -> None:
        """Draw a cross."""
        x, y = at
        self._add("path", style, f'd="M{x - 4.5:g},{y - 4.5:g}l9,9m0,-9l-9,9"', label)
        self.taken.append(Box(x - 5, y - 5, x + 5, y + 5))

    def _add(self, tag: str, style: str, shape: str, label: str = "") -> None:
        """Add a shape; `label` is said where the pointer rests on it."""
        title = element("title", label) if label else ""
        self.pieces.append(Html(f'<{tag} class="{html(style)}" {shape}>{title}</{tag}>'))

    def text(self, at: Point, text: str, style: str, anchor: str) -> None:
        """Write text that starts, ends or is centred at a place."""
        self.taken.append(_box(at, text, anchor, style))
        self.pieces.append(
            Html(f'<text class="{html(style)}" x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}">{html(text)}</text>')
        )

    def beside(self, at: Point, text: str, *, first: str = "above") -> None:
        """Write a label on the first side of a place where nothing is in its way, or further off, with a line to it."""
        x, y = at
        sides = {
            "above": ((x, y - 11), "middle"),
            "right": ((x + 11, y + 4), "start"),
            "left": ((x - 11, y + 4), "end"),
            "below": ((x, y + 21), "middle"),
            "above left": ((x - 4, y - 11), "end"),
            "above right": ((x + 4, y - 11), "start"),
            "below left": ((x - 4, y + 21), "end"),
            "below right": ((x + 4, y + 21), "start"),
        }
        half = text_width(text, _LABEL) / 2
        within = min(max(x, half), self.width - half)
        places: list[tuple[Point, str, list[Point]]] = [
            *((*sides[side], []) for side in sorted(sides, key=lambda name: name != first)),
            ((within, y + 44), "middle", [(x, y + 9), (x, y + 33)]),
            ((x - 26, y - 22), "end", [(x - 7, y - 7), (x - 23, y - 23)]),
            ((within, y - 34), "middle", [(x, y - 9), (x, y - 30)]),
            ((x - 26, y - 40), "end", [(x - 6, y - 8), (x - 23, y - 40)]),
            ((within, y + 62), "middle", [(x, y + 9), (x, y + 51)]),
            ((within, y + 80), "middle", [(x, y + 9), (x, y + 69)]),
        ]
        for place, anchor, leader in places:
            if self._has_room(_box(place, text, anchor, _LABEL)):
                if leader:
                    self.line(leader, "leader")
                self.text(place, text, _LABEL, anchor)
                return

    def _has_room(self, box: Box) -> bool:
        inside = box.left >= 0 and box.right <= self.width and box.top >= 0 and box.bottom <= self.height
        return inside and not any(box.meets(other) for other in self.taken)

    def keep_free(self, points: Sequence[Point]) -> None:
        """Keep labels off a line that was drawn."""
        for (x0, y0), (x1, y1) in pairwise(points):
            pieces = max(int(abs(x1 - x0) // 8), 1)
            for number in range(pieces):
                left, right = (x0 + (x1 - x0) * part / pieces for part in (number, number + 1))
                ends = sorted(y0 + (y1 - y0) * part / pieces for part in (number, number + 1))
                self.taken.append(Box(min(left, right), ends[0] - 2, max(left, right), ends[1] + 2))

    def to_svg(self) -> Html:
        """Return the drawing."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return Html(f'<svg {size} role="img" aria-label="{html(self.label)}">{joined(self.pieces)}</svg>')


def _places(points: Sequence[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def text_width(text: str, style: str = "") -> float:
    """Return about how wide a text is, in pixels; characters of East Asia take two places."""
    letter = _BOLD_LETTER if "strong" in style else _LETTER
    return sum(letter if ord(character) < 0x2E80 else 2 * letter for character in text)


def at_both_widths(draw: Callable[[float], Chart]) -> Html:
    """Return a chart drawn for a desk and for a phone; the style shows one of them."""
    return joined(
        element("div", draw(width).to_svg(), class_=f"chart {name}")
        for name, width in (("wide", WIDE), ("narrow", NARROW))
    )


def legend(*entries: tuple[str, str]) -> Html:
    """Return what lines and points mean: a style and words each."""
    items = (element("li", _sample(style), words) for style, words in entries)
    return element("ul", *items, class_="legend")


def _sample(style: str) -> Html:
    kind = style.split()[0]
    drawn = {
        "band": f'<rect class="{style}" y="1" width="22" height="10"/>',
        "range": f'<rect class="{style}" x="0.5" y="1" width="21" height="10"/>',
        "point": f'<circle class="{style}" cx="6" cy="6" r="5"/>',
        "cross": f'<path class="{style}" d="M1.5,1.5l9,9m0,-9l-9,9"/>',
    }.get(kind, f'<polyline class="{style}" points="0,6 22,6"/>')
    width = 12 if kind in ("point", "cross") else 22
    return Html(f'<svg width="{width}" height="12" aria-hidden="true">{drawn}</svg>')


def _box(at: Point, text: str, anchor: str, style: str) -> Box:
    wide = text_width(text, style)
    left = at[0] - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
    return Box(left, at[1] - 12, left + wide, at[1] - 12 + _LINE)
