"""What one rank knows of a window, as a few numbers: added up micro-batch by micro-batch, told to the others once.

Promises:
- numbers stay on their device until somebody asks for the estimate;
- what makes a window unusable travels with the numbers, so that all ranks leave out the same windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from batchwright.noise.observation import Observation, Squares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.noise.leaves import Weights

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
# Numbers that a rank tells besides the squares of its groups.
_NUM_OTHERS = 8
# Gradients in 16 bits are rounded with every micro-batch that is added.
PROBE_TOLERANCES = {4: 1e-3, 8: 1e-6}
ROUGH = 5e-2


class Sink(Protocol):
    """Takes what is found of the windows."""

    def learn(self, rows: Sequence[Sequence[Any]], factor: float, number: int) -> None:
        """Take what all ranks told of the window of this number; its gradient is to be multiplied by `factor`."""

    def skip(self, reason: int) -> None:
        """Count a window that cannot be used."""

    def weights_changed(self, weights: Weights) -> None:
        """Measure something else from now on."""

    def note(self, text: str) -> None:
        """Say something to the user, once."""


class WindowSums:
    """The sums of one window on one rank."""

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
        self._probe_in_the_end: Any = 0.0

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

    def end_probe(self, probe: Any) -> None:
        """Note the same combination of the gradient in the end."""
        self._probe_in_the_end = probe

    def numbers(self, squares_of_mean: torch.Tensor) -> list[Any]:
        """Return what to tell: the same number of numbers on every rank."""
        weighted = [0.0] * self._num_groups if self._weighted is None else list(self._weighted.unbind())
        return [
            *weighted,
            *squares_of_mean.unbind(),
            self.units,
            self.samples,
            float(self.parts),
            float(self.reason),
            self._scale_changes,
            self._probe,
            self._probe_in_the_end,
            self._probe_size,
        ]


@dataclass(frozen=True)
class Told:
    """The numbers of all ranks, read."""

    observations: tuple[Observation, ...]
    """One per group; empty where the window cannot be used."""
    units: float
    samples: float
    reason: int
    squares_by_rank: tuple[float, ...]
    """Mean |g|^2 of each rank's parts."""

    @staticmethod
    def read(
        rows: Sequence[Sequence[Any]],
        num_groups: int,
        *,
        factor: float = 1.0,
        is_sharded: bool = False,
        population: int | None = None,
        probe_tolerance: float = ROUGH,
        is_own_loop: bool = False,
    ) -> Told:
        """Read the rows of all ranks; the mean gradient is still to be multiplied by `factor`.

        `population` is counted in samples. In a loop of a user's own all ranks must have as many parts.
        """
        table = [_floats(row) for row in rows]
        columns = list(zip(*table, strict=True))[-_NUM_OTHERS:]
        units, samples, parts, _, changes, added, _, size = (sum(column) for column in columns)
        # Every rank ends with the mean over ranks of what all of them added.
        is_off = abs(added / len(table) - columns[6][0]) > probe_tolerance * (size / len(table) + abs(columns[6][0]))
        is_uneven = is_own_loop and len(set(columns[2])) > 1
        reason = int(max(columns[3])) or (SCALE_CHANGED if changes else 0)
        reason = reason or (UNEVEN_RANKS if is_uneven else SINGLE if parts < 2 else 0)
        in_units = population * units / samples if population is not None and samples else None
        observations = []
        for group in range(num_groups):
            weighted = sum(row[group] for row in table)
            # Where every rank holds whole gradients they are alike; shards add up.
            of_mean = [row[num_groups + group] for row in table]
            mean = (sum(of_mean) if is_sharded else of_mean[0]) * factor * factor
            seen = Squares(weighted, units, round(parts)).observe(mean, population=in_units)
            if seen is not None:
                observations.append(seen)
        if not all(seen.is_finite for seen in observations):
            reason = reason or NOT_FINITE
        # The parts of a mean cannot be shorter than the mean itself (Cauchy and Schwarz).
        of_parts = sum(sum(row[:num_groups]) for row in table)
        if is_off or sum(seen.trace for seen in observations) * (parts - 1) < -1e-3 * of_parts:
            reason = reason or DOES_NOT_ADD_UP
        each = tuple(sum(row[:num_groups]) / row[-_NUM_OTHERS] for row in table if row[-_NUM_OTHERS])
        return Told(() if reason else tuple(observations), units, samples, reason, each)


def _floats(row: Sequence[Any]) -> list[float]:
    """Read numbers that may lie on a device, in one transfer."""
    tensors = [number.reshape(()) for number in row if isinstance(number, torch.Tensor)]
    read = iter(torch.stack([t.to(tensors[0]) for t in tensors]).tolist()) if tensors else iter(())
    return [float(next(read)) if isinstance(number, torch.Tensor) else float(number) for number in row]
