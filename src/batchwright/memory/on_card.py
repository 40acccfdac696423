"""A step on a simulated card: does it run there, what does it take, which size is the largest.

`record_run` runs full steps on a real card and writes what they took. `estimate(..., calibrate=FILE)` traces the same
step at the same size on the simulated card, and takes what the two differ by as fixed: what the context and the
libraries of that machine take, whatever the size; seconds by their ratio. Never run by us on a card: there was none.

Promises:
- the peaks are those of a card with room to spare, as a run shows them that is far from the limit; where they are
  larger than the card and it runs all the same, those of the run on the card itself;
- whether it fits is asked of the card itself, out-of-memory path and all: near the limit its allocator gives back what
  it has cached, and a step may run whose peak on a larger card would not fit;
- sizes between traced ones follow from them only where two traces agree with a third: a step of another size asks in
  the same order for sizes that are affine in it. Requests agree where each differs by less than a block of the
  allocator, which hands out whole blocks anyway, and a thousandth (a kernel that sums rows by tens asks in steps).
"""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from batchwright.catalogue.cards import Card, Context, context_of, find_card, names_a_card
from batchwright.device.device import default_device, open_device, present_devices
from batchwright.device.step import StepSettings
from batchwright.errors import InvalidInputError, NothingFitsError, StepFailedError
from batchwright.memory.breakdown import break_down
from batchwright.planning.search import largest_that_fits, largest_within
from batchwright.simulated.allocator.caching_allocator import (
    History,
    goes_through,
    peaks_with_room,
    size_and_stream,
)
from batchwright.simulated.allocator.settings import AllocatorSettings
from batchwright.simulated.card import SimulatedCard
from batchwright.timing.on_card import time_on
from batchwright.timing.step_time import NoTime, StepTime
from batchwright.trace.run import Traced, trace_workload
from batchwright.units import (
    PeakBytes,
    format_bytes,
    format_seconds,
    parse_bytes,
    positive_number,
    shortened,
    whole_number,
)
from batchwright.user_files import check_place, read_text, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from batchwright.timing.collectives import Network
    from batchwright.trace.work import StepWork
    from batchwright.workload import Workload


_SCHEMA = 1


@dataclass(frozen=True)
class RecordedRun:
    """What full steps at one size took on a card."""

    name: str
    product: str
    total_bytes: int | None
    micro_batch: int
    peak_bytes: PeakBytes
    shape: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    clip_norm: float | None = None
    torch_version: str = ""
    cuda_version: str = ""
    seconds: float | None = None
    """Of the last full step."""

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, as it is written."""
        return {"schema": _SCHEMA, "source": "measured", **asdict(self)}

    def __str__(self) -> str:
        shape = "".join(f", {name} {value}" for name, value in self.shape.items())
        kinds = ((kind, getattr(self.peak_bytes, kind)) for kind in ("allocated", "reserved", "device"))
        peaks = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in kinds if size is not None)
        took = "" if self.seconds is None else f", a step in {format_seconds(self.seconds)}"
        return f"{self.name} on {self.product}: micro-batch {self.micro_batch:,}{shape}: peak {peaks}{took}"


def record_run(
    workload: Workload,
    *,
    micro_batch: int,
    on: str = "cuda",
    file: str | Path | None = None,
    shape: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    clip_norm: float | None = None,
) -> RecordedRun:
    """Run full steps on a real card and write down what they took, to calibrate predictions by.

    Best in a process of its own that has the card to itself: what others hold of it would be taken for the context.
    """
    if file is not None:
        check_place(file, what="the recorded run", option="file=")
    device = open_device(on)
    if device.kind != "accelerator":
        raise InvalidInputError(f"a run is recorded on a card of this machine; {on} is none.", remedy='on="cuda"')
    outcome = device.probe(workload, micro_batch, StepSettings(shape or {}, accumulation, clip_norm))
    if outcome.verdict == "out_of_memory":
        raise NothingFitsError(f"micro-batch {micro_batch:,} ran out of memory on {on}, so there is nothing to record.")
    if outcome.verdict == "failed" or outcome.peak_bytes is None:
        raise StepFailedError(f"{outcome.traceback or ''}\nthe step failed on {on}: {outcome.error}")
    run = RecordedRun(
        workload.name,
        torch.cuda.get_device_name(torch.device(on)) if on.startswith("cuda") else on,
        device.total_bytes,
        micro_batch,
        outcome.peak_bytes,
        dict(shape or {}),
        accumulation,
        clip_norm,
        torch.__version__,
        torch.version.cuda or "",
        outcome.step_seconds,
    )
    if file is not None:
        text = json.dumps(run.to_dict(), indent=2) + "\n"
        replace_file(file, text.encode(), what="the recorded run", option="file=")
    return run


def read_run(file: str | Path) -> RecordedRun:
    """Read what `record_run` wrote."""
    try:
        fields = json.loads(read_text(file))
        schema = fields.pop("schema")
        if schema != _SCHEMA:
            raise InvalidInputError(f"'{file}' has schema {shortened(schema)}; this version reads {_SCHEMA}.")
        fields.pop("source", None)
        run = RecordedRun(**{**fields, "peak_bytes": PeakBytes(**fields["peak_bytes"])})
    except InvalidInputError:
        raise
    except OSError as error:
        raise InvalidInputError(f"'{file}' cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"'{file}' is no recorded run: {error}.", remedy="bw.record_run(workload, micro_batch=..., file=...)"
        ) from None
    whole_number(run.micro_batch, "micro-batch")
    whole_number(run.accumulation, "accumulation")
    if not isinstance(run.shape, dict):
        raise InvalidInputError(f"'{file}' has a shape that is no table of names: {shortened(run.shape)}.")
    _check_peaks(run.peak_bytes, file)
    if run.seconds is not None:
        accepted = f"'{file}' has a step of no seconds: they are a number above 0"
        positive_number(run.seconds, accepted, least=1e-9, most=1e9)
    return run


def _check_peaks(peaks: PeakBytes, file: str | Path) -> None:
    if peaks.allocated is None or peaks.reserved is None:
        raise InvalidInputError(f"'{file}' does not say what was allocated and reserved.")
    known = [peak for peak in (peaks.allocated, peaks.reserved, peaks.device) if peak is not None]
    if not all(type(peak) is int and peak > 0 for peak in known) or known != sorted(known):
        raise InvalidInputError(
            f"'{file}' has peaks that no run has: allocated {shortened(peaks.allocated)}, reserved "
            f"{shortened(peaks.reserved)}, device {shortened(peaks.device)}; each in bytes, none below the one before."
        )


@dataclass(frozen=True)
class Correction:
    """What a real run took beyond its prediction, whatever the size."""

    allocated: int
    reserved: int
    context: int | None
    seconds: float | None = None
    """The seconds of a step over those predicted."""

    @staticmethod
    def between(run: RecordedRun, predicted: PeakBytes) -> Correction:
        """Compare a run with its own prediction.

        >>> run = RecordedRun("step", "card", None, 8, PeakBytes(110, 150, 200))
        >>> Correction.between(run, PeakBytes(100, 130, 190))
        Correction(allocated=10, reserved=20, context=50, seconds=None)
        """
        (allocated, reserved), device = run.peak_bytes.of_allocator, run.peak_bytes.device
        expected_allocated, expected_reserved = predicted.of_allocator
        context = None if device is None else device - reserved
        return Correction(allocated - expected_allocated, reserved - expected_reserved, context)

    def applied(self, peaks: PeakBytes, context: Context) -> tuple[PeakBytes, Context]:
        """Set a prediction for another size right."""
        allocated, reserved = peaks.of_allocator
        allocated = max(allocated + self.allocated, 0)
        reserved = max(reserved + self.reserved, allocated)
        # What was measured has no span any more.
        held = self.context
        exact = context if held is None else replace(context, typical_bytes=held, low_bytes=held, high_bytes=held)
        return PeakBytes(allocated, reserved, reserved + exact.typical_bytes), exact


_BLOCK = 512


def _is_same_request(one: int, other: int) -> bool:
    """Whether two requests of two sizes are the same one: an allocation of the same stream, or the same thing freed."""
    return one == other or (min(one, other) >= 0 and size_and_stream(one)[1] == size_and_stream(other)[1])


@dataclass(frozen=True)
class ScaledRequests:
    """The requests of a step as a function of its micro-batch: lines through two runs."""

    small: int
    large: int
    at_small: tuple[int, ...]
    at_large: tuple[int, ...]

    @classmethod
    def through(cls, small: int, events: tuple[int, ...], large: int, others: tuple[int, ...]) -> ScaledRequests | None:
        """Draw lines through two runs; None where they are not the same run at two sizes.

        >>> ScaledRequests.through(2, (120, -1), 4, (140, -1)).at(8)
        (180, -1)
        >>> ScaledRequests.through(2, (120, 8, -1), 4, (140, -1)) is None
        True
        """
        if len(events) != len(others) or large <= small:
            return None
        is_same = all(map(_is_same_request, events, others))
        return cls(small, large, events, others) if is_same else None

    def at(self, size: int) -> tuple[int, ...]:
        """Return the requests at another size."""
        step, further = self.large - self.small, size - self.small
        return tuple(
            one + (other - one) * further // step for one, other in zip(self.at_small, self.at_large, strict=True)
        )

    def agrees_with(self, size: int, events: tuple[int, ...]) -> bool:
        """Whether a run at another size asked for what the lines say.

        >>> lines = ScaledRequests.through(2, (120, -1), 4, (140, -1))
        >>> lines.agrees_with(8, (180, -1)), lines.agrees_with(8, (1180, -1)), lines.agrees_with(8, (180,))
        (True, False, False)
        """
        expected = self.at(size)
        return len(expected) == len(events) and all(
            _is_same_request(one, other) and abs(one - other) < _BLOCK + size_and_stream(other)[0] // 1024
            for one, other in zip(expected, events, strict=True)
        )


# Sizes to draw lines through, two each. A line holds up to a size at which it was proven by a trace, and each proof is
# made far ahead. Where it fails, a kernel has taken another path in between (an embedding does, from so many tokens on,
# and again at as many as it has rows): then lines are drawn anew beyond.
# All of them are odd: a step that pads its batch to a multiple goes up in stairs, which multiples would not show.
_PAIRS = ((17, 25), (67, 97), (257, 389), (1031, 1543))
_AHEAD = 4


class CardsAlike:
    """The runs of a step on cards of one kind, by micro-batch."""

    def __init__(self, place: OnCard, cap: int, say: Callable[[str], None]) -> None:
        self._place, self._cap, self._say = place, cap, say
        self._runs: dict[int, Traced] = {}
        self._pairs = list(_PAIRS)
        self._lines: ScaledRequests | None = None
        self._proven = 0

    def traced(self, size: int, card: Card) -> Traced:
        """Return a run at a size, with the context of this very card."""
        if size not in self._runs:
            self._runs[size] = self._scaled(size) or self._trace(size)
        run = self._runs[size]
        context = context_of(card)
        allocated, reserved = run.on_card[0].of_allocator
        peaks = PeakBytes(allocated, reserved, reserved + context.typical_bytes)
        return replace(run, peaks=peaks, context=context)

    def _trace(self, size: int) -> Traced:
        if size not in self._runs:
            self._say(f"{self._place.card.name} and its like: tracing micro-batch {size:,}")
            self._runs[size] = self._place.traced(size)
        return self._runs[size]

    def _scaled(self, size: int) -> Traced | None:
        """Return what a size would ask for, by the lines; None below them, or where there are none."""
        while size > self._proven and self._pairs and self._pairs[0][-1] < size:
            if self._lines is None:
                small, large = self._pairs[0]
                self._lines = ScaledRequests.through(
                    small, self._trace(small).requests, large, self._trace(large).requests
                )
            ahead = min(max(size, _AHEAD * self._pairs[0][-1], _AHEAD * self._proven) | 1, self._cap)
            if self._lines is not None and self._holds(self._lines, ahead):
                self._proven = ahead
            else:
                self._lines = None
                self._pairs.pop(0)
        if self._lines is None or not self._lines.small <= size <= self._proven:
            return None
        events = self._lines.at(size)
        allocated, reserved = peaks_with_room(events, self._place.allocator)
        # The rest of a trace, its log and its notes, is that of the smallest size on the lines.
        lines = self._lines
        least, most = self._trace(lines.small), self._trace(lines.large)
        work = least.work_at(size, lines.small, most, lines.large)
        return replace(least, peaks=PeakBytes(allocated, reserved), requests=events, work=work)

    def _holds(self, lines: ScaledRequests, size: int) -> bool:
        try:
            return lines.agrees_with(size, self._trace(size).requests)
        except Exception:  # a batch that cannot be made so large says nothing of smaller ones
            return False


def card_named(on: str, *, memory: str | int | None = None, context: str | int | None = None) -> Card | None:
    """Return the card to simulate, None for the CPU; `memory` and `context` are one's own machine's, where said.

    >>> card_named("cpu") is None, card_named("a100-40gb").generation
    (True, 'ampere')
    """
    if on == "cpu":
        return None
    if not names_a_card(on):
        raise InvalidInputError(
            f"{on} is a device of this machine, and an estimate runs nothing on it.",
            remedy='on="a100-40gb", a card by name; or bw.fit, which runs the step for real',
        )
    try:
        card = find_card(on)
    except InvalidInputError as error:
        here = ", ".join(present_devices())
        raise InvalidInputError(
            f"no device and no card is called {shortened(on)}; this machine has: {here}.", remedy=error.remedy
        ) from None
    if memory is not None:
        card = replace(card, total_bytes=parse_bytes(memory))
    if context is not None:
        card = replace(card, context_bytes=parse_bytes(context, "context"))
        if context_of(card).typical_bytes >= card.total_bytes:
            raise InvalidInputError(
                f"a context of {format_bytes(context_of(card).typical_bytes)} leaves nothing of the "
                f"{format_bytes(card.total_bytes)} of {card.name}.",
                remedy="what nvidia-smi shows of a process, less torch.cuda.memory_reserved(), such as 1.2GiB",
            )
    return card


def default_place() -> tuple[str, str]:
    """Return where a step would run on this machine, and what has to be said of it.

    That is the machine's own card, simulated; the CPU where there is no accelerator, or none that the catalogue knows.
    """
    device = default_device()
    if device == "cpu":
        return device, ""
    product = torch.cuda.get_device_name() if device == "cuda" else device
    try:
        return find_card(product).name, ""
    except InvalidInputError:
        return "cpu", f"predicted for the CPU: the catalogue does not have this machine's accelerator ({product})"


@dataclass(frozen=True)
class OnCard:
    """A workload and the card it would run on."""

    workload: Workload
    card: Card
    allocator: AllocatorSettings
    step: StepSettings
    correction: Correction | None = None

    def roomy(self) -> SimulatedCard:
        """Return the card, with more memory than any step takes."""
        return SimulatedCard(self.card, self.allocator, is_roomy=True)

    def traced(self, micro_batch: int) -> Traced:
        """Trace it with room to spare."""
        return self._corrected(trace_workload(self.workload, micro_batch, self.step, card=self.roomy()))

    def as_it_is(self, history: History | None = None) -> SimulatedCard:
        """Return the card with the memory it has, less what a real run took beyond its prediction."""
        taken = 0
        if self.correction is not None:
            context = context_of(self.card).typical_bytes
            taken = max(self.correction.reserved, 0) + (self.correction.context or context) - context
        card = replace(self.card, total_bytes=max(self.card.total_bytes - taken, 0))
        return SimulatedCard(card, self.allocator, history=history)

    def traced_as_it_is(self, micro_batch: int) -> Traced | None:
        """Trace it on the card as it is; None where that runs out of memory. A step may catch that and go on."""
        try:
            traced = trace_workload(self.workload, micro_batch, self.step, card=self.as_it_is())
        except torch.OutOfMemoryError:
            return None
        note = "near the limit: these are the peaks on the card itself, whose allocator releases its cache"
        return self._corrected(replace(traced, notes=(*traced.notes, note)))

    def _corrected(self, traced: Traced) -> Traced:
        if self.correction is None:
            return traced
        peaks, context = self.correction.applied(*traced.on_card)
        return replace(traced, peaks=peaks, context=context)

    def calibrated(self, file: str | Path) -> OnCard:
        """Set predictions right by one real run on such a card."""
        run = read_run(file)
        if run.product not in (self.card.product, self.card.name) and not _is_card(run.product, self.card):
            raise InvalidInputError(
                f"'{file}' was recorded on {run.product}, and {self.card.name} is asked about.",
                remedy="a run on the same card: context and libraries differ from card to card",
            )
        if self.step.devices != 1:
            raise InvalidInputError(
                f"a run is recorded on one card, and one of {self.step.devices} was asked about.",
                remedy="calibrate= without devices=",
            )
        if run.name.rpartition("/")[2] != self.workload.name.rpartition("/")[2]:  # folders differ between machines
            raise InvalidInputError(
                f"'{file}' was recorded of {run.name}, and {self.workload.name} is asked about.",
                remedy="a run of the same workload: what it took beyond its prediction is taken for this one's",
            )
        step = replace(self.step, shape=run.shape, accumulation=run.accumulation, clip_norm=run.clip_norm)
        predicted = trace_workload(self.workload, run.micro_batch, step, card=self.roomy())
        correction = Correction.between(run, predicted.on_card[0])
        time = None if run.seconds is None else time_on(self.card, predicted.work, run.micro_batch, step)
        if run.seconds is not None and isinstance(time, StepTime):
            correction = replace(correction, seconds=run.seconds / time.seconds)
        return replace(self, correction=correction)

    def timed(self, work: StepWork | None, micro_batch: int, network: Network | None = None) -> StepTime | NoTime:
        """Return the seconds of a step, set right by what a recorded run took."""
        time = time_on(self.card, work, micro_batch, self.step, network)
        factor = None if self.correction is None else self.correction.seconds
        return time.set_right(factor) if factor is not None and isinstance(time, StepTime) else time

    def write_snapshot(self, micro_batch: int, file: Path) -> None:
        """Trace it once more on the card as it is, and write PyTorch's own memory snapshot of the run.

        A run that ends out of memory is written as well: that is when one wants to look.
        """
        card = self.as_it_is(History())
        with suppress(torch.OutOfMemoryError):
            trace_workload(self.workload, micro_batch, self.step, card=card)
        replace_file(file, pickle.dumps(card.snapshot()), what="the snapshot", option="snapshot=FILE")

    def fits(self, traced: Traced) -> bool:
        """Whether what was traced with room to spare runs on the card as it is."""
        # What a real run took beyond its prediction is not among the requests; it is taken off what there is.
        beyond = 0 if self.correction is None else max(self.correction.reserved, 0)
        capacity = max(self.card.total_bytes - traced.on_card[1].typical_bytes - beyond, 0)
        return goes_through(traced.requests, capacity, self.allocator, self.card.total_bytes)

    def largest(self, traced: Callable[[int], Traced], *, cap: int, to_the_last: bool = True) -> int:
        """Return the largest micro-batch that runs; or, in fewer looks, the largest whose peak has room to spare."""
        # One whose peak has room on the card runs for certain. Beyond, the card has the last word, up to the size whose
        # live tensors alone are too large.
        low = largest_within(lambda size: device_peak(traced(size)), self.card.total_bytes, cap=cap) or 0
        if to_the_last:
            low = largest_that_fits(lambda size: self.fits(traced(size)), above=low, cap=cap)
        if not low and not self.fits(traced(1)):
            raise self.nothing_fits(traced(1))
        return max(low, 1)

    def nothing_fits(self, smallest: Traced) -> NothingFitsError:
        """Say what micro-batch 1 would take."""
        needs = break_down(smallest.log).list_parts(least=2**20)
        return NothingFitsError(
            f"micro-batch 1 does not fit on {self.card.product} with {format_bytes(self.card.total_bytes)}.",
            details=[
                f"needed {format_bytes(device_peak(smallest))}: {needs}, "
                f"context {format_bytes(smallest.on_card[1].typical_bytes)}"
            ],
            remedy="what_if=True in place of find_max=True prints what each change of the set-up would save",
        )


def _is_card(product: str, card: Card) -> bool:
    try:
        return find_card(product) == find_card(card.name)
    except InvalidInputError:
        return False


def device_peak(traced: Traced) -> int:
    """Bytes of a card that a run takes, context and all."""
    peaks, context = traced.on_card
    return peaks.of_allocator[1] + context.typical_bytes


def read_settings(text: str | AllocatorSettings | None) -> AllocatorSettings:
    """Read allocator settings as PYTORCH_ALLOC_CONF has them."""
    return AllocatorSettings.parse(text) if isinstance(text, str) else text or AllocatorSettings()
