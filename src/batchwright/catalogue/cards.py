"""Cards that need not be there: their memory, what CUDA itself takes of it, and cuBLAS's workspace.

Promises:
- every figure of cards.json names where it was read; where a card's memory was not found, `source_kind` is "nominal";
- a name is found whatever its case, spaces or vendor's words; an unknown one lists the nearest;
- the reports of CUDA's context are kept one by one, and the rule is worked out from them, not written beside them;
- nothing here imports torch or numpy.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from statistics import median
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.units import format_bytes, shortened

_MIB = 1 << 20
# Words that vendors and drivers put around a name, and people leave out.
_UNSAID = re.compile(r"nvidia|geforce|tesla|amd|instinct|sxm\d?|pcie|hbm\w*")


@dataclass(frozen=True)
class Card:
    """A card as torch sees it; `total_bytes` is its `total_memory`, not what is printed on the box.

    >>> card = find_card("RTX 4090")
    >>> card.name, card.total_bytes, card.num_sms, card.compute_capability
    ('rtx-4090-24gb', 25250627584, 128, (8, 9))
    """

    name: str
    product: str
    vendor: str
    compute_capability: tuple[int, int] | str
    generation: str
    nominal_gib: int
    total_bytes: int
    source_kind: str
    total_source: str
    num_sms: int
    sms_source: str
    aliases: tuple[str, ...] = ()
    also_reported: tuple[str, ...] = ()
    note: str = ""
    context_bytes: int | None = None
    """What CUDA takes of it on one's own machine, where that was measured; the catalogue says it otherwise."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability by which kernels are chosen; of another vendor's card, that of one with as many."""
        given = self.compute_capability
        return (9, 0) if isinstance(given, str) else given

    @property
    def family(self) -> str:
        """Its name without the size of its memory."""
        return self.name.rsplit("-", 1)[0]


@dataclass(frozen=True)
class Context:
    """Memory that a process takes outside torch's allocator, as public reports have it."""

    typical_bytes: int
    low_bytes: int
    high_bytes: int


def all_cards() -> tuple[Card, ...]:
    """Return every card of the catalogue, in the order of the file."""
    return tuple(_cards().values())


def names_a_card(on: str) -> bool:
    """Whether this is neither the CPU nor a device of this machine.

    >>> names_a_card("a100-40gb"), names_a_card("cuda:1"), names_a_card("cpu")
    (True, False, False)
    """
    return on.partition(":")[0] not in ("cpu", "cuda", "mps", "xpu")


def find_card(name: str) -> Card:
    """Return the card of this name.

    >>> find_card("NVIDIA A100-SXM4-80GB").name, find_card("3090").name, find_card("rtx_3060 12GB").name
    ('a100-80gb', 'rtx-3090-24gb', 'rtx-3060-12gb')
    >>> find_card("a100")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: the card 'a100' comes in 2 sizes.
      try: a100-40gb or a100-80gb
    """
    key = _key(name) if isinstance(name, str) else ""
    sizes = _names().get(key, ())
    if len(sizes) == 1:
        return _cards()[sizes[0]]
    if sizes:
        raise InvalidInputError(f"the card {shortened(name)} comes in {len(sizes)} sizes.", remedy=alternatives(sizes))
    matches = difflib.get_close_matches(key, _names(), n=9, cutoff=0.5)
    near = list(dict.fromkeys(card for match in matches for card in _names()[match]))[:4]
    remedy = alternatives(near or ["a100-80gb", "h100-80gb", "rtx-4090-24gb"])
    raise InvalidInputError(f"no card is named {shortened(name)} in the catalogue.", remedy=remedy)


def context_of(card: Card) -> Context:
    """Return what CUDA itself takes of a card once a step has run, with the span of the reports.

    >>> context = context_of(find_card("rtx-4090-24gb"))
    >>> context.low_bytes >> 20, context.typical_bytes >> 20, context.high_bytes >> 20
    (366, 474, 558)

    Kernels are loaded as they are used (CUDA 11.7 and later), so it grows with the threads that a card can hold at
    once; all at once where CUDA_MODULE_LOADING=EAGER says so, as CUDA before 11.7 did. Of ROCm cards all reports are of
    an MI300X, the whole device counted.
    """
    if card.context_bytes is not None:
        return Context(card.context_bytes, card.context_bytes, card.context_bytes)
    used = [report for report in _facts()["context"]["reports"] if report.get("used", True)]
    if card.vendor != "amd":
        lazy = [report for report in used if report["loading"] == "lazy"]
        if not loads_eagerly():
            return _lazy_context(card, lazy)
        return _eager_context(card, lazy, [report for report in used if report["loading"] == "eager"])
    mib = [report["mib"] for report in used if report["loading"] == "rocm"]
    return Context(round(median(mib) * _MIB), min(mib) * _MIB, max(mib) * _MIB)


def loads_eagerly() -> bool:
    """Whether CUDA is told to load every kernel at once, by its own environment variable."""
    return os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"


def tell_context(card: Card) -> str:
    """Say what a context is taken to be, and by what.

    >>> tell_context(find_card("rtx-4090-24gb"))
    'context: 474 MiB (366 to 558) by 31 public reports of CUDA 11.7 and later'
    """
    context = context_of(card)
    if card.context_bytes is not None:
        return f"context: {format_bytes(card.context_bytes)}, as given for this machine"
    low, typical, high = (size // _MIB for size in (context.low_bytes, context.typical_bytes, context.high_bytes))
    reports = [report for report in _facts()["context"]["reports"] if report.get("used", True)]
    loading = "rocm" if card.vendor == "amd" else "eager" if loads_eagerly() else "lazy"
    number = sum(report["loading"] == loading for report in reports)
    of = {
        "rocm": "ROCm, one card",
        "lazy": "CUDA 11.7 and later",
        "eager": "CUDA before 11.7, for CUDA_MODULE_LOADING=EAGER",
    }[loading]
    return f"context: {typical} MiB ({low} to {high}) by {number} public reports of {of}"


def communication_bytes() -> int:
    """Return what NCCL took of a rank beside the context, in the one public report of it; it is in no typical figure.

    >>> communication_bytes() >> 20
    365
    """
    excess: list[int] = [
        report["mib"] * _MIB - context_of(replace(find_card(report["card"]), context_bytes=None)).typical_bytes
        for report in _facts()["context"]["reports"]
        if report.get("is_rank")
    ]
    return max(excess)


def cublas_workspace_bytes(card: Card) -> int:
    """Return what torch 2.13 holds per thread and stream for matrix products; a training step has two threads.

    >>> [cublas_workspace_bytes(find_card(name)) for name in ("rtx-3090", "h100-80gb", "mi300x")]
    [8519680, 33554432, 134217728]
    """
    facts = _facts()["cublas_workspace"]
    if isinstance(card.compute_capability, str):
        row = facts["rocm_by_gfx"].get(card.compute_capability, facts["rocm_default"])
    else:
        row = facts["by_major"].get(str(card.compute_capability[0]), facts["default"])
    return int(row["bytes"])


def _lazy_context(card: Card, reports: list[dict[str, Any]]) -> Context:
    # The line is Theil and Sen's: medians, so that one strange process does not tilt it. That the driver keeps a stack
    # for every resident thread explains a line through these; that it is all there is, is our inference. Left out one
    # at a time, the 31 reports are met within 34 MiB on average (by generation alone: 104).
    points = [(_resident_threads(r["num_sms"], r["compute_capability"]) / 1024, r["mib"]) for r in reports]
    slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0])
    base = median(mib - slope * threads for threads, mib in points)
    ratios = [mib / (base + slope * threads) for threads, mib in points]
    assert not isinstance(card.compute_capability, str)
    typical = base + slope * _resident_threads(card.num_sms, card.compute_capability) / 1024
    return Context(*(round(typical * ratio * _MIB) for ratio in (1, min(ratios), max(ratios))))


def _eager_context(card: Card, lazy: list[dict[str, Any]], eager: list[dict[str, Any]]) -> Context:
    """Add what loading every kernel took in the reports of it, beyond what lazy loading takes of their cards."""
    of_card = _lazy_context(card, lazy).typical_bytes
    more = []
    for report in eager:
        like = replace(card, num_sms=report["num_sms"], compute_capability=tuple(report["compute_capability"]))
        more.append(report["mib"] * _MIB - _lazy_context(like, lazy).typical_bytes)
    return Context(*(of_card + round(extra) for extra in (median(more), min(more), max(more))))


def _resident_threads(num_sms: int, capability: tuple[int, int] | list[int]) -> int:
    threads: dict[str, int] = _facts()["threads_per_sm"]["values"]
    return num_sms * threads[f"{capability[0]}.{capability[1]}"]


def alternatives(names: Sequence[str]) -> str:
    """List names to choose from.

    >>> alternatives(["a100-40gb", "a100-80gb", "h100-80gb"])
    'a100-40gb, a100-80gb or h100-80gb'
    """
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _key(name: str) -> str:
    words = re.split(r"[\s_/-]+", name.strip().lower())
    key = "-".join(word for word in words if word and not _UNSAID.fullmatch(word))
    # "rtx3090", "24 gb", "24g" and "24gib" are all typed.
    return re.sub(r"(?<=\d)-?gi?b?$", "gb", re.sub(r"^(rtx|gtx)(?=\w)", r"\1-", key))


@cache
def _facts() -> dict[str, Any]:
    text = files("batchwright.catalogue").joinpath("cards.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


@cache
def _cards() -> dict[str, Card]:
    rows: list[dict[str, Any]] = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        for row in _facts()["cards"]
    ]
    return {row["name"]: Card(**row) for row in rows}


@cache
def _names() -> dict[str, tuple[str, ...]]:
    """Every way to write a name, to the names of its cards: more than one where only the size tells them apart."""
    names: dict[str, tuple[str, ...]] = {}
    for card in _cards().values():
        typed = [card.name, card.family, card.product, *card.aliases]
        typed += [re.sub(r"^[rg]tx-(?=\d)", "", text) for text in (card.name, card.family)]
        for key in dict.fromkeys(map(_key, typed)):
            names[key] = (*names.get(key, ()), card.name)
    return names
