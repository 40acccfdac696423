"""Windows: one while it is filled (`OpenWindow`), what its optimizer step did (`Step`), and one after the other.

Promises:
- each loss is scaled by its share of what was planned; what was used instead is corrected once, at the end;
- a plan that came from reading ahead is exact, so that nothing is left to correct;
- a `Step` reads nothing from a device until somebody wants the number, and then needs no other rank;
- its loss is the mean over the units of the window and of all ranks, not divided by anything else;
- the flag that synchronises ranks is set before each forward, and put back on close, exception and flush;
- a window that was read ahead is as long on every rank;
- a watcher sees every backward, and every finished window before its gradients are clipped; it changes none, and what
  it has to say goes with the one exchange between ranks that a window makes anyhow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.micro_batches import (
    CountingSampler,
    LossTerm,
    MicroBatch,
    ReadAhead,
    Reduction,
    Totals,
    WindowSizes,
)
from batchwright.accumulate.parallelism import Parallelism, Planned, Used, exchange
from batchwright.errors import InvalidInputError
from batchwright.printed_result import PrintedLine
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from batchwright.accumulate.boundary import Boundary


@dataclass
class WeightedMean:
    """The mean of a loss over the micro-batches of a window, taken when somebody asks for the number.

    >>> mean = WeightedMean()
    >>> mean.add(torch.tensor(1.0), 1.0)
    >>> mean.add(torch.tensor(4.0), 2.0)
    >>> float(mean), float(mean.weighted_sum())
    (3.0, 9.0)
    """

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, value: torch.Tensor, weight: float) -> None:
        """Note the loss of one micro-batch; arithmetic on it would show in the time of a step."""
        self.values.append(value)
        self.weights.append(weight)

    def weighted_sum(self) -> torch.Tensor:
        """Return the sum on its device."""
        values = _stacked(self.values)
        return (values * values.new_tensor(self.weights)).sum()

    def __float__(self) -> float:
        pairs = zip(_stacked(self.values).tolist(), self.weights, strict=True)
        return float(sum(value * weight for value, weight in pairs) / sum(self.weights))


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([value.reshape(()) for value in values])
    # In 16 bits a weight would be rounded.
    return stacked if stacked.dtype == torch.float64 else stacked.float()


@dataclass(frozen=True)
class Step(PrintedLine):
    """One finished window: how much went into it, and what came of it."""

    number: int
    """Windows finished so far, this one included."""
    units: float
    """The weights of the window on all ranks: tokens, or whatever was counted."""
    samples: int | None
    """Samples of the window on all ranks; None if they were not counted."""
    micro_batches: int
    """Micro-batches that were used, on all ranks."""
    skipped: str | None = None
    """Why the optimizer did not step; None if it did."""
    splits: int = 0
    """How often a micro-batch of this rank ran out of memory and was cut in two."""
    losses: tuple[WeightedMean | float, ...] = field(default=(), repr=False)
    norm: torch.Tensor | float | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The loss of the window, each term by its own mean; not a number where nothing was used."""
        return float(sum(float(loss) for loss in self.losses)) if self.losses else float("nan")

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the gradient before it was clipped; None if it was not measured."""
        return None if self.norm is None else float(self.norm)

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain data."""
        return {
            "number": self.number,
            "loss": self.loss if self.losses else None,
            "samples": self.samples,
            "units": self.units,
            "micro_batches": self.micro_batches,
            "gradient_norm": self.gradient_norm,
            "skipped": self.skipped,
            "splits": self.splits,
        }

    def __str__(self) -> str:
        parts = [f"step {self.number:,}", f"loss {self.loss:.4f}"]
        if self.samples is not None:
            parts.append(f"{self.samples:,} samples")
        if self.units != self.samples:
            parts.append(f"{self.units:,.0f} units")
        parts.append(f"{self.micro_batches} micro-batches")
        if self.norm is not None:
            parts.append(f"gradient norm {self.gradient_norm:.3g}")
        if self.splits:
            parts.append(f"{self.splits} splits")
        if self.skipped:
            parts.append(f"skipped: {self.skipped}")
        return ", ".join(parts)


@dataclass
class OpenWindow:
    """The window of one rank, between two optimizer steps."""

    planned: Totals
    """Totals over all ranks, as known or assumed when it began."""
    num_left: int
    """Micro-batches of this rank that are still to come."""
    ranks: int = 1
    used: Totals = field(default_factory=Totals)
    losses: dict[Reduction, WeightedMean] = field(default_factory=dict)
    splits: int = 0
    num_with_gradient: int = 0

    def shares(self, terms: list[LossTerm], counts: Totals) -> list[float]:
        """Return what each term of a micro-batch is multiplied by; 0 if it has no share."""
        pairs = [(counts.of(term.over), self.planned.of(term.over)) for term in terms]
        # Gradients are averaged over ranks, and the mean is over the units of all of them.
        return [amount * self.ranks / total if amount and total else 0.0 for amount, total in pairs]

    def add(self, terms: list[LossTerm], counts: Totals) -> None:
        """Count what a micro-batch brought."""
        self.used = self.used + counts
        for term in terms:
            amount = counts.of(term.over)
            if amount:
                self.losses.setdefault(term.over, WeightedMean()).add(term.value.detach(), amount)

    def correction(self, used: Totals, reductions: Iterable[Reduction]) -> float:
        """Return what the gradient must be multiplied by, now that it is known what all ranks used.

        >>> window = OpenWindow(planned=Totals(units=4.0), num_left=0)
        >>> window.correction(Totals(units=3.0), ["units"])
        1.3333333333333333
        """
        factors = {self.planned.of(kind) / used.of(kind) for kind in reductions}
        if max(factors) - min(factors) > 1e-9 * max(factors):
            raise InvalidInputError(
                "the terms of this loss are means over different things, and what was used differs from what was "
                "planned: no single factor makes all of them right. The gradients of the window were dropped.",
                remedy="for micro in accumulator.micro_batches(loader, weight=...), and no skip()",
            )
        return factors.pop()


class WindowWatcher:
    """Looks at windows, as the measurement of gradient noise does; all ranks have one, or none has.

    What is written here watches nothing.
    """

    def expect(self, num_parts: int) -> None:
        """Make ready for a window of so many micro-batches on all ranks; called before its first forward."""

    def pieces(self) -> int:
        """Return what the next window is cut into if it is one micro-batch; called after `report`."""
        return 1

    def around(self, shares: Sequence[float], counts: Totals) -> AbstractContextManager[None]:
        """Look at the backward of one micro-batch, whose terms are multiplied by these shares."""
        return nullcontext()

    def report(self) -> Sequence[Any]:
        """Return a packed record, now that gradients are synchronised and unscaled; as many numbers on each rank."""
        return ()

    def learn(self, rows: list[Sequence[Any]], factor: float) -> None:
        """Take the records of all ranks; the gradient is still to be multiplied by `factor`, 0 if nothing was used."""


NOBODY = WindowWatcher()


class Position:
    """Counts windows and micro-batches, and can be put back to where it stood.

    >>> position = Position()
    >>> position.finish_window([])
    >>> position.state_dict()
    {'number': 1, 'windows_done': 1, 'micro_batches_done': 0}
    """

    def __init__(self) -> None:
        self.number = 0
        """Windows finished so far."""
        self.windows_done = self.micro_batches_done = 0
        """Of this epoch."""
        self._resumes = False

    def begin_epoch(self) -> int:
        """Return how many micro-batches of the epoch are done: none, but right after `load_state_dict`."""
        if not self._resumes:
            self.end_epoch()
        self._resumes = False
        return self.micro_batches_done

    def end_epoch(self) -> None:
        """Forget what was used of it."""
        self.windows_done = self.micro_batches_done = 0

    def finish_window(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Count a window, and what it used of the loader."""
        self.number += 1
        self.windows_done += 1
        self.micro_batches_done += sum(micro_batch.num_read for micro_batch in micro_batches)

    def state_dict(self) -> dict[str, int]:
        """Return the position as of the last finished window."""
        return {
            "number": self.number,
            "windows_done": self.windows_done,
            "micro_batches_done": self.micro_batches_done,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a position: the next epoch begins there."""
        if not isinstance(state, Mapping) or not {"number", "windows_done", "micro_batches_done"} <= set(state):
            raise InvalidInputError(f"this is no state of an Accumulator: {shortened(state)}.")
        number, windows, micro_batches = (
            whole_number(state[name], name, least=0) for name in ("number", "windows_done", "micro_batches_done")
        )
        if windows > number:
            raise InvalidInputError(f"this state counts {windows:,} windows of an epoch, and {number:,} in all.")
        self.number, self.windows_done, self.micro_batches_done = number, windows, micro_batches
        self._resumes = True


NO_UNITS = "the window holds no units: every weight is 0"


class Windows:
    """The windows of one rank."""

    def __init__(
        self, parallelism: Parallelism, boundary: Boundary, sizes: WindowSizes, *, averages_by_hand: bool
    ) -> None:
        self.sizes = sizes
        self.position = Position()
        self.awaited: MicroBatch | None = None
        self._parallelism = parallelism
        self._boundary = boundary
        # Gradients that are wide, or that a failed backward may leave half made, are synchronised by hand at the end;
        # so are all where DDP waits for one that does not come.
        self._always_by_hand = averages_by_hand
        self._is_by_hand = averages_by_hand or not parallelism.reaches_all(boundary.parameters)
        self._open: OpenWindow | None = None
        self._reader: ReadAhead | None = None
        self._ahead: Planned | None = None
        self._sizes_ahead = sizes
        self._watcher: WindowWatcher = NOBODY
        self._counting = CountingSampler()
        self.names: tuple[str, ...] = ()
        """What the weight counts apart."""
        self._typical = Totals()
        """A micro-batch of the last window, on average over all ranks."""
        self._set_flag()

    @property
    def is_reading(self) -> bool:
        """Whether a loader is being read ahead."""
        return self._reader is not None

    def open(self, counts: Totals) -> OpenWindow:
        """Return the open window; without a reader a new one, as if all its micro-batches were alike."""
        if self._open is None:
            size = self._next_size() or 1
            # What was used instead is corrected at the end. All ranks must assume the same: not what they have here.
            like = counts if self._parallelism.size == 1 else self._typical
            assumed = Totals(like.units or 1.0, like.samples or 1.0, 1.0).times(size * self._parallelism.size)
            self._begin(OpenWindow(assumed, size, ranks=self._parallelism.size))
        assert self._open is not None
        return self._open

    def watch(self, watcher: WindowWatcher) -> None:
        """Have something look at every window from now on."""
        if self._watcher is not NOBODY:
            raise InvalidInputError(
                f"this accumulator is watched already, by a {type(self._watcher).__name__}.",
                remedy="close that one first",
            )
        self._watcher = watcher
        self._expect(self._next_size())

    def unwatch(self, watcher: WindowWatcher) -> None:
        """Detach a watcher; does nothing if it is not attached."""
        if self._watcher is watcher:
            self._watcher = NOBODY

    def _begin(self, window: OpenWindow) -> None:
        self._boundary.begin()
        by_hand = self._always_by_hand or not self._parallelism.reaches_all(self._boundary.parameters)
        if by_hand and not self._is_by_hand and window.num_left == 1 and not self.is_reading:
            raise InvalidInputError(
                "weights were frozen since DDP wrapped the model, and the forward of this window's only micro-batch "
                "already made ready to synchronise them.",
                remedy="for micro in accumulator.micro_batches(loader), or wrap the model again after freezing",
            )
        self._is_by_hand = by_hand
        self._open = window

    def add(self, terms: list[LossTerm], counts: Totals) -> None:
        """Add the gradient of a micro-batch, or of a piece of one."""
        window = self.open(counts)
        shares = window.shares(terms, counts)
        # Where other ranks wait for every weight that this loss reaches, what counts nothing is run through as well.
        keeps_step = self._others_wait(window.num_left)
        with self._watcher.around(shares, counts):
            self._boundary.backward([term.value for term in terms], shares, keeps_step=keeps_step)
        window.num_with_gradient += any(shares)
        window.add(terms, counts)

    def done_with_one(self) -> Step | None:
        """Count a micro-batch as done; step where it was the last."""
        assert self._open is not None
        window = self._open
        self.awaited = None
        window.num_left -= 1
        if window.num_left:
            self._set_flag()
            return None
        return self._end(window, is_synchronised=not self._is_by_hand)

    def flush(self) -> Step | None:
        """Step with what there is."""
        if self._reader is not None:
            raise InvalidInputError(
                "inside micro_batches the last window steps by itself; flush() is for a plain loop."
            )
        window = self._open
        try:
            return None if window is None else self._end(window, is_synchronised=False)
        finally:
            self._parallelism.restore()
            if self._open is None:
                self.position.end_epoch()

    def begin_epoch(self, *, sampler_resumes: bool = False) -> int:
        """Return how many micro-batches of the epoch are done: none, but right after `load_state_dict`."""
        self.sizes.begin_epoch()
        if sampler_resumes:
            # The sampler starts where the loop stood: to leave anything out again would lose it.
            self.position.end_epoch()
        return self.position.begin_epoch()

    def yielded(self, reader: ReadAhead, counting: CountingSampler) -> Iterator[Any]:
        """Yield every micro-batch of a loader, window by window."""
        self._reader, self._counting = reader, counting
        try:
            self._look_ahead()
            while self._ahead is not None:
                if self._sizes_ahead is not self.sizes:
                    reader.put_back(self._ahead.micro_batches)
                    self._look_ahead()
                else:
                    yield from self._yielded_window(reader, self._ahead)
            if reader.error is not None:
                raise reader.error
            self.position.end_epoch()
            self._expect(self._next_size())
        finally:
            self._reader = self._ahead = self.awaited = None
            self._parallelism.restore()

    def _yielded_window(self, reader: ReadAhead, planned: Planned) -> Iterator[Any]:
        filled = reader.filled(planned.micro_batches, planned.longest)
        self._begin(OpenWindow(planned.totals, planned.longest, ranks=self._parallelism.size))
        self._expect(planned.longest)
        for micro_batch in filled:
            self._set_flag()
            self.awaited = micro_batch
            yield micro_batch.batch
            if self.awaited is not None:
                raise InvalidInputError(
                    "a micro-batch went by without backward(loss), run(batch, ...) or skip().",
                    remedy="accumulator.skip() where the body leaves one out",
                )

    def _look_ahead(self) -> None:
        _, self._ahead = exchange(self._parallelism, None, self._reader, self._read_window(), names=self.names)
        self._sizes_ahead = self.sizes

    def _read_window(self) -> list[MicroBatch]:
        return [] if self._reader is None else self._reader.read_window(self._next_size, self._watcher.pieces)

    def _end(self, window: OpenWindow, *, is_synchronised: bool) -> Step:
        try:
            self._boundary.weights.check()
        except InvalidInputError:
            # What was added up belongs to no set of weights, and the next window begins anew.
            self._open = None
            self._boundary.zero()
            raise
        if self._parallelism.size > 1:
            weights = self._boundary.parameters
            by_hand = self._parallelism.left_out(weights) if is_synchronised else weights
            if by_hand:
                self._parallelism.average(by_hand)
        self._boundary.unscale()
        self.position.finish_window([] if self._ahead is None else self._ahead.micro_batches)
        self._counting.received(self.position.micro_batches_done)
        square = self._boundary.square_of_norm() if self._boundary.needs_norm else None
        watched = self._watcher.report()
        used, self._ahead = exchange(
            self._parallelism,
            window,
            self._reader,
            self._read_window(),
            square=square,
            watched=watched,
            names=self.names,
        )
        self._sizes_ahead = self.sizes
        self._typical = used.totals.times(1 / (used.totals.window or 1.0))
        self._open = None
        try:
            return self._stepped(window, used)
        finally:
            self._boundary.zero()
            self._set_flag()
            if not self.is_reading:
                self._expect(self._next_size())

    def _stepped(self, window: OpenWindow, used: Used) -> Step:
        norm = None
        if used.losses:
            factor = window.correction(used.totals, used.losses)
            self._watcher.learn(used.watched, factor)
            norm = None if used.square is None else used.square**0.5 * factor
            skipped = self._boundary.step(factor, norm)
        else:
            skipped = NO_UNITS
            self._watcher.learn(used.watched, 0.0)
            self._boundary.drop()
        return Step(
            number=self.position.number,
            units=used.totals.units,
            samples=round(used.totals.samples) or None,
            micro_batches=round(used.totals.window),
            skipped=skipped,
            splits=window.splits,
            losses=tuple(used.losses.values()),
            norm=norm,
        )

    def set_sizes(self, sizes: WindowSizes) -> None:
        """Have the windows from now on be of other sizes."""
        self.sizes = sizes
        self._set_flag()

    def check_closed(self, *, remedy: str) -> None:
        """Refuse what may not happen in the middle of a window."""
        if self._open is not None:
            raise InvalidInputError(
                f"a window is open: {self._open.num_left} micro-batches are to come.", remedy=remedy
            )

    def check_awaited(self) -> None:
        """Refuse a second call for one micro-batch."""
        if self.is_reading and self.awaited is None:
            raise InvalidInputError("this micro-batch is done already: one backward, run or skip each.")

    def check_gradients(self) -> None:
        """Refuse to go on if somebody has thrown away what the window had added up."""
        if self._open is None or self._parallelism.is_sharded:  # between backwards FSDP2 keeps gradients elsewhere
            return
        number = self._open.num_with_gradient
        if number and not self._boundary.has_gradients:
            raise InvalidInputError(
                f"the gradients of {number} micro-batches are gone: somebody zeroed them, stepped another "
                "optimizer, or computed losses that do not depend on the weights.",
                remedy="the accumulator zeroes gradients itself; take optimizer.step() and zero_grad() out of the loop",
            )

    def check_weights(self) -> None:
        """Refuse to go on where the weights that train changed since the window began."""
        if self._open is not None:
            self._boundary.weights.check()

    def check_may_skip(self) -> None:
        """Refuse to leave out a micro-batch that other ranks wait for."""
        self.check_awaited()
        left = self._open.num_left if self._open else self._next_size()
        if self._others_wait(left):
            raise InvalidInputError(
                f"this micro-batch cannot be left out: under {self._parallelism.name} the other ranks wait for it.",
                remedy="backward(loss, weight=0): it runs, and counts nothing",
            )

    def _expect(self, num_micro_batches: int) -> None:
        self._watcher.expect(num_micro_batches * self._parallelism.size)

    def _next_size(self) -> int:
        # A plain loop does not say where an epoch begins: after the last window that is named comes the first.
        return self.sizes.of(self.position.number, self.position.windows_done, begins_anew=not self.is_reading)

    def _others_wait(self, num_left: int) -> bool:
        """Whether other ranks wait for the backward after which so many micro-batches less one are to come."""
        is_synchronised = num_left == 1 and self._parallelism.size > 1 and not self._is_by_hand
        return self._parallelism.is_sharded or is_synchronised

    def _set_flag(self) -> None:
        """Say before the next forward whether its backward synchronises."""
        if self._parallelism.size > 1:
            left = self._open.num_left if self._open else self._next_size()
            self._parallelism.synchronise_next(left == 1 and not self._is_by_hand)
        elif not self._parallelism.reaches_all(self._boundary.parameters):
            self._parallelism.synchronise_next(False)  # a single rank has nobody to wait for
