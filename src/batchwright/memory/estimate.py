"""`estimate`: the peak memory of a step, predicted by tracing it on tensors without memory; on one card, or on all.

Promises:
- the number is traced at the size asked for, never extrapolated from another;
- two steps are traced, because optimizer state appears in the first and counts from the second;
- the largest micro-batch for a budget is traced too, and so is the next one, which does not fit;
- on all cards, those whose kernels are alike share their traces, and each is asked with its own memory. The largest
  micro-batch is then the largest whose peak has room to spare: `estimate --on CARD --max` may find one or two more.
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import Card, all_cards, communication_bytes, tell_context
from batchwright.device.epochs import LargestBatches
from batchwright.device.step import StepSettings
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.memory.breakdown import Breakdown, break_down, parts_at_the_same_moment, what_if_savings
from batchwright.memory.estimate_result import PARTS, CardRow, Estimate, EveryCard
from batchwright.memory.on_card import (
    CardsAlike,
    OnCard,
    card_named,
    default_place,
    device_peak,
    read_settings,
)
from batchwright.memory.upper_bound import uncertain_bytes, upper_on_card
from batchwright.planning.search import largest_within
from batchwright.simulated.card import kernels_of
from batchwright.state.untouched import leaves_untouched, untouched
from batchwright.timing.collectives import read_network
from batchwright.timing.on_card import time_on, time_on_cpu
from batchwright.trace.run import Traced, check_batches, trace_workload
from batchwright.units import PeakBytes, format_bytes, parse_bytes, shortened, whole_number
from batchwright.user_files import check_place
from batchwright.workload import Program, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from batchwright.simulated.allocator.settings import AllocatorSettings


# What an upper bound adds to a trace: the worst case of benchmarks/memory_cpu.py (0.64 %) stays within it. It is a
# margin over what was measured, not a proof; where an operator hides memory no bound is given at all.
UPPER_MARGIN = 1.01
# Parts that a device has but a host has not.
_NOT_ON_A_HOST = ("slack", "context")
# Beyond this the question is no longer one of memory.
LARGEST_MICRO_BATCH = 2**20


@leaves_untouched(is_traced=True)
def estimate(
    workload: Workload | Program,
    *,
    micro_batch: int | None = None,
    on: str | None = None,
    shape: Mapping[str, Any] | None = None,
    accumulation: int | None = None,
    clip_norm: float | None = None,
    routing: str = "balanced",
    memory: str | int | None = None,
    context: str | int | None = None,
    find_max: bool = False,
    over: int | None = None,
    devices: int = 1,
    network: str | None = None,
    allocator: str | AllocatorSettings | None = None,
    snapshot: str | Path | None = None,
    calibrate: str | Path | None = None,
    what_if: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Estimate:
    """Predict the peak memory of full training steps.

    >>> import torch
    >>> from batchwright import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(256, 256),
    ...     batch=lambda n: torch.randn(n, 256),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    ... )
    >>> result = estimate(workload, micro_batch=64)
    >>> result.parts["weights"], result.parts["gradients"], result.peak_at.phase
    (263168, 263168, 'backward')

    Arguments:
    - `workload`: or a `bw.Script`, which is run; of what follows it takes `micro_batch`, `accumulation`, `on`, `shape`,
      `memory`, `find_max`, `devices`, `network` and `progress`.
    - `micro_batch`: samples in one forward and backward. Default: 1; of a script, what is typed.
    - `on`: "cpu", or a card of the catalogue such as "a100-40gb", which is simulated: its peaks are allocated, reserved
      and device, and `fits` says whether the step runs on it. Default: this machine's card; "cpu" if it has none.
    - `shape`: what the workload's `batch` takes besides the number of samples, such as {"seq_len": 512}.
    - `accumulation`: micro-batches per optimizer step, with the same default. `clip_norm`: the norm that gradients are
      clipped to.
    - `routing`: how a mixture of experts is taken to share tokens, "balanced" or "worst".
    - `memory`: a budget such as "16GiB"; of a card, the memory it has. On the CPU the largest micro-batch within the
      budget is searched first, and the answer is its estimate.
    - `context`: what CUDA and its libraries take of a card on your machine, such as "1.2GiB": what nvidia-smi shows of
      a process less torch.cuda.memory_reserved(). Default: the catalogue's, from public reports.
    - `find_max`: search the largest micro-batch that fits on the card, likewise.
    - `over`: where samples of `data=` differ in size, take the largest of so many random batches, such as those of an
      epoch, for the batch. Default: the first samples.
    - `devices`: simulate one of N ranks of a card: the workload's `wrap` runs over a process group that sends
      nothing.
    - `network`: what joins nodes of 8 devices, such as "400Gb/s" for each node: without it there is no time beyond one
      node. A latency may follow: "400Gb/s,20us".
    - `allocator`: a card's settings as PYTORCH_ALLOC_CONF has them.
    - `snapshot`: a file to write PyTorch's own memory snapshot of the run to, for pytorch.org/memory_viz.
    - `calibrate`: a file that `record_run` wrote on such a card; corrects the fixed parts, and scales
      the seconds.
    - `what_if`: also predict what each change of the set-up would save.
    - `progress`: called with a line of text before each trace.
    """
    if isinstance(workload, Program):
        given = {
            name: value
            for name, value, default in (
                ("clip_norm", clip_norm, None),
                ("context", context, None),
                ("over", over, None),
                ("routing", routing, "balanced"),
                ("allocator", allocator, None),
                ("snapshot", snapshot, None),
                ("calibrate", calibrate, None),
                ("what_if", what_if, False),
            )
            if value != default
        }
        if given:
            raise InvalidInputError(f"{', '.join(given)} cannot be used with a bw.Script.")
        answer: Estimate = workload.answer_estimate(
            micro_batch=micro_batch,
            accumulation=accumulation,
            on=on,
            shape=shape,
            memory=memory,
            find_max=find_max,
            devices=devices,
            network=network,
            progress=progress,
        )
        return answer
    micro_batch = 1 if micro_batch is None else micro_batch
    accumulation = 1 if accumulation is None else accumulation
    if not isinstance(workload, Workload):
        raise InvalidInputError(
            f"estimate takes a Workload; received {shortened(workload)}.",
            remedy="bw.Workload(...), or bw.Script(...) for a command of your own",
        )
    on, place_note = (on, "") if on is not None else default_place()
    card = card_named(on, memory=memory, context=context)
    limit = card.total_bytes if card is not None else None if memory is None else parse_bytes(memory)
    say = progress or (lambda _: None)
    step = StepSettings(shape or {}, accumulation, clip_norm, routing, devices)
    between_nodes = read_network(network, devices)
    if card is None and not (allocator is snapshot is calibrate is context is None):
        raise InvalidInputError(
            "allocator settings, memory snapshots, recorded runs and contexts are CUDA's: they need a card.",
            remedy='on="a100-40gb"',
        )
    if context is not None and calibrate is not None:
        raise InvalidInputError("a recorded run tells the context, so context= is left out.", remedy="calibrate= alone")
    if over is not None:
        if workload.data is None:
            raise InvalidInputError(
                "over= draws batches of a dataset, and the workload makes its batches itself.",
                remedy="data=dataset, collate=...; or a batch= that makes the largest",
            )
        epoch = LargestBatches(workload.data, workload.collate, whole_number(over, "batches"))
        workload = replace(workload, data=epoch)
    check_ranks(workload, devices, is_card=card is not None)
    place = None if card is None else OnCard(workload, card, read_settings(allocator), step)
    if place is not None and calibrate is not None:
        say("tracing the recorded run")
        place = place.calibrated(calibrate)

    if snapshot is not None:
        check_place(snapshot, what="the snapshot", option="snapshot=FILE")
    runs: dict[int, Traced] = {}

    def traced(size: int) -> Traced:
        if size not in runs:
            say(f"tracing micro-batch {size:,}")
            runs[size] = trace_workload(workload, size, step) if place is None else place.traced(size)
        return runs[size]

    size = whole_number(micro_batch, "micro-batch")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise InvalidInputError(f"clip norm must be a positive number; received {shortened(clip_norm)}.")
    check_batches(workload, step.shape)
    num_samples = LARGEST_MICRO_BATCH if workload.data is None else max(1, len(workload.data))
    cap = min(num_samples, LARGEST_MICRO_BATCH)
    is_search = find_max or (card is None and limit is not None)
    if find_max and limit is None:
        raise InvalidInputError("find_max on the CPU needs a memory budget.", remedy='memory="16GiB"')
    with without_torchs_own_log():
        if place is not None:
            size = _largest_on(place, traced, cap, say) if find_max else size
        elif limit is not None:
            size = _largest_for(limit, traced, cap=cap)
        run = traced(size)
        fits = None
        if place is not None:
            fits = place.fits(run)
            if not fits or device_peak(run) > place.card.total_bytes:
                say(f"tracing micro-batch {size:,} on the card as it is")
                near_the_limit = place.traced_as_it_is(size)
                run, fits = near_the_limit or run, near_the_limit is not None
        peak = break_down(run.log)
        # Half where a dataset has no more samples.
        other_size = 2 * size if workload.data is None or 2 * size <= num_samples else size // 2
        other = parts_at_the_same_moment(run.log, traced(other_size).log) if other_size else {}
        savings = what_if_savings(workload, size, run.log, step, place=place, progress=say) if what_if else ()
        if place is not None and snapshot is not None:
            say(f"writing the snapshot of micro-batch {size:,}")
            place.write_snapshot(size, Path(snapshot))
    return Estimate(
        name=workload.name,
        micro_batch=size,
        on=on if card is None else card.name,
        peak_bytes=run.peaks or PeakBytes(peak.peak_bytes),
        upper_bytes=_upper(run, peak, devices),
        parts=_all_parts(run, peak),
        # None where there is no other size to compare with.
        grows_with_batch={
            part: round((other.get(part, 0) - peak.parts.get(part, 0)) / (other_size - size))
            if other_size and other_size != size and part not in _NOT_ON_A_HOST
            else None
            for part in PARTS
        },
        peak_at=peak.moment,
        largest=peak.largest,
        phases=peak.phases,
        source=f"predicted, routing {run.routing}" if run.routing else "predicted",
        notes=tuple(note for note in (*run.notes, place_note, _batch_note(workload, size)) if note),
        limit_bytes=limit,
        max_micro_batch=size if is_search else None,
        max_limited_by=_end_of_search(size, cap) if is_search else None,
        savings=savings,
        fits=fits,
        time=(time_on_cpu(run.work, size, step) if place is None else place.timed(run.work, size, between_nodes)),
        context=_context_taken(place),
    )


def estimate_every_card(
    workload: Workload,
    *,
    micro_batch: int = 1,
    shape: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    clip_norm: float | None = None,
    routing: str = "balanced",
    devices: int = 1,
    network: str | None = None,
    allocator: str | AllocatorSettings | None = None,
    progress: Callable[[str], None] | None = None,
) -> EveryCard:
    """Ask every card of the catalogue; arguments as those of `estimate`."""
    say = progress or (lambda _: None)
    step = StepSettings(shape or {}, accumulation, clip_norm, routing, devices)
    check_ranks(workload, devices, is_card=True)
    between_nodes = read_network(network, devices)
    check_batches(workload, step.shape)
    settings = read_settings(allocator)
    cap = LARGEST_MICRO_BATCH if workload.data is None else max(1, len(workload.data))
    alike: dict[Any, CardsAlike] = {}
    rows = []
    with untouched(workload, is_traced=True), without_torchs_own_log():
        for card in sorted(all_cards(), key=lambda card: (card.total_bytes, card.name)):
            place = OnCard(workload, card, settings, step)
            kind = alike.setdefault(kernels_of(card), CardsAlike(place, cap, say))

            def traced(size: int, kind: CardsAlike = kind, card: Card = card) -> Traced:
                return kind.traced(size, card)

            try:
                largest = place.largest(traced, cap=cap, to_the_last=False)
            except NothingFitsError:
                largest = None
            run = traced(micro_batch)
            time = time_on(card, run.work, micro_batch, step, between_nodes)
            rows.append(CardRow(card.name, card.total_bytes, place.fits(run), device_peak(run), largest, time))
    return EveryCard(workload.name, micro_batch, tuple(sorted(rows, key=lambda row: (not row.fits, row.total_bytes))))


def _largest_on(place: OnCard, traced: Callable[[int], Traced], cap: int, say: Callable[[str], None]) -> int:
    """Return the largest micro-batch on a card: most looks follow from a few traces, the answer has its own."""
    if place.correction is None:
        kind = CardsAlike(place, cap, say)
        size = place.largest(lambda n: kind.traced(n, place.card), cap=cap)
        if place.fits(traced(size)) and (size == cap or not place.fits(traced(size + 1))):
            return size
    return place.largest(traced, cap=cap)


def _largest_for(limit: int, traced: Callable[[int], Traced], *, cap: int) -> int:
    size = largest_within(lambda size: break_down(traced(size).log).peak_bytes, limit, cap=cap)
    if size is None:
        needed = break_down(traced(1).log)
        raise NothingFitsError(
            f"micro-batch 1 does not fit into {format_bytes(limit)}.",
            details=[f"needed {format_bytes(needed.peak_bytes)}: {needed.list_parts()}"],
            remedy="what_if=True in place of find_max=True prints what each change of the set-up would save",
        )
    return size


def _end_of_search(size: int, cap: int) -> str:
    """What keeps the largest micro-batch from being larger: memory, the end of the data, or of the search."""
    if size < cap:
        return "memory"
    return "data" if cap < LARGEST_MICRO_BATCH else "search"


def _all_parts(run: Traced, peak: Breakdown) -> dict[str, int | None]:
    """Every part at the peak; on a card also what its allocator holds beyond them, and its context."""
    parts: dict[str, int | None] = {part: peak.parts.get(part, 0) for part in PARTS}
    on_card = dict.fromkeys(_NOT_ON_A_HOST)
    if run.peaks is not None and run.context is not None:
        on_card = {"slack": run.peaks.of_allocator[1] - peak.peak_bytes, "context": run.context.typical_bytes}
    return {**parts, **on_card}


def _batch_note(workload: Workload, micro_batch: int) -> str:
    """Say which batch was taken, where one was chosen."""
    return workload.data.tell(micro_batch) if isinstance(workload.data, LargestBatches) else ""


def _context_taken(place: OnCard | None) -> str | None:
    """Say which context was taken."""
    if place is None:
        return None
    if place.correction is not None and place.correction.context is not None:
        return f"context: {format_bytes(place.correction.context)}, measured by the recorded run"
    return tell_context(place.card)


def _upper(run: Traced, peak: Breakdown, devices: int) -> PeakBytes:
    """What the peaks stay below; nothing is said where an operator hides memory."""
    if run.is_lower_bound:
        return PeakBytes()
    if run.peaks is None or run.context is None:
        return PeakBytes(round(peak.peak_bytes * UPPER_MARGIN))
    context = run.context
    if devices > 1:
        context = replace(context, high_bytes=context.high_bytes + communication_bytes())
    return upper_on_card(run.peaks, context, uncertain=uncertain_bytes(peak.parts), unsure=run.unsure_bytes)


def check_ranks(workload: Workload, devices: int, *, is_card: bool) -> None:
    """Say so where ranks cannot be simulated."""
    if whole_number(devices, "devices") == 1:
        return
    if not is_card:
        raise InvalidInputError("ranks are simulated on cards only.", remedy='on="a100-40gb"')
    if workload.wrap is None:
        raise InvalidInputError(
            f"{devices:,} devices were asked for, and the workload has no wrap= that spreads the model over them.",
            remedy="wrap=lambda model: DistributedDataParallel(model), or one that calls fully_shard",
        )


@contextmanager
def without_torchs_own_log() -> Iterator[None]:
    """Keep torch from logging a traceback of its own for a mistake that the user is about to be shown."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    here = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)
