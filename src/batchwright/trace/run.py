"""Run a workload's step on fake tensors and return the log of its memory.

Promises:
- what runs is the very function that a real probe runs, with fake parameters put in;
- a function that builds the model is run on the meta device, so 8 billion parameters cost nothing;
- a live module, and a live optimizer over it, get fake tensors for the time of a trace, in place, so that hooks, locks
  and functions that hold them go on working; whoever traces puts them back (`untouched`);
- tied parameters, and parameters that are views of one storage, stay so;
- the random state, the grad mode and the default device come back as they were;
- a step that needs real values ends in `CannotTraceError`, one that mixes CPU and card in `MixedDevicesError`; both
  name the operator and the user's line.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_iter

from batchwright.device.pipeline import apply_wrap
from batchwright.device.step import DEFAULT_STEPS, PLAIN_STEP, StepSettings, hand_out_model, handed_out, run_probe
from batchwright.errors import CannotTraceError, InvalidInputError
from batchwright.simulated.operators.quantized_layers import quantized_parts, stand_in
from batchwright.simulated.operators.recurrent import packed_by_numbers
from batchwright.simulated.pipelines import Pipeline, run_every_rank, running_stages
from batchwright.simulated.ranks import simulated_ranks
from batchwright.simulated.torch_patches.compiled import Compiler, refuse_graphs
from batchwright.simulated.torch_patches.patches import TorchPatches, applied
from batchwright.simulated.torch_patches.redirected_calls import (
    RedirectedCalls,
    modules_move_in_place,
)
from batchwright.state.held_objects import CONTAINERS, is_users_object
from batchwright.state.untouched import current_keep, untouched
from batchwright.trace.cpu_kernels import CpuKernels
from batchwright.trace.host_batches import HostBatches, is_plain, make_real_batch
from batchwright.trace.refused_operators import explaining, explaining_plans, values_stay_inside
from batchwright.trace.storages import HostMemory, Log
from batchwright.trace.trace import Trace
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from batchwright.catalogue.cards import Context
    from batchwright.simulated.card import SimulatedCard
    from batchwright.state.kept_state import KeptState
    from batchwright.trace.work import StepWork
    from batchwright.units import PeakBytes
    from batchwright.workload import Workload


def build_skeleton(workload: Workload, *, is_card: bool = False) -> tuple[nn.Module, list[str]]:
    """Return the user's module, on meta where it can be built there, and what there is to say about it.

    On a card a model that is compiled with CUDA graphs is refused: they keep pools of their own.
    """
    given = workload.model
    notes: list[str] = []
    if isinstance(given, nn.Module):
        module = given
    else:
        try:
            with torch.device("meta"):
                module = hand_out_model(workload)
        except (NotImplementedError, RuntimeError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:120]
            # A constructor that reads values (`torch.linspace(...).item()`) needs real ones; so build it for real.
            notes.append(f"the model was built with real memory: on the meta device it fails with {first}")
            module = hand_out_model(workload)
    if is_card and isinstance(getattr(module, "_orig_mod", None), nn.Module):
        settings = getattr(getattr(module, "dynamo_ctx", None), "compiler_config", None) or {}
        refuse_graphs({"options": settings})
    return module, notes


class FakeParts:
    """Fake tensors on a device that stand in for the real ones of a model and its optimizers."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode, self._device = mode, device
        self._replaced: dict[int, Any] = {}
        # An id is unique only as long as its object lives.
        self._originals: list[Any] = []

    def put_into_model(self, module: nn.Module) -> nn.Module:
        """Replace every tensor of a module by a fake one, and return the module."""
        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise CannotTraceError(
                "the model has lazy parameters, whose shapes are not known before its first forward.",
                remedy="run one forward before handing it in; or bw.fit(workload), which runs the step",
            )
        if self._device.type != "cpu":
            with self._mode:
                for part in quantized_parts(module):
                    self._replace(part, stand_in(part, self._device))
        self._make_fakes(_tensors_of(module, without=self._replaced))
        self._put_into(module, {})
        replaced: nn.Module = self._replaced.get(id(module), module)
        return replaced

    def put_into_kept(self, state: KeptState, optimizers: Iterable[Any]) -> list[torch.Tensor]:
        """Put the fakes wherever what is kept names the originals; return fake ones for the optimizers' state."""
        in_state = [
            tensor
            for optimizer in optimizers
            for tensor in tree_iter([dict(entry) for entry in getattr(optimizer, "state", {}).values()])
            # Counters of steps are read by value, and are on the host whatever trains.
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and id(tensor) not in self._replaced
        ]
        fakes = self._make_fakes(in_state)
        for value in state.values:
            # No deeper: what is not kept would not be put back.
            if type(value) in CONTAINERS:
                self._put_into_container(value, self._replaced_or_same)
        for cell in state.cells:
            with suppress(ValueError):  # an empty one
                if (fake := self._replaced_or_same(cell.cell_contents)) is not cell.cell_contents:
                    cell.cell_contents = fake
        return fakes

    def _replace(self, original: Any, fake: Any) -> None:
        self._originals.append(original)
        self._replaced[id(original)] = fake

    def _make_fakes(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}
        fakes: list[torch.Tensor] = []
        chosen = [t for t in {id(tensor): tensor for tensor in tensors}.values() if is_plain(t)]
        num_users = Counter(tensor.untyped_storage()._cdata for tensor in chosen)
        for tensor in chosen:
            key = tensor.untyped_storage()._cdata
            with self._mode:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
                num_bytes = tensor.untyped_storage().nbytes()
                # Only where it must be: a fake storage that went through `set_` never dies, `.data = ...` or not.
                if num_users[key] > 1 or fake.untyped_storage().nbytes() != num_bytes:
                    if key not in storages:
                        storages[key] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                    fake.set_(storages[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                else:
                    fake.requires_grad_(tensor.requires_grad)
            self._replace(tensor, fake)
            fakes.append(fake)
        return fakes

    def _put_into(self, value: Any, met: dict[int, Any]) -> None:
        """Replace originals in an object, and in the containers and objects that it leads to."""
        if id(value) in met or id(value) in self._replaced:
            return
        if type(value) in CONTAINERS:
            met[id(value)] = value
            self._put_into_container(value, lambda inner: self._stand_in(inner, met))
        elif isinstance(value, nn.Module | torch.optim.Optimizer) or is_users_object(value):
            met[id(value)] = value
            self._put_into(getattr(value, "__dict__", None), met)

    def _put_into_container(self, container: Any, stand_in: Callable[[Any], Any]) -> None:
        if isinstance(container, list | deque):
            for index, inner in enumerate(container):
                container[index] = stand_in(inner)
        elif any(id(key) in self._replaced for key in container):
            # A key that changes would lose its place, so all are put in anew; a set has keys alone.
            is_dict = isinstance(container, dict)
            entries = [(stand_in(key), stand_in(container[key])) if is_dict else stand_in(key) for key in container]
            container.clear()
            container.update(entries)
        elif isinstance(container, dict):
            for key, inner in list(container.items()):
                if (fake := stand_in(inner)) is not inner:
                    container[key] = fake

    def _stand_in(self, value: Any, met: dict[int, Any]) -> Any:
        if type(value) is not tuple:
            self._put_into(value, met)
        return self._replaced_or_same(value)

    def _replaced_or_same(self, value: Any) -> Any:
        if type(value) is tuple:
            inner = tuple(self._replaced_or_same(entry) for entry in value)
            return inner if any(new is not old for new, old in zip(inner, value, strict=True)) else value
        return self._replaced.get(id(value), value)


def _tensors_of(module: nn.Module, *, without: Container[int]) -> list[torch.Tensor]:
    """Parameters, buffers, and tensors that a module holds as plain attributes; not those of modules left out."""
    tensors: list[torch.Tensor] = []
    for part in module.modules():
        if id(part) in without:
            continue
        tensors += [p for p in part._parameters.values() if p is not None]
        tensors += [b for b in part._buffers.values() if b is not None]
        held = [
            value for name, value in vars(part).items() if not name.startswith("_") or isinstance(value, torch.Tensor)
        ]
        # Also in lists and dicts: caches, tables, precomputed masks.
        tensors += [tensor for tensor in tree_iter(held) if isinstance(tensor, torch.Tensor)]
    return tensors


# Bytes on the host below which nothing is said: counters, and losses that are printed.
_WORTH_TELLING = 2**20


@dataclass(frozen=True)
class Traced:
    """The log of a run, and what has to be said about it."""

    log: Log
    notes: tuple[str, ...]
    # How experts were assumed to share tokens, where the step asked; None where it did not.
    routing: str | None = None
    is_lower_bound: bool = False
    # On a simulated card: what its allocator counted, and what its context takes.
    peaks: PeakBytes | None = None
    context: Context | None = None
    # By how much its peak would be higher if every convolution held the most that it may.
    unsure_bytes: int = 0
    requests: tuple[int, ...] = ()
    # What the last of its steps asks of a device.
    work: StepWork | None = None

    @property
    def on_card(self) -> tuple[PeakBytes, Context]:
        """What the allocator of a card counted, and what its context takes."""
        assert self.peaks is not None
        assert self.context is not None
        return self.peaks, self.context

    def work_at(self, size: int, own_size: int, other: Traced, other_size: int) -> StepWork | None:
        """The work at another size, on the line through this run and another; None where they are not alike."""
        if self.work is None or other.work is None:
            return None
        return self.work.scaled(other.work, own_size, other_size, size)


def trace_workload(
    workload: Workload,
    micro_batch: int,
    settings: StepSettings = PLAIN_STEP,
    *,
    steps: int = DEFAULT_STEPS,
    card: SimulatedCard | None = None,
) -> Traced:
    """Trace full steps at one size, on the CPU or on a simulated card; on the latter as one of the settings' ranks.

    Of a pipeline every rank is traced, unless the settings name one; the answer and the card are those of the rank
    that holds the most.
    """
    if card is None:
        trace = Trace(CpuKernels(), HostMemory(), routing=settings.routing)
        with untouched(workload, is_traced=True), TorchPatches():
            return _trace_on(torch.device("cpu"), workload, micro_batch, settings, steps, trace, is_card=False)
    cards: dict[int, SimulatedCard] = {}

    def trace_rank(rank: int, pipeline: Pipeline) -> Traced:
        cards[rank] = card.twin()
        try:
            return _trace_rank(workload, micro_batch, settings, steps, cards[rank], rank, pipeline)
        except torch.OutOfMemoryError:
            card.take_over(cards[rank])
            raise

    pipeline, ranks = run_every_rank(trace_rank)
    fullest = max(ranks, key=lambda rank: ranks[rank].on_card[0].of_allocator[::-1])
    chosen = fullest if settings.rank is None else settings.rank
    if chosen not in ranks:
        raise InvalidInputError(
            f"rank {chosen} is none of the pipeline, which is of ranks {', '.join(map(str, ranks))}."
        )
    card.take_over(cards[chosen])
    traced = ranks[chosen]
    if len(ranks) == 1:
        return traced
    # How long a rank waits for the others is not known from its own work.
    return replace(traced, notes=(*traced.notes, _tell_ranks(chosen, pipeline, ranks)), work=None)


def _tell_ranks(chosen: int, pipeline: Pipeline, ranks: Mapping[int, Traced]) -> str:
    """Say of which rank of a pipeline the answer is, and what the others hold."""
    peaks = {rank: ranks[rank].on_card[0].of_allocator[1] for rank in sorted(ranks)}
    most = ", which holds the most" if peaks[chosen] == max(peaks.values()) else ""
    held = ", ".join(f"{rank}: {format_bytes(peak)}" for rank, peak in peaks.items())
    return (
        f"pipeline of {pipeline.num_stages} stages on {len(ranks)} ranks, {pipeline.spoken}; this is rank {chosen}"
        f"{most}; reserved by rank: {held}"
    )


def _trace_rank(
    workload: Workload,
    micro_batch: int,
    settings: StepSettings,
    steps: int,
    card: SimulatedCard,
    rank: int,
    pipeline: Pipeline,
) -> Traced:
    trace = Trace(card.kernels, card, routing=settings.routing)
    stages = running_stages(pipeline, trace.phase)
    with (
        untouched(workload, is_traced=True),
        TorchPatches(),
        card.running() as device,
        simulated_ranks(settings.devices, rank, stages=stages) if settings.devices > 1 else nullcontext(),
    ):
        spread = workload if settings.devices > 1 else replace(workload, wrap=None)
        traced = _trace_on(device, spread, micro_batch, settings, steps, trace, is_card=True)
    return replace(
        traced,
        peaks=card.peak_bytes,
        context=card.context,
        unsure_bytes=card.kernels.unsure_bytes,
        requests=tuple(card.requests.events),
    )


def _trace_on(
    device: torch.device,
    workload: Workload,
    micro_batch: int,
    settings: StepSettings,
    steps: int,
    trace: Trace,
    *,
    is_card: bool,
) -> Traced:
    capability = torch.cuda.get_device_capability() if is_card else None
    with RedirectedCalls(torch.device("meta")) if is_card else nullcontext():
        skeleton, notes = build_skeleton(workload, is_card=is_card)
    mode = trace.storages.mode = FakeTensorMode(allow_non_fake_inputs=True)
    keep, fakes = current_keep(workload), FakeParts(mode, device)

    compiler = Compiler(device, trace.notes.setdefault, trace.note_kernel, trace.note_fused, capability)

    wrapped: list[nn.Module] = []
    if is_card and workload.wrap is not None:
        # Before anything is counted: what is sharded is never whole on a card where it was built on meta.
        patches = applied(values_stay_inside())
        with patches, compiler.running(), mode, RedirectedCalls(device), explaining("wrap"), explaining_plans("wrap"):
            wrapped.append(apply_wrap(workload.wrap, fakes.put_into_model(skeleton)))

    def build(_: Workload, __: torch.device) -> nn.Module:
        model = wrapped.pop() if wrapped else fakes.put_into_model(skeleton)
        fakes.put_into_kept(keep.state, ())
        trace.watch(model)
        return model

    @wraps(workload.optimizer or run_probe)  # what it takes is told by its signature
    def optimizer(what_it_takes: Any) -> Any:
        assert workload.optimizer is not None
        returned = handed_out(workload.optimizer, what_it_takes)
        optimizers = list(returned) if isinstance(returned, list | tuple) else [returned]
        if any(map(keep.state.has_met, optimizers)):
            for tensor in fakes.put_into_kept(keep.state, optimizers):
                trace.storages.see(tensor, "state")
        trace.optimizers += optimizers
        return returned

    keep.note_builder(optimizer)
    watched = replace(
        workload,
        optimizer=None if workload.optimizer is None else optimizer,
        batch=HostBatches(workload, trace.values).make,
        data=None,
        collate=None,
    )
    with ExitStack() as stack:
        stack.enter_context(applied(values_stay_inside(trace.values.real), modules_move_in_place()))
        stack.enter_context(mode)
        stack.enter_context(trace)
        if is_card:
            stack.enter_context(RedirectedCalls(device))
        else:
            stack.enter_context(applied(packed_by_numbers()))
        stack.enter_context(compiler.running())
        stack.enter_context(explaining("the step"))
        stack.enter_context(explaining_plans("the step"))
        run_probe(watched, micro_batch, settings, device=device, steps=steps, on_phase=trace.phase, build=build)
    if trace.values.was_drawn:
        notes.append("single random numbers were taken as 1, so that layerdrop skips no layer")
    if trace.routing.was_assumed:
        notes.append(trace.routing.note)
    if trace.storages.most_on_host >= _WORTH_TELLING:
        held = format_bytes(trace.storages.most_on_host)
        notes.append(f"on the host, beside batches: up to {held} ")
    routing = trace.routing.assumption if trace.routing.was_assumed else None
    return Traced(trace.log, (*notes, *trace.notes), routing, trace.hides_memory, work=trace.work.last_step())


def check_shape(workload: Workload, shape: Mapping[str, Any]) -> None:
    """Say so where the workload's batch takes no such shape; calling it would blame the wrong place."""
    if workload.batch is None or not shape:
        return
    try:
        signature = inspect.signature(workload.batch)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind(1, **shape)
    except TypeError:
        takes = ", ".join(list(signature.parameters)[1:]) or "nothing else"
        raise InvalidInputError(
            f"the workload's batch cannot be called with {', '.join(shape)}; besides the number of samples it takes "
            f"{takes}."
        ) from None


def check_batches(workload: Workload, shape: Mapping[str, Any]) -> None:
    """Make two tiny batches before anything long starts, so that one that ignores its size is found at once."""
    check_shape(workload, shape)
    if workload.batch is None:
        return
    # A batch that names the card is made on the host: only its size is looked at.
    with untouched(workload, is_traced=True), RedirectedCalls(torch.device("cpu")):
        for size in (1, 2):
            make_real_batch(workload, size, shape)
