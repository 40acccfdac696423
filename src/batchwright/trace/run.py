"""Run a workload's step on fake tensors and return the log of its memory.

Promises:
- what runs is the very function that a real probe runs, with fake parameters put in;
- the random state, the grad mode and the default device come back as they were;
- a step that needs real values ends in `CannotTraceError`, one that mixes CPU and card in `MixedDevicesError`; both
  name the operator and the user's line.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from batchwright.device.step import DEFAULT_STEPS, PLAIN_STEP, StepSettings, handed_out, run_probe
from batchwright.simulated.operators.recurrent import packed_by_numbers
from batchwright.simulated.ranks import simulated_ranks
from batchwright.simulated.torch_patches.patches import TorchPatches, applied
from batchwright.simulated.torch_patches.redirected_calls import (
    RedirectedCalls,
    compiled_as_eager,
    modules_move_in_place,
)
from batchwright.state.untouched import current_keep, untouched
from batchwright.trace.cpu_kernels import CpuKernels
from batchwright.trace.fake_model import FakeParts, build_skeleton
from batchwright.trace.host_batches import HostBatches, make_real_batch
from batchwright.trace.refusals import explaining, values_stay_inside
from batchwright.trace.storages import HostMemory
from batchwright.trace.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from batchwright.catalogue.cards import Context
    from batchwright.simulated.card import SimulatedCard
    from batchwright.trace.storages import Log
    from batchwright.units import PeakBytes
    from batchwright.workload import Workload


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


def trace_workload(
    workload: Workload,
    micro_batch: int,
    settings: StepSettings = PLAIN_STEP,
    *,
    steps: int = DEFAULT_STEPS,
    card: SimulatedCard | None = None,
) -> Traced:
    """Trace full steps at one size, on the CPU or on a simulated card; on the latter as one of the settings' ranks."""
    if card is None:
        trace = Trace(CpuKernels(), HostMemory(), routing=settings.routing)
        with untouched(workload, is_traced=True), TorchPatches():
            return _trace_on(torch.device("cpu"), workload, micro_batch, settings, steps, trace, is_card=False)
    trace = Trace(card.kernels, card, routing=settings.routing)
    with (
        untouched(workload, is_traced=True),
        TorchPatches(),
        card.running() as device,
        simulated_ranks(settings.devices) if settings.devices > 1 else nullcontext(),
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
    with RedirectedCalls(torch.device("meta")) if is_card else nullcontext():
        skeleton, notes = build_skeleton(workload, is_card=is_card)
    mode = trace.storages.mode = FakeTensorMode(allow_non_fake_inputs=True)
    keep, fakes = current_keep(workload), FakeParts(mode, device)

    wrapped: list[nn.Module] = []
    if is_card and workload.wrap is not None:
        # Before anything is counted: what is sharded is never whole on a card where it was built on meta.
        patches = applied(values_stay_inside(), compiled_as_eager(trace.notes.setdefault))
        with patches, mode, RedirectedCalls(device), explaining("wrap"):
            wrapped.append(workload.wrap(fakes.put_into_model(skeleton)))

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
            stack.enter_context(applied(compiled_as_eager(trace.notes.setdefault)))
        else:
            stack.enter_context(applied(packed_by_numbers()))
        stack.enter_context(explaining("the step"))
        run_probe(watched, micro_batch, settings, device=device, steps=steps, observer=trace, build=build)
    if trace.values.was_drawn:
        notes.append("single random numbers were taken as 1, so that layerdrop skips no layer")
    if trace.routing.was_assumed:
        notes.append(trace.routing.note)
    routing = trace.routing.assumption if trace.routing.was_assumed else None
    return Traced(trace.log, (*notes, *trace.notes), routing, trace.hides_memory)


def check_batches(workload: Workload, shape: Mapping[str, Any]) -> None:
    """Make two tiny batches before anything long starts, so that one that ignores its size is found at once."""
    if workload.batch is None:
        return
    # A batch that names the card is made on the host: only its size is looked at.
    with untouched(workload, is_traced=True), RedirectedCalls(torch.device("cpu")):
        for size in (1, 2):
            make_real_batch(workload, size, shape)
