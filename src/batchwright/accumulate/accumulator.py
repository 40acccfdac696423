"""`Accumulator`: gradient accumulation that equals the big batch.

Promises:
- at the end of a window the gradient is that of the mean loss over all weighted units of the window and of all ranks,
  for any split, the last and incomplete window included;
- unscale, clip, step, scheduler and zero happen once per window, in this order;
- a wrong call changes nothing: gradients stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchwright.accumulate.boundary import Boundary
from batchwright.accumulate.checks import as_list, check_construction
from batchwright.accumulate.counting_sampler import CountingSampler
from batchwright.accumulate.loss_terms import Totals, check_weight, count_units, read_terms
from batchwright.accumulate.parallel import how_spread
from batchwright.accumulate.read_ahead import ReadAhead, WindowSizes, counted_micro_batch
from batchwright.accumulate.splitting import call_loss, run_in_pieces
from batchwright.accumulate.weights import TrainedWeights
from batchwright.accumulate.windows import Windows
from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch import nn

    from batchwright.accumulate.loss_terms import LossTerm
    from batchwright.accumulate.step import Step
    from batchwright.accumulate.watching import WindowWatcher


class Accumulator:
    """Add up gradients over micro-batches and step at the end of each window.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=2)
    >>> loader = torch.utils.data.DataLoader(torch.ones(5, 3), batch_size=2)
    >>> steps = [accumulator.backward(model(micro).mean()) for micro in accumulator.micro_batches(loader)]
    >>> [step and (step.number, step.samples, step.micro_batches) for step in steps]
    [None, (1, 4, 2), (2, 1, 1)]

    `accumulation` is a number of micro-batches, a function of the number of steps done, or a list with one number per
    window of an epoch; it can be assigned anew between two windows. `optimizer` and `scheduler` may be lists.
    `clip_norm` clips the gradient of the window, `scaler` is a GradScaler, `precise` adds up the gradients of 16-bit
    weights in fp32, `on_oom="split"` has `run` cut a micro-batch that does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        accumulation: int | Callable[[int], int] | Iterable[int],
        *,
        clip_norm: float | None = None,
        scaler: Any = None,
        scheduler: Any = None,
        precise: bool = False,
        on_oom: str = "raise",
    ) -> None:
        optimizers = as_list(optimizer)
        sizes = WindowSizes(accumulation)
        spread = how_spread(model)
        check_construction(
            model,
            optimizers,
            spread,
            schedulers=as_list(scheduler),
            clip_norm=clip_norm,
            precise=precise,
            on_oom=on_oom,
            is_single=accumulation == 1,
        )
        boundary = Boundary(
            optimizers,
            TrainedWeights(model, optimizers, gathers_in_forward=spread.gathers_in_forward),
            clip_norm=clip_norm,
            scaler=scaler,
            schedulers=as_list(scheduler),
            precise=precise,
        )
        self.model = model
        self._boundary = boundary
        self.scaler = scaler
        self.spread = spread
        self.schedulers = as_list(scheduler)
        self._splits = on_oom == "split"
        self._windows = Windows(spread, boundary, sizes, reduces_itself=precise or self._splits)
        self._weight: Any = None

    @property
    def number(self) -> int:
        """Windows finished so far."""
        return self._windows.position.number

    @property
    def accumulation(self) -> Any:
        """Micro-batches per window, as it was given."""
        return self._windows.sizes.given

    @accumulation.setter
    def accumulation(self, value: Any) -> None:
        self._windows.check_closed(remedy="set it when backward has returned a Step")
        self._windows.set_sizes(WindowSizes(value))

    @property
    def optimizer(self) -> Any:
        """The optimizer, or the list of them."""
        held = self._boundary.optimizers
        return held[0] if len(held) == 1 else list(held)

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._windows.check_closed(remedy="replace it when backward has returned a Step")
        weights = TrainedWeights(self.model, as_list(value), gathers_in_forward=self.spread.gathers_in_forward)
        self._boundary.replace_optimizers(as_list(value), weights)

    def backward(
        self, loss: torch.Tensor | Sequence[LossTerm], weight: float | None = None, *, samples: int | None = None
    ) -> Step | None:
        """Add the gradient of one micro-batch; at the end of a window step, and return what the step did.

        `loss` is the mean over the micro-batch's units, or a list of `LossTerm`s with means of their own. `weight` says
        how many units: by default what `micro_batches` counted, else 1. `samples` is for the record only, unless a
        term is a mean over them.
        """
        counts = self._counts(weight, samples)
        self._windows.check_gradients()
        self._add(loss, counts)
        return self._windows.done_with_one()

    def run(self, batch: Any, loss_fn: Callable[..., Any], weight: Any = None) -> Step | None:
        """Run forward and backward of a micro-batch; with `on_oom="split"` in pieces where it does not fit.

        `loss_fn(model, batch)` or `loss_fn(batch)` returns the loss; `weight` is a function of the batch, or a number
        where nothing is split; by default the samples of the batch count.
        """
        if self._splits and weight is not None and not callable(weight):
            raise InvalidInputError(
                f'with on_oom="split" a weight is a function of the batch, so that it counts a piece too; '
                f"received {shortened(weight)}."
            )
        counts = self._counts(weight(batch) if callable(weight) else weight, None, batch)
        self._windows.check_gradients()
        if not self._splits:
            self._add(call_loss(loss_fn, self.model, batch), counts)
            return self._windows.done_with_one()
        count = weight if callable(weight) else self._weight
        count = count if callable(count) or isinstance(count, Mapping) else None
        awaited = self._windows.awaited

        def run_piece(piece: Any, part: float) -> None:
            share = counts if piece is batch else _share(counts, piece, part, count)
            self._add(call_loss(loss_fn, self.model, piece), share)

        window = self._windows.open(counts)
        samples = None if awaited is None else awaited.num_samples
        window.splits += run_in_pieces(batch, run_piece, self._boundary.parameters, self.model, samples=samples)
        return self._windows.done_with_one()

    def skip(self) -> Step | None:
        """Leave out the micro-batch at hand; the mean is then over the others."""
        self._windows.check_may_skip()
        self._windows.open(Totals(window=1.0))
        return self._windows.done_with_one()

    def flush(self) -> Step | None:
        """Step with what has been added up so far, if anything: the tail of an epoch."""
        return self._windows.flush()

    def micro_batches(self, loader: Iterable[Any], weight: Any = None) -> Iterator[Any]:
        """Yield the loader's batches; `weight(batch)` counts the units of one, by default its samples.

        Where terms of the loss are means over different masks, `weight` is a mapping from names to such functions, and
        each term names its own: `LossTerm(value, over=name)`.

        A window is read ahead, so that weights are known before the first backward, and only the last micro-batch of
        a window synchronises ranks. The last, incomplete window steps by itself.
        """
        self._windows.check_closed(remedy="accumulator.flush() steps with what is there")
        self._weight = weight
        self._windows.names = tuple(weight) if isinstance(weight, Mapping) else ()
        counting, loader = CountingSampler.of(loader)
        skip = self._windows.begin_epoch(sampler_resumes=counting.resumes())
        reader = ReadAhead(loader, weight, skip=skip, is_counted=counting.is_counted)
        yield from self._windows.yielded(reader, counting)

    def watch(self, watcher: WindowWatcher) -> None:
        """Have something look at every window from now on, such as `NoiseScale`; one at a time."""
        self._windows.check_closed(remedy="begin to watch when backward has returned a Step")
        self._windows.watch(watcher)

    def unwatch(self, watcher: WindowWatcher) -> None:
        """Have it look no more, if it still does."""
        self._windows.unwatch(watcher)

    def state_dict(self) -> dict[str, int]:
        """Return where training stands, as of the last finished window."""
        return self._windows.position.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` stood: the next `micro_batches` leaves out what that epoch had already used."""
        self._windows.check_closed(remedy="load it before the first backward")
        self._windows.position.load_state_dict(state)

    def _add(self, loss: Any, counts: Totals) -> None:
        terms = read_terms(loss, counts, must_be_finite=self.scaler is None)
        self._windows.check_weights()
        if not counts.samples and counts.window and any(term.over == "samples" for term in terms):
            raise InvalidInputError(
                "a term of the loss is a mean over samples, and nothing says how many there are.",
                remedy="backward(loss, samples=len(batch)), or micro_batches(loader), which counts them",
            )
        self._windows.add(terms, counts)

    def _counts(self, weight: Any, samples: int | None, batch: Any = None) -> Totals:
        given = None if weight is None else check_weight(weight)
        self._windows.check_awaited()
        awaited = self._windows.awaited
        if awaited is not None:
            if given is None or not awaited.counts.window:
                return awaited.counts
            return Totals(given, awaited.counts.samples, 1.0) if given else Totals()
        if batch is not None:
            return counted_micro_batch(batch, given).counts if given != 0 else Totals()
        return Totals(1.0 if given is None else given, float(samples or 0), 0.0 if given == 0 else 1.0)


def _share(counts: Totals, piece: Any, part: float, count: Any) -> Totals:
    """Return what a piece of a micro-batch counts: by the user's own function, else by its samples."""
    share = counts.times(part)
    if count is None or not counts.window:
        return share
    units, named = count_units(piece, count)
    return Totals(units, share.samples, share.window, named)
