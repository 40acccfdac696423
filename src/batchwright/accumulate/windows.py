"""Windows one after the other: opened, filled, synchronised, stepped.

Promises:
- the flag that synchronises ranks is set before each forward, and put back on close, exception and flush;
- a window that was read ahead is as long on every rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from batchwright.accumulate.checks import check_gradients_are_there
from batchwright.accumulate.loader import CountingSampler
from batchwright.accumulate.loss_terms import Totals
from batchwright.accumulate.ranks import exchange
from batchwright.accumulate.window import OpenWindow, Position, Step
from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from batchwright.accumulate.boundary import Boundary
    from batchwright.accumulate.loader import MicroBatch, ReadAhead, WindowSizes
    from batchwright.accumulate.loss_terms import LossTerm
    from batchwright.accumulate.ranks import OneProcess, Planned, Used


# What may look at the windows of an Accumulator while they run: the noise of gradients is measured so.
#
# Promises:
# - a watcher sees every backward, and every finished window before its gradients are clipped; it changes none;
# - what it has to tell goes with the one exchange between ranks that a window makes anyhow.


class WindowWatcher(Protocol):
    """Looks at windows; all ranks have one, or none has."""

    def expect(self, num_parts: int) -> None:
        """Be told, before its first forward, how many micro-batches on all ranks the next window has."""

    def pieces(self) -> int:
        """Say what the next window is to be cut into where it is one micro-batch; asked once `tell` was called."""
        ...

    def around(self, shares: Sequence[float], counts: Totals) -> AbstractContextManager[None]:
        """Look at the backward of one micro-batch, whose terms are multiplied by these shares."""
        ...

    def tell(self) -> Sequence[Any]:
        """Return numbers for all ranks, now that gradients are synchronised and unscaled; as many on each rank."""
        ...

    def learn(self, rows: list[Sequence[Any]], factor: float) -> None:
        """Take what the ranks told; the gradient is still to be multiplied by `factor`, 0 where nothing was used."""


class _Nobody:
    """Watches nothing."""

    def expect(self, num_parts: int) -> None:
        pass

    def pieces(self) -> int:
        return 1

    def around(self, shares: Sequence[float], counts: Totals) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self) -> Sequence[Any]:
        return ()

    def learn(self, rows: list[Sequence[Any]], factor: float) -> None:
        pass


NOBODY: WindowWatcher = _Nobody()


NO_UNITS = "the window holds no units: every weight is 0"


class Windows:
    """The windows of one rank."""

    def __init__(self, spread: OneProcess, boundary: Boundary, sizes: WindowSizes, *, reduces_itself: bool) -> None:
        self.sizes = sizes
        self.position = Position()
        self.awaited: MicroBatch | None = None
        self._spread = spread
        self._boundary = boundary
        # Gradients that are wide, or that a failed backward may leave half made, are synchronised by hand at the end;
        # so are all where DDP waits for one that does not come.
        self._always_by_hand = reduces_itself
        self._reduces_itself = reduces_itself or not spread.finishes(boundary.parameters)
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
            like = counts if self._spread.size == 1 else self._typical
            assumed = Totals(like.units or 1.0, like.samples or 1.0, 1.0).times(size * self._spread.size)
            self._begin(OpenWindow(assumed, size, ranks=self._spread.size))
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
        """Have it look no more."""
        if self._watcher is watcher:
            self._watcher = NOBODY

    def _begin(self, window: OpenWindow) -> None:
        self._boundary.begin()
        by_hand = self._always_by_hand or not self._spread.finishes(self._boundary.parameters)
        if by_hand and not self._reduces_itself and window.num_left == 1 and not self.is_reading:
            raise InvalidInputError(
                "weights were frozen since DDP wrapped the model, and the forward of this window's only micro-batch "
                "already made ready to synchronise them.",
                remedy="for micro in accumulator.micro_batches(loader), or wrap the model again after freezing",
            )
        self._reduces_itself = by_hand
        self._open = window

    def add(self, terms: list[LossTerm], counts: Totals) -> None:
        """Add the gradient of a micro-batch, or of a piece of one."""
        window = self.open(counts)
        shares = window.shares(terms, counts)
        # Where other ranks wait for every weight that this loss reaches, what counts nothing is run through as well.
        keeps_step = self._spread.gathers_in_forward or self._synchronises(window)
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
        return self._end(window, is_synchronised=not self._reduces_itself)

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
            self._spread.restore()
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
            self._spread.restore()

    def _yielded_window(self, reader: ReadAhead, planned: Planned) -> Iterator[Any]:
        filled = reader.filled(planned.micro_batches, planned.longest)
        self._begin(OpenWindow(planned.totals, planned.longest, ranks=self._spread.size))
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
        _, self._ahead = exchange(
            self._spread, None, None, self._reader, self._next_size, self._watcher.pieces, names=self.names
        )
        self._sizes_ahead = self.sizes

    def _end(self, window: OpenWindow, *, is_synchronised: bool) -> Step:
        try:
            self._boundary.weights.check()
        except InvalidInputError:
            # What was added up belongs to no set of weights, and the next window begins anew.
            self._open = None
            self._boundary.zero()
            raise
        if self._spread.size > 1:
            weights = self._boundary.parameters
            by_hand = self._spread.left_out(weights) if is_synchronised else weights
            if by_hand:
                self._spread.reduce(by_hand)
        self._boundary.unscale()
        self.position.finish_window([] if self._ahead is None else self._ahead.micro_batches)
        self._counting.received(self.position.micro_batches_done)
        has_norm = self._boundary.needs_norm(is_sharded=self._spread.gathers_in_forward)
        square = self._boundary.square_of_norm() if has_norm else None
        told, pieces = self._watcher.tell(), self._watcher.pieces
        used, self._ahead = exchange(
            self._spread, window, square, self._reader, self._next_size, pieces, told, self.names
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
        """Refuse to go on where somebody has thrown away what the window had added up."""
        if self._open is not None and not self._spread.gathers_in_forward:  # FSDP2 keeps them elsewhere meanwhile
            check_gradients_are_there(self._boundary, self._open.num_with_gradient)

    def check_weights(self) -> None:
        """Refuse to go on where the weights that train changed since the window began."""
        if self._open is not None:
            self._boundary.weights.check()

    def check_may_skip(self) -> None:
        """Refuse to leave out a micro-batch that other ranks wait for."""
        self.check_awaited()
        left = self._open.num_left if self._open else self._next_size()
        if self._spread.gathers_in_forward or (left == 1 and self._spread.size > 1 and not self._reduces_itself):
            raise InvalidInputError(
                f"this micro-batch cannot be left out: under {self._spread.name} the other ranks wait for it.",
                remedy="backward(loss, weight=0): it runs, and counts nothing",
            )

    def _expect(self, num_micro_batches: int) -> None:
        self._watcher.expect(num_micro_batches * self._spread.size)

    def _next_size(self) -> int:
        return self.position.size_of_next(self.sizes, is_reading=self.is_reading)

    def _synchronises(self, window: OpenWindow) -> bool:
        return window.num_left == 1 and self._spread.size > 1 and not self._reduces_itself

    def _set_flag(self) -> None:
        """Say before the next forward whether its backward synchronises."""
        if self._spread.size > 1:
            left = self._open.num_left if self._open else self._next_size()
            self._spread.synchronise_next(left == 1 and not self._reduces_itself)
        elif not self._spread.finishes(self._boundary.parameters):
            self._spread.synchronise_next(False)  # a single rank has nobody to wait for
