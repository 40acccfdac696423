"""The gradients of an Accumulator's micro-batches, seen as they come, and what ranks tell each other of them.

Promises:
- numbers stay on their device until somebody wants the estimate;
- what makes a window unusable travels with the numbers, so that all ranks leave out the same windows;
- the micro-batch's share of the loss and the loss scale are taken out of its gradient, and clipping comes later: none
  of them changes the answer;
- a window of one micro-batch is looked at example by example, or, where some module is not known, cut in two; which,
  and why, is said.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchwright.accumulate.weights import batch_norms
from batchwright.accumulate.windows import WindowWatcher
from batchwright.noise.capture.example_norms import ExampleNorms, UnknownModuleError
from batchwright.noise.capture.weight_hooks import LeafSquares, Weights
from batchwright.noise.observations import Observation, Squares
from batchwright.units import as_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchwright.accumulate.accumulator import Accumulator
    from batchwright.accumulate.micro_batches import Totals
    from batchwright.accumulate.parallelism import Parallelism
    from batchwright.noise.noise_scale import NoiseScale


_LEAST_STEPS = 20
# So many standard errors; with few ranks and a look at every step, chance alone hardly ever gets there.
_TOO_FAR = 6.0


class RanksAlike:
    """Watches whether ranks draw from the same data; if each has a stratum of its own, their spread is no noise.

    Seen by size: one rank's gradients are larger or smaller than another's again and again, by more than chance
    allows. Strata whose gradients differ only in direction are not seen.

    >>> alike = RanksAlike()
    >>> [alike.add((1.0 + step % 3, 9.0 + step % 2)) for step in range(30)].count(True)
    1
    """

    warning = (
        "the gradients of some ranks are larger than those of others throughout: ranks with data of their own (sorted "
        "or stratified) make the spread between them look like noise. Shuffle before the data is cut over ranks"
    )

    def __init__(self) -> None:
        self._number = 0
        self._means = self._squares = np.zeros(0)
        self._has_warned = False

    def add(self, squares: Sequence[float]) -> bool:
        """Take the mean |g|^2 of each rank's parts of one step; return whether it is time to warn."""
        total = sum(squares)
        if len(squares) < 2 or not total or self._has_warned:
            return False
        if len(squares) != len(self._means):
            self._number, self._means, self._squares = 0, np.zeros(len(squares)), np.zeros(len(squares))
        self._number += 1
        # In parts of the mean, so that steps of large gradients do not outweigh the others.
        shares = np.array(squares) * len(squares) / total - 1
        before = shares - self._means
        self._means = self._means + before / self._number
        self._squares = self._squares + before * (shares - self._means)
        if self._number < _LEAST_STEPS:
            return False
        errors = np.sqrt(self._squares / (self._number - 1) / self._number)
        off = np.abs(self._means)
        self._has_warned = bool((off > _TOO_FAR * errors).any() and off.max() > 1e-3)
        return self._has_warned


# In the order of precedence; the number of a reason is what ranks tell each other.
REASONS = (
    "",
    "a loss whose terms have different shares: no gradient of one micro-batch can be told",
    "a gradient came in several pieces within one backward (CachedLoss, or a shared weight under reentrant "
    "checkpointing): their squares do not add up",
    "the loss scale changed between micro-batches",
    "the model ran forward and backward a different number of times",
    "micro-batches of other sizes than micro_batch=, looked for along dimension batch_dim=: how the loop weighs them "
    "is not known",
    "one micro-batch only: there is nothing to compare",
    "a gradient that is infinite or not a number",
    "the window was shorter than the one before",
    "the gradients were thrown away without a step",
    "what the backward passes added is not what the loop steps with: gradients of before were not zeroed, or something "
    "else was computed or thrown away in between",
    "ranks had different numbers of micro-batches: how the loop weighs them is not known",
)
(
    MIXED_SHARES,
    IN_PIECES,
    SCALE_CHANGED,
    UNPAIRED,
    OTHER_SIZES,
    SINGLE,
    NOT_FINITE,
    UNEXPECTED,
    DROPPED,
    DOES_NOT_ADD_UP,
    UNEVEN_RANKS,
) = range(1, len(REASONS))
# Gradients in 16 bits are rounded with every micro-batch that is added.
PROBE_TOLERANCES = {4: 1e-3, 8: 1e-6}
ROUGH = 5e-2


@dataclass(frozen=True)
class RankSums:
    """What one rank knows of a window: what it tells the others, once."""

    weighted: tuple[Any, ...]
    """By group: the squares of each part times its units, added up; numbers, or still on their device."""
    of_mean: tuple[Any, ...]
    """By group: the squares of the mean gradient, of shards this rank's."""
    units: float = 0.0
    samples: float = 0.0
    parts: float = 0.0
    reason: float = 0.0
    """Why the window cannot be used, a number of `REASONS`; the one field whose sum over ranks means nothing."""
    scale_changes: Any = 0.0
    probe: Any = 0.0
    """A random combination of what the parts added."""
    probe_size: Any = 0.0
    final_probe: Any = 0.0
    """The same combination of the gradient in the end."""

    def pack(self) -> list[Any]:
        """Return it as numbers, as many on every rank."""
        others = [getattr(self, field.name) for field in fields(self)[2:]]
        return [*self.weighted, *self.of_mean, *others]

    @staticmethod
    def unpack(row: Sequence[Any]) -> RankSums:
        """Read back what `pack` wrote, all from its device in one transfer.

        >>> sums = RankSums((1.0, 2.0), (3.0, 4.0), units=8.0, parts=2.0)
        >>> RankSums.unpack(sums.pack()) == sums
        True
        """
        numbers = _floats(row)
        num_groups = (len(numbers) - len(fields(RankSums)) + 2) // 2
        weighted, of_mean = tuple(numbers[:num_groups]), tuple(numbers[num_groups : 2 * num_groups])
        return RankSums(weighted, of_mean, *numbers[2 * num_groups :])


class WindowSums:
    """The sums of one window on one rank, while it is filled."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._weighted: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        self._scale_changes: torch.Tensor | float = 0.0
        self.units = self.samples = 0.0
        self.parts = 0
        self.reason = 0
        self._probe: Any = 0.0
        self._probe_size: Any = 0.0
        self.final_probe: Any = 0.0
        """The same combination of the gradient in the end."""

    def add(self, squares: torch.Tensor, units: float, samples: float, factor: Any) -> None:
        """Add a part of so many units, whose gradient came multiplied by `factor` (a number, or on the device)."""
        self._add(squares * units, factor, units, samples, parts=1)

    def add_examples(self, squares: torch.Tensor, units: float, samples: float, factor: Any) -> None:
        """Add single examples, groups x examples; each brought 1/n of the mean gradient of all."""
        number = squares.shape[-1]
        # The gradient of one example is n times what it brought; it weighs its share of the units.
        self._add(squares.sum(-1) * number * units, factor, units, samples, parts=number)

    def _add(self, weighted: torch.Tensor, factor: Any, units: float, samples: float, *, parts: int) -> None:
        share = weighted / (factor * factor)
        self._weighted = share if self._weighted is None else self._weighted + share
        self.units += units
        self.samples += samples
        self.parts += parts

    def multiply(self, factor: float) -> None:
        """Multiply every square."""
        if self._weighted is not None:
            self._weighted = self._weighted * factor

    def saw_scale(self, scale: torch.Tensor | None) -> None:
        """Note the loss scale of a micro-batch."""
        if scale is None:
            return
        if self._scale is None:
            self._scale = scale.clone()
        else:
            self._scale_changes = self._scale_changes + (scale != self._scale).float()

    def add_probe(self, probe: Any) -> None:
        """Add a combination of what a micro-batch brought."""
        self._probe = self._probe + probe
        self._probe_size = self._probe_size + abs(probe)

    def for_ranks(self, squares_of_mean: torch.Tensor) -> RankSums:
        """Return what the other ranks are told."""
        return RankSums(
            weighted=(0.0,) * self._num_groups if self._weighted is None else self._weighted.unbind(),
            of_mean=squares_of_mean.unbind(),
            units=self.units,
            samples=self.samples,
            parts=float(self.parts),
            reason=float(self.reason),
            scale_changes=self._scale_changes,
            probe=self._probe,
            probe_size=self._probe_size,
            final_probe=self.final_probe,
        )


@dataclass(frozen=True)
class MeasuredWindow:
    """A window of all ranks, read from their sums."""

    observations: tuple[Observation, ...]
    """One per group; empty if the window cannot be used."""
    units: float
    samples: float
    reason: int
    squares_by_rank: tuple[float, ...]
    """Mean |g|^2 of each rank's parts."""

    @staticmethod
    def read(
        rows: Sequence[Sequence[Any]],
        parallelism: Parallelism,
        *,
        factor: float = 1.0,
        population: int | None = None,
        probe_tolerance: float = ROUGH,
        is_own_loop: bool = False,
    ) -> MeasuredWindow:
        """Read the packed `RankSums` of all ranks.

        Arguments:
            rows: one per rank.
            parallelism: how the model is spread over them.
            factor: what the mean gradient is still to be multiplied by.
            population: the samples of a dataset that is drawn from without replacement.
            probe_tolerance: how far what the parts added may be from the gradient in the end.
            is_own_loop: in a loop of the user's own all ranks must have as many parts.
        """
        ranks = [RankSums.unpack(row) for row in rows]
        units, samples, parts = (sum(getattr(rank, n) for rank in ranks) for n in ("units", "samples", "parts"))
        reason = int(max(rank.reason for rank in ranks)) or SCALE_CHANGED * any(rank.scale_changes for rank in ranks)
        is_uneven = is_own_loop and len({rank.parts for rank in ranks}) > 1
        reason = reason or (UNEVEN_RANKS if is_uneven else SINGLE if parts < 2 else 0)
        in_units = population * units / samples if population is not None and samples else None
        observations = []
        for group in range(len(ranks[0].weighted)):
            weighted = sum(rank.weighted[group] for rank in ranks)
            mean = parallelism.total_square([rank.of_mean[group] for rank in ranks]) * factor * factor
            seen = Squares(weighted, units, round(parts)).observe(mean, population=in_units)
            if seen is not None:
                observations.append(seen)
        if not all(seen.is_finite for seen in observations):
            reason = reason or NOT_FINITE
        # The parts of a mean cannot be shorter than the mean itself (Cauchy and Schwarz).
        of_parts = sum(sum(rank.weighted) for rank in ranks)
        is_short = sum(seen.trace for seen in observations) * (parts - 1) < -1e-3 * of_parts
        if is_short or _is_probe_off(ranks, probe_tolerance):
            reason = reason or DOES_NOT_ADD_UP
        by_rank = tuple(sum(rank.weighted) / rank.units for rank in ranks if rank.units)
        return MeasuredWindow(() if reason else tuple(observations), units, samples, reason, by_rank)


def _is_probe_off(ranks: Sequence[RankSums], tolerance: float) -> bool:
    """Whether a rank ends with something else than the mean over ranks of what all of them added."""
    added = sum(rank.probe for rank in ranks) / len(ranks)
    size = sum(rank.probe_size for rank in ranks) / len(ranks)
    final: float = ranks[0].final_probe
    return bool(abs(added - final) > tolerance * (size + abs(final)))


def _floats(row: Sequence[Any]) -> list[float]:
    """Read numbers that may lie on a device, in one transfer."""
    tensors = [number.reshape(()) for number in row if isinstance(number, torch.Tensor)]
    read = iter(torch.stack([t.to(tensors[0]) for t in tensors]).tolist()) if tensors else iter(())
    return [float(next(read)) if isinstance(number, torch.Tensor) else float(number) for number in row]


class WatchedWindows(WindowWatcher):
    """A `WindowWatcher` that adds up squares and hands them on, window by window."""

    def __init__(
        self,
        accumulator: Accumulator,
        *,
        every: int,
        sink: NoiseScale,
    ) -> None:
        # It holds this object, and must be free to go.
        self._accumulator = weakref.ref(accumulator)
        self._model, self._scaler = accumulator.model, accumulator.scaler
        self.parallelism = accumulator.parallelism
        self._every = every
        self._sink = sink
        self.leaves = LeafSquares(self._weights(), self.parallelism)
        self._examples: ExampleNorms | None = None
        self._cannot_tell_examples = ""
        self._is_by_example = False
        self._sums: WindowSums | None = None
        self.num_windows = 0
        self._has_reported = False

    def close(self) -> None:
        """Take every hook away."""
        accumulator = self._accumulator()
        if accumulator is not None:
            accumulator.unwatch(self)
        self._look_at_examples(False)
        self.leaves.let_go()

    @property
    def is_measured(self) -> bool:
        """Whether the window at hand is one of those that are looked at."""
        return self.num_windows % self._every == 0

    def expect(self, num_parts: int) -> None:
        """Make ready for a window of so many micro-batches."""
        if not self.is_measured:
            self._look_at_examples(False)
            return
        weights = self._weights()
        if not weights.is_same_as(self.leaves.weights):
            self._weights_changed(weights)
        self._sums = WindowSums(len(weights.names))
        self._look_at_examples(num_parts == 1)

    def pieces(self) -> int:
        """Cut a single micro-batch in two where its examples cannot be told apart."""
        if self.parallelism.size > 1 or (self.num_windows + self._has_reported) % self._every:
            return 1
        self._try_examples()
        # Statistics of half a batch would be others.
        return 2 if self._cannot_tell_examples and not batch_norms(self._model) else 1

    @contextmanager
    def around(self, shares: Sequence[float], counts: Totals) -> Iterator[None]:
        """Take the squares of one backward."""
        sums = self._sums
        used = [share for share in shares if share]
        if sums is None or not used:
            yield
            return
        by_example = self._examples if self._is_by_example else None
        self.leaves.start(of_examples=by_example.squares_of if by_example else None)
        try:
            yield
        except BaseException:
            self.leaves.stop()
            raise
        self.leaves.stop()
        if max(used) - min(used) > 1e-9 * max(used):
            sums.reason = sums.reason or MIXED_SHARES
        if self.leaves.came_in_pieces:
            sums.reason = sums.reason or IN_PIECES
        scale = getattr(self._scaler, "_scale", None)  # a tensor on the device; get_scale() would wait for it
        sums.saw_scale(scale)
        factor = used[0] if scale is None else used[0] * scale
        squares = self.leaves.squares_of_examples() if by_example else None
        if squares is not None:
            sums.add_examples(squares, counts.units, counts.samples or squares.shape[-1], factor)
        elif by_example:
            sums.reason = sums.reason or SINGLE
            self._cannot_tell(by_example.failure or "a weight has a gradient from outside of its module")
        else:
            sums.add(self.leaves.squares(), counts.units, counts.samples, factor)

    def report(self) -> Sequence[Any]:
        """Return the sums of the window, and the squares of its gradient."""
        self._has_reported = True
        return () if self._sums is None else self._sums.for_ranks(self.leaves.squares_of_gradients()).pack()

    def learn(self, rows: list[Sequence[Any]], factor: float) -> None:
        """Hand on the records of all ranks."""
        self.num_windows += 1
        self._has_reported = False
        if self._sums is not None:
            self._sums = None
            accumulator = self._accumulator()
            if factor and accumulator is not None:
                self._sink.learn(rows, factor, accumulator.number)
        self._look_at_examples(False)

    def _weights(self) -> Weights:
        accumulator = self._accumulator()
        return Weights.of(self._model, [] if accumulator is None else as_list(accumulator.optimizer))

    def _weights_changed(self, weights: Weights) -> None:
        self.leaves.let_go()
        self.leaves = LeafSquares(weights, self.parallelism)
        self._look_at_examples(False)
        self._examples, self._cannot_tell_examples = None, ""
        self._sink.weights_changed(weights)

    def _try_examples(self) -> None:
        if self._examples is None and not self._cannot_tell_examples:
            try:
                self._examples = ExampleNorms(self._model, self.leaves.weights.parameters)
            except UnknownModuleError as error:
                self._cannot_tell(error.reason)

    def _cannot_tell(self, reason: str) -> None:
        self._look_at_examples(False)
        self._examples, self._cannot_tell_examples = None, reason
        self._sink.note(
            f"one micro-batch per step, and its examples cannot be told apart ({reason}): "
            + (
                "no measurement without accumulation"
                if batch_norms(self._model)
                else "a batch that comes through micro_batches() is cut in two instead, each half weighed by its "
                "samples or by weight=, which is exact where the loss is a mean over those"
            )
        )

    def _look_at_examples(self, wanted: bool) -> None:
        if wanted:
            self._try_examples()
        wanted = wanted and self._examples is not None
        if self._examples is not None and self._is_by_example != wanted:
            self._examples.start() if wanted else self._examples.stop()
        self._is_by_example = wanted
