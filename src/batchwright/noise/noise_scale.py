"""`NoiseScale`: the critical batch size while training runs, with its interval.

Promises:
- gradients, weights and random numbers are not changed; if a batch has to be cut in two, they may be, and a note says
  so; nothing is read from a device for a micro-batch;
- all ranks give the same answer;
- a window that cannot be used is left out, counted in `skipped` by its reason, and never becomes a number.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.weights import batch_norms, check_same_weights
from batchwright.errors import InvalidInputError
from batchwright.noise.capture.own_loop import OwnLoop
from batchwright.noise.capture.watched_windows import (
    PROBE_TOLERANCES,
    REASONS,
    ROUGH,
    MeasuredWindow,
    RanksAlike,
    WatchedWindows,
)
from batchwright.noise.capture.weight_hooks import Weights, square
from batchwright.noise.observations import HistoryPoint, Squares, Track, ratio
from batchwright.units import as_list, counted, shortened, whole_number

if TYPE_CHECKING:
    from batchwright.planning.critical_batch import CriticalBatch
    from batchwright.planning.horizon import Stretch


def estimate(gradients: Any, micro_batch: float | Sequence[float] = 1) -> float | None:
    """Return T/|G|^2 from the gradients of the micro-batches of one step, each the mean over its samples.

    >>> round(estimate([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])], micro_batch=8), 6)
    4.0
    >>> estimate([torch.zeros(2), torch.zeros(2)]), estimate([])
    (inf, None)

    A gradient is a tensor, or a list or dict of tensors; `gradients` may be one tensor with a row each. `micro_batch`
    is the samples of a micro-batch, or a list with those of each. Without gradients the answer is None; if the
    signal is zero, or these micro-batches cannot tell it from zero, it is infinite. One step says little:
    `NoiseScale` averages over many, and has an interval.
    """
    rows = [] if gradients is None else [_flat(gradient) for gradient in gradients]
    if not rows:
        return None
    if len({row.numel() for row in rows}) > 1:
        raise InvalidInputError(
            f"the gradients are of different sizes: {sorted({row.numel() for row in rows})} numbers.",
            remedy="the gradients of the same weights, one for each micro-batch",
        )
    sizes = _sizes(micro_batch, len(rows))
    squares = [float(square(row.double())) for row in rows]
    usable = [index for index, value in enumerate(squares) if math.isfinite(value) and sizes[index] > 0]
    if len(usable) < len(rows):
        warnings.warn(
            f"{len(rows) - len(usable)} of {len(rows)} gradients left out: infinite, not a number, or of no samples",
            stacklevel=2,
        )
    if len(usable) < 2:
        raise InvalidInputError(
            f"a noise scale needs the gradients of two micro-batches or more; received {len(usable)} that can be used.",
            remedy="cut the batch in two, and hand in both gradients",
        )
    units = sum(sizes[index] for index in usable)
    mean = sum((rows[index].double() * (sizes[index] / units) for index in usable), torch.zeros(()))
    seen = Squares.of([squares[i] for i in usable], [sizes[i] for i in usable]).observe(float(square(mean)))
    assert seen is not None
    return ratio(seen.trace, seen.signal)


def _flat(gradient: Any) -> torch.Tensor:
    if isinstance(gradient, torch.Tensor):
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        return (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    parts = list(gradient.values()) if isinstance(gradient, Mapping) else gradient
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        raise InvalidInputError(
            f"a gradient is a tensor, or a list or dict of tensors; received {shortened(gradient)}."
        )
    return torch.cat([_flat(part) for part in parts])


def _sizes(micro_batch: Any, number: int) -> list[float]:
    sizes = [micro_batch] * number if isinstance(micro_batch, Real) else list(micro_batch)
    if len(sizes) != number:
        raise InvalidInputError(f"{number} gradients, but {len(sizes)} sizes of micro-batches.")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, Real) or not 0 <= float(size) < math.inf:
            raise InvalidInputError(f"a micro-batch holds 0 samples or more; received {shortened(size)}.")
    return [float(size) for size in sizes]


# Numbers that wait on a device; read together, so that a long run that nobody asks does not pile them up.
_MOST_UNREAD = 64
# As many in a row, with none that could be used, are no accident.
_MANY_SKIPPED = 10

BATCH_NORM_WARNING = (
    "{names}: batch normalization ties the samples of a micro-batch together, so their gradients are not independent "
    "and the noise scale is that of the micro-batch in use; a batch of another size has another one"
)


class NoiseScaleWarning(UserWarning):
    """What is measured is not quite the noise scale."""


class NoiseScale:
    """Measure the critical batch of a training run, from an Accumulator or from a loop of one's own.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(4, 1)
    >>> accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1e-3), accumulation=4)
    >>> noise = NoiseScale(accumulator)
    >>> for micro in accumulator.micro_batches([torch.randn(8, 4) for _ in range(400)]):
    ...     step = accumulator.backward((model(micro) - micro.sum(1, keepdim=True)).pow(2).mean())
    >>> critical = noise.critical_batch
    >>> critical.observations, critical.unit, critical.low < critical.value < critical.high
    (100, 'samples', True)

    For a loop of one's own: `NoiseScale(model, optimizer=optimizer, micro_batch=8)`, made before the loop begins.

    - `every`: measure every N-th step.
    - `window`: the units to average over; default: those of 200 steps.
    - `unit`: the name of what the weights count.
    - `population`: the size of a dataset that is drawn from without replacement.
    - `scaler`: the GradScaler of a loop of one's own.
    - `batch_dim`: the dimension along which the samples of an input lie; 1 for recurrent nets and transformers that
      take the time first.
    """

    def __init__(
        self,
        accumulator_or_model: Any,
        *,
        optimizer: Any = None,
        micro_batch: int | None = None,
        batch_dim: int = 0,
        scaler: Any = None,
        every: int = 1,
        window: float | None = None,
        unit: str | None = None,
        population: int | None = None,
    ) -> None:
        every = whole_number(every, "every")
        if window is not None and not (isinstance(window, int | float) and window > 0):
            raise InvalidInputError(
                f"window must be above 0, in samples or what else is counted; received {shortened(window)}."
            )
        self._population = None if population is None else whole_number(population, "population")
        self._skipped: Counter[str] = Counter()
        self.notes: list[str] = []
        """What to know about the measurement."""
        self._unread: list[tuple[Sequence[Sequence[Any]], float, int]] = []
        self._source: WatchedWindows | OwnLoop
        self.accumulator = accumulator_or_model if isinstance(accumulator_or_model, Accumulator) else None
        """What is watched; None for a loop of the user's own."""
        if isinstance(accumulator_or_model, Accumulator):
            if optimizer is not None or micro_batch is not None or scaler is not None or batch_dim:
                raise InvalidInputError(
                    "an Accumulator knows its optimizer, its micro-batches and its scaler; received one of them too.",
                    remedy="NoiseScale(accumulator)",
                )
            model = accumulator_or_model.model
            self._source = WatchedWindows(accumulator_or_model, every=every, sink=self)
            accumulator_or_model.watch(self._source)
        else:
            model = accumulator_or_model
            along = whole_number(batch_dim, "batch_dim", least=0)
            self._source = self._of_own_loop(model, as_list(optimizer), micro_batch, along, scaler, every)
        names = self._source.leaves.weights.names
        self._alike = RanksAlike()
        self._known = Track(window=window, unit=unit or "samples", names=names, every=every)
        self._has_unit = unit is not None
        self._known.population = self._population
        others = self._source.leaves.weights.num_others
        if others:
            self.notes.append(f"{counted(others, 'weight')} get gradients but are in no optimizer, and are left out")
        if batch_norms(model):
            self.note(BATCH_NORM_WARNING.format(names=", ".join(batch_norms(model)[:3])))

    estimate = staticmethod(estimate)

    @property
    def critical_batch(self) -> CriticalBatch | None:
        """The estimate over the window; None before the first observation."""
        return self._track.critical_batch()

    @property
    def by_group(self) -> dict[str, CriticalBatch]:
        """The estimate for each of the optimizer's parameter groups."""
        estimates = {name: self._track.critical_batch(group) for group, name in enumerate(self._track.names)}
        return {name: critical for name, critical in estimates.items() if critical is not None}

    @property
    def history(self) -> list[HistoryPoint]:
        """The estimate along the run, four points per window."""
        return list(self._track.history)

    @property
    def stretches(self) -> list[Stretch]:
        """The whole run in at most 32 pieces, whatever the window."""
        return list(self._track.stretches)

    @property
    def progress(self) -> tuple[float | None, float]:
        """The units that are averaged over, None before the first observation, and those that were seen in all."""
        return self._track.window, self._track.total_units

    @property
    def observations(self) -> int:
        """Steps that were measured so far."""
        return self._track.num_seen

    @property
    def skipped(self) -> dict[str, int]:
        """Windows that could not be used, by reason."""
        self._read()
        return dict(self._skipped)

    def average_over(self, window: float) -> None:
        """Average over another number of units from now on."""
        self._track.average_over(window)

    def restart(self) -> None:
        """Forget the window, after something was changed that changes the gradients themselves."""
        self._track.restart()

    def close(self) -> None:
        """Stop measuring, and take every hook away; the answers stay."""
        self._read()
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """Return everything measured so far as plain data."""
        track = self._track.state_dict()
        return {
            "steps": self._source.num_windows,
            "track": track,
            "skipped": dict(self._skipped),
            "notes": list(self.notes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict()`."""
        names = self._track.names
        if state["track"]["names"] != names:
            raise InvalidInputError(
                f"this state is of the parameter groups {state['track']['names']}; the optimizer has {names}."
            )
        self._unread.clear()
        self._source.num_windows = state["steps"]
        self._track.load_state_dict(state["track"])
        self._skipped, self.notes = Counter(state["skipped"]), list(state["notes"])

    def learn(self, rows: Sequence[Sequence[Any]], factor: float, number: int) -> None:
        """Take what all ranks sent of a window; it is read when an answer is needed."""
        self._unread.append((rows, factor, number))
        if len(self._unread) >= _MOST_UNREAD:
            self._read()

    def skip(self, reason: int) -> None:
        """Count a window that cannot be used."""
        self._skipped[REASONS[reason]] += 1
        if self._skipped.total() == _MANY_SKIPPED and not self._track.num_seen:
            self.note(f"the first {_MANY_SKIPPED} windows could not be used; the last because of {REASONS[reason]}")

    def weights_changed(self, weights: Weights) -> None:
        """Begin anew: weights were frozen, thawed, added or taken away."""
        self._track.restart()
        self._track.names = list(weights.names)
        self.notes.append(f"the weights that train changed after {self._track.num_seen} observations: measured anew")

    def note(self, text: str) -> None:
        """Say something once, as a warning and in `notes`."""
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(text, NoiseScaleWarning, stacklevel=3)

    @property
    def _track(self) -> Track:
        """The observations, all that ranks have sent by now among them."""
        self._read()
        return self._known

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for rows, factor, number in unread:
            report = MeasuredWindow.read(
                rows,
                self._source.parallelism,
                factor=factor,
                population=self._population,
                probe_tolerance=PROBE_TOLERANCES.get(self._source.leaves.weights.itemsize, ROUGH),
                is_own_loop=self.accumulator is None,
            )
            if report.reason:
                self.skip(report.reason)
                continue
            self._name_unit(report)
            self._known.add(report.observations, step=number, samples=report.samples)
            if self._alike.add(report.squares_by_rank):
                self.note(self._alike.warning)

    def _name_unit(self, report: MeasuredWindow) -> None:
        if self._population is not None and not report.samples:
            self.note("the samples of a micro-batch are not known, so population= is not corrected for")
        if self._has_unit:
            return
        self._has_unit = True
        if not report.samples and report.units == report.observations[0].parts:
            self._track.unit = "micro-batches"
            self.note(
                "the size of a micro-batch is not known, so the critical batch is counted in micro-batches; "
                "micro_batches(loader) counts samples, backward(loss, weight=len(batch)) does too"
            )
        elif abs(report.samples - report.units) > 1e-6 * report.units:
            self._track.unit = "units"

    def _of_own_loop(
        self, model: Any, optimizers: list[Any], micro_batch: int | None, batch_dim: int, scaler: Any, every: int
    ) -> OwnLoop:
        if not hasattr(model, "named_parameters"):
            raise InvalidInputError(
                f"NoiseScale takes an Accumulator, or a model with its optimizer; received {shortened(model)}."
            )
        wrong = [optimizer for optimizer in optimizers if not hasattr(optimizer, "param_groups")]
        if wrong:
            raise InvalidInputError(f"NoiseScale takes optimizers of torch; received {shortened(wrong[0])}.")
        if not optimizers or micro_batch is None:
            raise InvalidInputError(
                "for a loop of your own NoiseScale needs the optimizer that steps and the samples of a micro-batch.",
                remedy="NoiseScale(model, optimizer=optimizer, micro_batch=8), or NoiseScale(accumulator)",
            )
        check_same_weights(model, optimizers)
        return OwnLoop(
            model,
            optimizers,
            micro_batch=whole_number(micro_batch, "micro_batch"),
            batch_dim=batch_dim,
            scaler=scaler,
            every=every,
            sink=self,
        )
