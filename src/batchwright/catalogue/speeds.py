"""How fast cards are: peaks, what large kernels sustain of them, memory, links; each with its source and how sure.

Promises:
- a sustained rate is one that somebody measured, or it follows from the rule of the chip's family and says that it is a
  guess;
- a format that a card has not is missing, never replaced by a slower one without a word; TF32 alone falls back to fp32,
  as torch does;
- nothing here imports torch or numpy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchwright.catalogue.cards import Card

_TERA, _GIGA = 1e12, 1e9
_ON_TENSOR_CORES = ("tf32", "fp16", "bf16", "fp8")
# Under a power limit a FLOP of TF32 takes as much as two of fp16, and one of fp8 half as much.
_POWER_OF_FORMAT = {"tf32": 2.0, "fp16": 1.0, "bf16": 1.0, "fp8": 0.5}


@dataclass(frozen=True)
class CardSpeed:
    """What a card can do in a second; rates in FLOP/s and bytes/s.

    >>> speed = find_speed("a100-80gb-sxm")
    >>> speed.family, f"{speed.peaks['fp16']:.3g}", f"{speed.sustained['fp16']:.4g}", speed.guesses
    ('ampere', '3.12e+14', '2.712e+14', ('fp32', 'memory'))
    """

    name: str
    family: str
    peaks: Mapping[str, float]
    sustained: Mapping[str, float]
    """Of large products, by format."""
    memory_peak: float
    memory: float
    """Bytes per second that large element-wise kernels move."""
    num_sms: int
    l2_bytes: float
    tdp_watts: float
    link: str
    link_bytes: float
    """Bytes per second between cards of one node, both ways together."""
    source: str
    sure: str
    """checked, partly or remembered: whether a second public source agrees with the sheet."""
    guesses: tuple[str, ...] = ()
    """What nobody was found to have measured on such a card: formats, and memory."""


def find_speed(name: str) -> CardSpeed:
    """Return the speed of this name in speeds.json; some cards are there in more forms than cards.json has."""
    return _speeds()[name]


def all_speeds() -> tuple[CardSpeed, ...]:
    """Return every speed, in the order of the file."""
    return tuple(_speeds().values())


def speed_of(card: Card) -> CardSpeed | None:
    """Return how fast a card of the catalogue is; None where no sheet was found.

    >>> from batchwright.catalogue.cards import find_card
    >>> speed_of(find_card("a100-40gb")).name
    'a100-40gb-sxm'
    """
    name = _by_card().get(card.name)
    return None if name is None else _speeds()[name]


def _read(row: Mapping[str, Any], families: Mapping[str, Mapping[str, Any]]) -> CardSpeed:
    family = families[row["chip"]]
    peaks = {kind: row[kind] * _TERA for kind in ("fp32", "tf32", "fp16", "bf16", "fp8") if row.get(kind)}
    measured: Mapping[str, float] = row["sustained"]
    sustained, guesses = {}, []
    for kind, peak in peaks.items():
        if kind in measured:
            sustained[kind] = measured[kind] * _TERA
        elif kind in _ON_TENSOR_CORES and "fp16" in measured:
            sustained[kind] = peak * measured["fp16"] / row["fp16"]
        elif kind in _ON_TENSOR_CORES:
            power = row["tdp_watts"] / (family["watts_per_tflop"] * _POWER_OF_FORMAT[kind]) * _TERA
            sustained[kind] = min(peak * family["cap"], power)
            guesses.append(kind)
        else:
            sustained[kind] = peak * family["fp32_cap"]
            guesses.append(kind)
    memory_peak = row["memory_gb_s"] * _GIGA
    memory = measured["memory_gb_s"] * _GIGA if "memory_gb_s" in measured else memory_peak * family["memory"]
    if "memory_gb_s" not in measured:
        guesses.append("memory")
    return CardSpeed(
        row["name"],
        family["family"],
        peaks,
        sustained,
        memory_peak,
        memory,
        row["num_sms"],
        row["l2_mb"] * 1e6,
        row["tdp_watts"],
        row["link"],
        row["link_gb_s"] * _GIGA,
        row["source"],
        row["sure"],
        tuple(guesses),
    )


@cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(
        files("batchwright.catalogue").joinpath("speeds.json").read_text(encoding="utf-8")
    )
    return facts


@cache
def _speeds() -> dict[str, CardSpeed]:
    facts = _facts()
    return {row["name"]: _read(row, facts["families"]) for row in facts["speeds"]}


@cache
def _by_card() -> dict[str, str]:
    return {card: row["name"] for row in _facts()["speeds"] for card in row["cards"]}
