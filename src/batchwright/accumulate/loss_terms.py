"""What a loss is a mean over: a loss, or several terms of one, each with its own reduction.

Promises:
- a loss that cannot be used is refused before anything is changed: not a scalar, no gradient, not a number;
- a term is scaled by its share of the whole window on all ranks, whatever the split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

Reduction = str
REDUCTIONS: tuple[Reduction, ...] = ("units", "samples", "window")


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss and what it is the mean over.

    `over="units"`: the units that the weight of a micro-batch counts, such as tokens. `"samples"`: the samples of the
    micro-batch. `"window"`: each micro-batch counts alike, so that the term's share does not grow with accumulation or
    ranks. A penalty on the weights is exact under it; a term that is not additive over micro-batches, such as the
    balance loss of a mixture of experts, is their mean, which is not quite that of the big batch. Terms with masks of
    their own are over a name: `micro_batches(loader, weight={"masked": count_masked, "next": count_next})`.

    >>> LossTerm(torch.tensor(2.0, requires_grad=True), over="samples").over
    'samples'
    """

    value: torch.Tensor
    over: Reduction = "units"

    def __post_init__(self) -> None:
        if not isinstance(self.over, str):
            raise InvalidInputError(f"a loss term is over {', '.join(REDUCTIONS)}; received {shortened(self.over)}.")


@dataclass(frozen=True, slots=True)
class Totals:
    """How much of each kind there is: in a micro-batch, in a window, on all ranks."""

    units: float = 0.0
    samples: float = 0.0
    window: float = 0.0
    named: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Of each name that a weight counts by itself; `units` is then their sum."""

    def __add__(self, other: Totals) -> Totals:
        named = {name: self.named.get(name, 0.0) + other.named.get(name, 0.0) for name in {**self.named, **other.named}}
        return Totals(self.units + other.units, self.samples + other.samples, self.window + other.window, named)

    def times(self, factor: float) -> Totals:
        """Return so many times as much."""
        named = {name: amount * factor for name, amount in self.named.items()}
        return Totals(self.units * factor, self.samples * factor, self.window * factor, named)

    def pack(self, names: Sequence[str]) -> list[float]:
        """Return the totals as numbers, those of `names` last.

        >>> Totals(2.0, 1.0, 1.0, {"words": 2.0}).pack(["words"])
        [2.0, 1.0, 1.0, 2.0]
        """
        return [self.of(kind) for kind in (*REDUCTIONS, *names)]

    @staticmethod
    def unpack(numbers: Sequence[float], names: Sequence[str]) -> Totals:
        """Read back what `pack` wrote, or the sum of several."""
        units, samples, window, *named = numbers
        return Totals(units, samples, window, dict(zip(names, named, strict=True)))

    def of(self, reduction: Reduction) -> float:
        """Return the total that a reduction divides by."""
        if reduction in REDUCTIONS:
            return float(getattr(self, reduction))
        return self.named.get(reduction, 0.0)


def read_terms(loss: Any, counts: Totals, *, must_be_finite: bool) -> list[LossTerm]:
    """Return the terms of what `backward` was given, checked; one that counts nothing need not be a number.

    >>> [term.over for term in read_terms(torch.tensor(1.0, requires_grad=True), Totals(1.0), must_be_finite=True)]
    ['units']
    """
    if isinstance(loss, torch.Tensor):  # a tensor of one dimension would pass for a list
        loss = [LossTerm(loss)]
    terms = list(loss) if isinstance(loss, Sequence) else [loss]
    terms = [term if isinstance(term, LossTerm) else LossTerm(term) for term in terms]
    if not terms:
        raise InvalidInputError("backward was given no loss: an empty list of terms.")
    for term in terms:
        _check_name(term, counts)
        _check(term.value, must_be_finite=must_be_finite and counts.of(term.over) > 0)
    return terms


def _check_name(term: LossTerm, counts: Totals) -> None:
    if counts.named and term.over == "units":
        raise InvalidInputError(
            f"the weight counts {', '.join(counts.named)} apart, and a loss term does not say over which it is a mean.",
            remedy=f'bw.LossTerm(value, over="{next(iter(counts.named))}")',
        )
    if term.over not in REDUCTIONS and counts.window and term.over not in counts.named:
        known = ", ".join((*REDUCTIONS, *counts.named))
        raise InvalidInputError(
            f"a loss term is over {known}; received {shortened(term.over)}.",
            remedy='micro_batches(loader, weight={"name": lambda batch: ...}) counts what a term is a mean over',
        )


def count_units(batch: Any, weight: Any) -> tuple[float, dict[str, float]]:
    """Return what a weight counts of a batch, in all and by name; it is a number, a function, or several by name.

    >>> count_units("ab", {"letters": len, "words": 1})
    (3.0, {'letters': 2.0, 'words': 1.0})
    """
    if not isinstance(weight, Mapping):
        return check_weight(weight(batch) if callable(weight) else weight), {}
    taken = [name for name in weight if not isinstance(name, str) or name in REDUCTIONS]
    if taken or not weight:
        raise InvalidInputError(
            f"a weight by name has names other than {', '.join(REDUCTIONS)}; received {shortened(list(weight))}."
        )
    named = {name: count_units(batch, count)[0] for name, count in weight.items()}
    return sum(named.values()), named


def _check(value: Any, *, must_be_finite: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError(f"backward takes a loss, a scalar tensor; received {shortened(value)}.")
    if value.numel() != 1:
        raise InvalidInputError(
            f"backward takes a scalar loss; received a tensor of shape {tuple(value.shape)}.",
            remedy="loss.mean() for a mean over its entries",
        )
    if not value.requires_grad:
        raise InvalidInputError(
            "the loss has no gradient: nothing that requires one went into it.",
            remedy="was it computed under torch.no_grad(), detached, or are all weights frozen?",
        )
    # Elsewhere than on the CPU a look at the value would make the host wait for the device.
    if must_be_finite and value.device.type == "cpu" and not math.isfinite(value.item()):
        raise InvalidInputError(
            f"the loss is {value.item()}; gradients were left as they were.",
            remedy="accumulator.skip() leaves this micro-batch out, backward(loss, weight=0) where ranks keep step",
        )


def check_weight(weight: Any) -> float:
    """Return a weight as a number.

    >>> check_weight(torch.tensor(3)), check_weight(0.5)
    (3.0, 0.5)
    """
    try:
        number = float(weight)
    except (TypeError, ValueError):
        raise InvalidInputError(f"a weight is a number; received {shortened(weight)}.") from None
    if not math.isfinite(number) or number < 0:
        raise InvalidInputError(
            f"a weight must be 0 or more, the units that the loss is a mean over; received {number}."
        )
    return number
