"""The gradients of an Accumulator's micro-batches, seen as they come.

Promises:
- the micro-batch's share of the loss and the loss scale are taken out of its gradient, and clipping comes later: none
  of them changes the answer;
- a window of one micro-batch is looked at example by example, or, where some module is not known, cut in two; which,
  and why, is said.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from batchwright.accumulate.checks import as_list, batch_norms
from batchwright.noise.example_norms import ExampleNorms, UnknownModuleError
from batchwright.noise.gradient_squares import squares_of_gradients
from batchwright.noise.leaves import LeafSquares, Weights
from batchwright.noise.window_sums import IN_PIECES, MIXED_SHARES, SINGLE, WindowSums

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchwright.accumulate.accumulator import Accumulator
    from batchwright.accumulate.loss_terms import Totals
    from batchwright.noise.window_sums import Sink


class WatchedWindows:
    """A `WindowWatcher` that adds up squares and hands them on, window by window."""

    def __init__(
        self,
        accumulator: Accumulator,
        *,
        every: int,
        sink: Sink,
    ) -> None:
        # It holds this object, and must be free to go.
        self._accumulator = weakref.ref(accumulator)
        self._model, self._scaler = accumulator.model, accumulator.scaler
        self._num_ranks, self.is_sharded = accumulator.spread.size, accumulator.spread.gathers_in_forward
        self._every = every
        self._sink = sink
        self.leaves = LeafSquares(self._model, self._weights())
        self._examples: ExampleNorms | None = None
        self._cannot_tell_examples = ""
        self._is_by_example = False
        self._sums: WindowSums | None = None
        self.num_windows = 0
        self._has_told = False

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
        if self._num_ranks > 1 or (self.num_windows + self._has_told) % self._every:
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

    def tell(self) -> Sequence[Any]:
        """Return the sums of the window, and the squares of its gradient."""
        self._has_told = True
        if self._sums is None:
            return ()
        weights = self.leaves.weights
        of_mean = squares_of_gradients(weights.parameters, weights.groups, len(weights.names), weights.device)
        return self._sums.numbers(of_mean)

    def learn(self, rows: list[Sequence[Any]], factor: float) -> None:
        """Hand on what all ranks told."""
        self.num_windows += 1
        self._has_told = False
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
        self.leaves = LeafSquares(self._model, weights)
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
