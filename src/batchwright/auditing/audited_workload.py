"""A workload under audit: the model, the samples, and the loop that accumulates over them.

Promises:
- every split is of the very same samples, in the same order;
- with dropout replayed, each micro-batch draws the same numbers in the reference as in the loop.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from batchwright.accumulate.micro_batches import counted_micro_batch
from batchwright.accumulate.weights import batch_norms, weights_held_by
from batchwright.auditing.audit_result import MEAN_OF_PARTS, TOLERANCES, Compared
from batchwright.auditing.gradients import Gradient, combine, named_weights
from batchwright.auditing.loop_recorder import RecordedWindow, plain_window, record_windows
from batchwright.auditing.overrides import frozen_statistics, without_autocast, without_dropout
from batchwright.device.batches import cut, make_batch, move_batch
from batchwright.device.step import (
    build_model,
    build_optimizers,
    check_that_something_trains,
    checked_loss,
    scalar_loss,
)
from batchwright.errors import InvalidInputError
from batchwright.state.process_state import kept_random_state
from batchwright.state.untouched import Keep
from batchwright.units import as_list, counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from batchwright.workload import Workload


_CPU = torch.device("cpu")
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_NARROW = (torch.bfloat16, torch.float16)
# Of a random loss, to tell whether it is a mean.
_DRAWS = 16


class SeededMicroBatches(list[Any]):
    """Micro-batches of which each sets the random numbers when it is taken."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            torch.manual_seed(index)
        return super().__getitem__(index)


class AuditSubject(ABC):
    """Samples that can be run as one batch and as an accumulation."""

    dtype: str
    notes: list[str]
    model: nn.Module
    is_stateful: bool = False
    """Whether the loss differs from call to call with the same random numbers."""

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """Whether the loss is random even without dropout."""

    @property
    def is_random_known(self) -> bool:
        """Whether `is_random` was measured already: if that is dear, it is measured only if gradients differ."""
        return True

    @property
    def has_batch_norm(self) -> bool:
        """Whether statistics are taken from each batch."""
        return bool(batch_norms(self.model.train()))

    @abstractmethod
    def open(self) -> AbstractContextManager[None]:
        """Compare inside of this."""

    def frozen_statistics(self) -> AbstractContextManager[None]:
        """Have batch normalization use its running statistics."""
        return frozen_statistics(self.model)

    def without_draws(self) -> AbstractContextManager[bool]:
        """Turn off what was replayed so far; hands out whether anything was."""
        return nullcontext(False)

    @abstractmethod
    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        """Return the samples as micro-batches."""

    @abstractmethod
    def reference(self, sizes: Sequence[int]) -> Gradient:
        """Return the gradient of one batch of all samples of a split."""

    def compared_with(self, sizes: Sequence[int]) -> Compared:
        """Return what `reference` is, and whether that is the gradient of the big batch."""
        return Compared()

    @abstractmethod
    def of_loss(self, batch: Any) -> Gradient:
        """Return the gradient of the loss of one batch."""

    @abstractmethod
    def accumulated(self, micro_batches: Sequence[Any], *, detailed: bool = False, seed: int = 0) -> RecordedWindow:
        """Return what the loop would step with."""

    @abstractmethod
    def twice(self, micro_batches: Sequence[Any]) -> list[RecordedWindow]:
        """Return two windows in a row on the same samples; one where only one can be run."""

    @abstractmethod
    def num_units(self, sizes: Sequence[int]) -> float:
        """Return the loss units of a split."""

    @property
    @abstractmethod
    def stepped_names(self) -> set[str]:
        """The weights that an optimizer steps."""


class AuditedWorkload(AuditSubject):
    """A workload made ready to be compared with itself."""

    is_random = False

    def __init__(
        self, workload: Workload, num_samples: int, *, dtype: str, dropout: str, shape: dict[str, Any]
    ) -> None:
        self.dtype = dtype
        self.notes: list[str] = []
        assert workload.loss is not None
        self._workload, self._loss = workload, workload.loss
        self._replays = dropout == "replayed"
        with kept_random_state():
            torch.manual_seed(0)  # so that a second audit answers the same
            # A live one in place, for an optimizer and functions that hold it; `untouched` gives it back.
            self.model = build_model(workload, _CPU)
            narrow = {str(p.dtype).removeprefix("torch.") for p in self.model.parameters() if p.dtype in _NARROW}
            self.model = self.model.to(_CPU)._apply(lambda tensor: _cast(tensor, _DTYPES[dtype])).train()
            self.model.zero_grad(set_to_none=True)
            if not hasattr(self.model, "no_sync"):
                # A loop for ranks asks for it; one process has nothing to leave out.
                vars(self.model)["no_sync"] = nullcontext
            self._optimizers = build_optimizers(workload, self.model)
            self._batch = _as_dtype(move_batch(make_batch(workload, num_samples, shape, _CPU), _CPU), _DTYPES[dtype])
        if narrow:
            self.notes.append(
                f"the weights are {', '.join(sorted(narrow))}: a real run adds up gradients in 16 bits, which is not "
                "judged here; Accumulator(precise=True) adds them up in fp32"
            )
        self._num_samples = num_samples

    @contextmanager
    def open(self) -> Iterator[None]:
        """Compare inside of this: dropout is off, random numbers and running statistics come back."""
        with ExitStack() as stack:
            stack.enter_context(kept_random_state())
            cast = stack.enter_context(without_autocast())
            with without_dropout(self.model):
                if any(map(is_lazy, (*self.model.parameters(), *self.model.buffers()))):
                    self._loss_value(seed=0)  # makes the weights, and they stay for what follows
                self._look_for_randomness()
            if not self._replays:
                off = stack.enter_context(without_dropout(self.model))
                if off:
                    self.notes.append(f"dropout was off ({counted(len(off), 'place')})")
            yield
            if cast:
                self.notes.append(f"autocast to {cast[0].removeprefix('torch.')} was off: compared in {self.dtype}")

    def micro_batches(self, sizes: Sequence[int]) -> list[Any]:
        """Cut the samples into micro-batches; what the split does not need is left out."""
        rest = self._num_samples - sum(sizes)
        pieces = cut(self._batch, [*sizes, rest] if rest else list(sizes), self._workload.split)
        return pieces[: len(sizes)]

    def reference(self, sizes: Sequence[int]) -> Gradient:
        """Return the gradient of one batch of all samples of a split."""
        if self._replays:
            parts = self.micro_batches(sizes)
            return combine([self.of_loss(part, seed) for seed, part in enumerate(parts)], self._shares(parts))
        return self.of_loss(self.micro_batches([sum(sizes)])[0], must_train=True)

    def of_loss(self, batch: Any, seed: int = 0, *, must_train: bool = False) -> Gradient:
        """Return the gradient of the workload's loss on one batch."""
        torch.manual_seed(seed)
        self.model.zero_grad(set_to_none=True)
        with self._kept_model():
            loss = _usable(self._loss(self.model, batch))
            loss.backward()
            if must_train:
                check_that_something_trains(as_list(self._optimizers))
            gradient = replace(Gradient.of(self.model), loss=float(loss.detach()))
        self.model.zero_grad(set_to_none=True)
        return gradient

    def accumulated(self, micro_batches: Sequence[Any], *, detailed: bool = False, seed: int = 0) -> RecordedWindow:
        """Return what the loop would step with."""
        return self._windows(micro_batches, times=1, detailed=detailed, seed=seed)[0]

    def twice(self, micro_batches: Sequence[Any]) -> list[RecordedWindow]:
        """Return two windows in a row; one where no loop was handed in."""
        return self._windows(micro_batches, times=1 if self._workload.window is None else 2)

    def _windows(
        self, micro_batches: Sequence[Any], *, times: int, detailed: bool = False, seed: int = 0
    ) -> list[RecordedWindow]:
        window = self._workload.window or plain_window(self._loss)

        def handed() -> list[Any]:
            torch.manual_seed(seed)
            return SeededMicroBatches(micro_batches) if self._replays else list(micro_batches)

        with self._kept_model():
            recorded = record_windows(
                window, self.model, as_list(self._optimizers), handed, times=times, detailed=detailed
            )
        if recorded[0].has_clipped and (note := "the loop clips; it was judged before its clipping") not in self.notes:
            self.notes.append(note)
        return recorded

    def num_units(self, sizes: Sequence[int]) -> float:
        """Return the loss units of a split."""
        return sum(self._units(micro_batch) for micro_batch in self.micro_batches(sizes))

    @property
    def stepped_names(self) -> set[str]:
        """The weights that an optimizer steps."""
        stepped = {id(weight) for weight in weights_held_by(as_list(self._optimizers))}
        return {name for name, weight in named_weights(self.model).items() if id(weight) in stepped}

    def compared_with(self, sizes: Sequence[int]) -> Compared:
        """Return what a replay compares with, and whether that is the big batch where dropout is off."""
        if not self._replays:
            return Compared()
        if self.is_random or self.is_stateful:
            return self._compared_by_loss(sizes)
        with without_dropout(self.model):
            parts = self.micro_batches(sizes)
            mean = combine([self.of_loss(part) for part in parts], self._shares(parts))
            error = mean.error_to(self.of_loss(self.micro_batches([sum(sizes)])[0]))
        is_right = error is not None and error <= TOLERANCES[self.dtype]
        note = "the mean of its micro-batches by units is the gradient of the big batch where dropout is off (checked)"
        return Compared(MEAN_OF_PARTS, error, is_right, note if is_right else "")

    def _compared_by_loss(self, sizes: Sequence[int]) -> Compared:
        """Compare losses over several draws: all that can be told of a loss that is not the same twice is its mean."""
        parts, whole = self.micro_batches(sizes), self.micro_batches([sum(sizes)])[0]
        shares, gaps, means = self._shares(parts), [], []
        for draw in range(_DRAWS):
            torch.manual_seed(draw)
            with self._kept_model(), torch.no_grad():
                big = float(scalar_loss(self._loss(self.model, whole)))
                losses = [float(scalar_loss(self._loss(self.model, part))) for part in parts]
                mean = sum(share * loss for share, loss in zip(shares, losses, strict=True))
            gaps.append(big - mean)
            means.append(mean)
        center, spread = statistics.fmean(gaps), statistics.stdev(gaps) / _DRAWS**0.5
        how = "is random" if self.is_random else "differs from call to call"
        unjudged = f"the loss {how}: the gradient was not compared with that of the big batch"
        if abs(center) <= 5 * spread:
            return Compared(MEAN_OF_PARTS, None, True, unjudged)
        ratio = 1 + center / statistics.fmean(means) if statistics.fmean(means) else math.nan
        differs = (
            f"{unjudged}, and over {_DRAWS} draws its loss is about {ratio:.2g} times the mean of its micro-batches'"
        )
        return Compared(MEAN_OF_PARTS, None, False, f"{differs}: it is no mean over these units")

    def _shares(self, micro_batches: Sequence[Any]) -> list[float]:
        units = [self._units(micro_batch) for micro_batch in micro_batches]
        return [unit / sum(units) for unit in units]

    @contextmanager
    def without_draws(self) -> Iterator[bool]:
        """Turn dropout off where it was replayed; hands out whether it was."""
        with without_dropout(self.model) if self._replays else nullcontext():
            yield self._replays

    def _units(self, micro_batch: Any) -> float:
        return counted_micro_batch(micro_batch, self._workload.units).counts.units

    def _look_for_randomness(self) -> None:
        with self._kept_model():
            first, again = self._loss_value(seed=0), self._loss_value(seed=0)
        with self._kept_model():
            other = self._loss_value(seed=1)
        self.is_stateful = first != again
        self.is_random = not self.is_stateful and first != other
        if self.is_stateful:
            self.notes.append(
                f"the loss differs from call to call with the same random numbers ({first:.6g}, then {again:.6g}): "
                "it counts or collects something, or draws from a generator of its own"
            )
        elif self.is_random:
            self.notes.append(f"the loss is random even without dropout ({first:.6g}, then {other:.6g})")

    def _loss_value(self, seed: int) -> float:
        torch.manual_seed(seed)
        return float(_usable(self._loss(self.model, self._batch)).detach())

    @contextmanager
    def _kept_model(self) -> Iterator[None]:
        # What a forward leaves behind (statistics, a queue, a cache that grows, a counter of the loss) is gone before
        # the next one: otherwise what is compared would begin from different states.
        held = [part for part in (self._workload.loss, self._workload.window) if part is not None]
        keep = Keep(held, objects=[self.model])
        try:
            yield
        finally:
            keep.restore()


def _usable(loss: Any) -> torch.Tensor:
    checked = checked_loss(loss)
    if not math.isfinite(float(checked.detach())):
        raise InvalidInputError(
            f"the loss is {float(checked.detach())}: there is no gradient to compare.",
            remedy="samples, or a micro-batch, at which the loss is a number",
        )
    return checked


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fractions in a type; complex numbers stay complex, as wide as it."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _as_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its fractions in the type of the model."""
    from torch.utils._pytree import tree_map

    def cast(leaf: Any) -> Any:
        return _cast(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf

    return {key: cast(value) for key, value in batch.items()} if hasattr(batch, "items") else tree_map(cast, batch)
