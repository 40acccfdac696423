"""`Accumulator`: gradient accumulation that equals the big batch.

Promises:
- at the end of a window the gradient is that of the mean loss over all weighted units of the window and of all ranks,
  for any split, the last and incomplete window included;
- unscale, clip, step, scheduler and zero happen once per window, in this order;
- a wrong call changes nothing: gradients stay as they were;
- a micro-batch that is cut because it runs out of memory still counts as a whole: each piece by its own units. What a
  failed backward had added is thrown away (gradients of before are set aside meanwhile, which takes the memory of one
  more set), random numbers begin anew, and buffers are as before the failed forward.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from batchwright.accumulate.boundary import Boundary
from batchwright.accumulate.micro_batches import (
    CountingSampler,
    LossTerm,
    ReadAhead,
    Totals,
    WindowSizes,
    check_weight,
    count_units,
    counted_micro_batch,
    read_terms,
)
from batchwright.accumulate.parallelism import check_data_parallel, find_parallelism
from batchwright.accumulate.weights import TrainedWeights, check_construction
from batchwright.accumulate.windows import Step, Windows, WindowWatcher
from batchwright.device.batches import clear_num_samples, cut, num_samples
from batchwright.device.outcome import is_out_of_memory
from batchwright.errors import InvalidInputError
from batchwright.state.process_state import random_sources
from batchwright.units import as_list, shortened

if TYPE_CHECKING:
    from torch import nn


_REMEDY = "a batch whose tensors all begin with its samples, and what they share (class weights, a mask) kept out of it"


def call_loss(loss_fn: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
    """Call `loss_fn(model, batch)`, or `loss_fn(batch)` if it takes one argument only.

    >>> call_loss(lambda batch: batch + 1, None, 2), call_loss(lambda model, batch: batch + 2, None, 2)
    (3, 4)
    """
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return loss_fn(model, batch)
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return loss_fn(batch) if len(required) == 1 else loss_fn(model, batch)


def run_in_pieces(
    batch: Any,
    run: Callable[[Any, float], None],
    parameters: Sequence[nn.Parameter],
    model: nn.Module,
    *,
    samples: int | None = None,
) -> int:
    """Run a batch, whole if it fits; return how often something was cut. One sample that does not fit is an error.

    `run` is given a piece and its part of the samples; `samples` says how many the batch has, if that is known.
    """
    total = clear_num_samples(batch, samples)
    waiting, num_cuts = [(batch, total or 0)], 0
    while waiting:
        piece, size = waiting.pop(0)
        put_back = [*random_sources(parameters[0].device).values(), *_buffer_sources(model)]
        # Cutting and running again must happen outside `except`: the traceback holds the failed step's tensors.
        part = size / total if total else 1.0
        if _ran(partial(run, piece, part), parameters, can_be_cut=size > 1 or total is None):
            continue
        if total is None:
            # Only now that it has to be cut: says what its parts begin with.
            num_samples(batch, remedy=_REMEDY)
            raise InvalidInputError(
                f"a batch that does not fit cannot be cut, as nothing tells its number of samples: {shortened(batch)}.",
                remedy=_REMEDY,
            )
        for source in put_back:
            source()
        halves = [size - size // 2, size // 2]
        waiting = [*zip(cut(piece, halves), halves, strict=True), *waiting]
        num_cuts += 1
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
    return num_cuts


def _buffer_sources(model: nn.Module) -> list[Callable[[], None]]:
    """Return what puts each buffer back: its values, and the buffer itself where a forward replaces it."""

    def source(home: dict[str, torch.Tensor | None], name: str, buffer: torch.Tensor) -> Callable[[], None]:
        before = buffer.detach().clone()

        def put_back() -> None:
            with torch.no_grad():
                buffer.copy_(before)
            home[name] = buffer

        return put_back

    return [
        source(module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _ran(run: Callable[[], None], parameters: Sequence[nn.Parameter], *, can_be_cut: bool) -> bool:
    aside = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in aside:
        parameter.grad = None
    has_run = False
    try:
        run()
        has_run = True
    except Exception as error:
        if not can_be_cut or not is_out_of_memory(error):
            raise
    finally:
        if not has_run:
            for parameter in parameters:
                parameter.grad = None
        for parameter, gradient in aside:
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient
    return has_run


class Accumulator:
    """Add up gradients over micro-batches and step at the end of each window.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=2)
    >>> loader = torch.utils.data.DataLoader(torch.ones(5, 3), batch_size=2)
    >>> steps = [accumulator.backward(model(micro).mean()) for micro in accumulator.micro_batches(loader)]
    >>> [step and (step.number, step.samples, step.micro_batches) for step in steps]
    [None, (1, 4, 2), (2, 1, 1)]

    - `optimizer`: one or a list of them.
    - `accumulation`: a number of micro-batches, a function of the number of steps done, or a list with one number per
      window of an epoch; it can be assigned anew between two windows.
    - `clip_norm`: clips the gradient of the window.
    - `scaler`: a GradScaler.
    - `scheduler`: one or a list of them, stepped after the optimizer.
    - `precise`: adds up the gradients of 16-bit weights in fp32.
    - `on_oom`: "raise", or "split", which has `run` cut a micro-batch that does not fit.
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
        check_data_parallel(model)
        parallelism = find_parallelism(model)
        check_construction(
            model,
            optimizers,
            parallelism,
            schedulers=as_list(scheduler),
            clip_norm=clip_norm,
            precise=precise,
            on_oom=on_oom,
            is_single=accumulation == 1,
        )
        boundary = Boundary(
            optimizers,
            TrainedWeights(model, optimizers, parallelism),
            parallelism,
            clip_norm=clip_norm,
            scaler=scaler,
            schedulers=as_list(scheduler),
            precise=precise,
        )
        self.model = model
        self._boundary = boundary
        self.scaler = scaler
        self.parallelism = parallelism
        self.schedulers = as_list(scheduler)
        self._splits = on_oom == "split"
        self._windows = Windows(parallelism, boundary, sizes, averages_by_hand=precise or self._splits)
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
        weights = TrainedWeights(self.model, as_list(value), self.parallelism)
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
        """Run forward and backward of a micro-batch; with `on_oom="split"` in pieces if it does not fit.

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
        """Detach `watcher`; does nothing if it is not attached."""
        self._windows.unwatch(watcher)

    def state_dict(self) -> dict[str, int]:
        """Return where training stands, as of the last finished window."""
        return self._windows.position.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a `state_dict()`: the next `micro_batches` leaves out what that epoch had already used."""
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
