"""A step on a simulated card: does it run there, what does it take, which size is the largest.

Promises:
- the peaks are those of a card with room to spare, as a run shows them that is far from the limit; where they are
  larger than the card and it runs all the same, those of the run on the card itself;
- whether it fits is asked of the card itself, out-of-memory path and all: near the limit its allocator gives back what
  it has cached, and a step may run whose peak on a larger card would not fit.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from batchwright.catalogue.gpus import Card, Context, context_of, find_card, names_a_card
from batchwright.device.device import default_device, present_devices
from batchwright.device.peak_bytes import PeakBytes
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.memory.breakdown import break_down
from batchwright.memory.largest import largest_within
from batchwright.memory.recorded_run import Correction, read_run
from batchwright.memory.tracing import Traced, trace_workload
from batchwright.simulated.allocator_settings import AllocatorSettings
from batchwright.simulated.memory_snapshot import History, write_snapshot
from batchwright.simulated.replay import goes_through
from batchwright.simulated.simulated_card import SimulatedCard
from batchwright.units import format_bytes, parse_bytes, shortened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchwright.workload import Workload

# The smallest that covers torchtune's reserved figures in the calibration third of benchmarks/memory_gpu.py, where
# predictions were 6.8 % low. docs/limits.md says how often it falls short.
_UPPER = 1.075


def card_named(on: str, *, memory: str | int | None = None) -> Card | None:
    """Return the card to simulate, None for the CPU; `memory` is what it has, where that was said.

    >>> card_named("cpu") is None, card_named("a100-40gb").generation
    (True, 'ampere')
    """
    if on == "cpu":
        return None
    if not names_a_card(on):
        raise InvalidInputError(
            f"{on} is a device of this machine, and an estimate runs nothing on it.",
            remedy="--on with the name of a card, such as a100-40gb; batchwright fit --on cuda runs the step for real",
        )
    try:
        card = find_card(on)
    except InvalidInputError as error:
        here = ", ".join(present_devices())
        raise InvalidInputError(
            f"no device and no card is called {shortened(on)}; this machine has: {here}.", remedy=error.remedy
        ) from None
    return card if memory is None else replace(card, total_bytes=parse_bytes(memory))


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
    settings: AllocatorSettings
    told: dict[str, Any]
    correction: Correction | None = None

    def roomy(self) -> SimulatedCard:
        """Return the card, with more memory than any step takes."""
        return SimulatedCard(self.card, self.settings, is_roomy=True)

    def traced(self, micro_batch: int) -> Traced:
        """Trace it with room to spare."""
        return self._corrected(trace_workload(self.workload, micro_batch, card=self.roomy(), **self.told))

    def as_it_is(self, history: History | None = None) -> SimulatedCard:
        """Return the card with the memory it has, less what a real run took beyond its prediction."""
        taken = 0
        if self.correction is not None:
            context = context_of(self.card).typical_bytes
            taken = max(self.correction.reserved, 0) + (self.correction.context or context) - context
        card = replace(self.card, total_bytes=max(self.card.total_bytes - taken, 0))
        return SimulatedCard(card, self.settings, history=history)

    def traced_as_it_is(self, micro_batch: int) -> Traced | None:
        """Trace it on the card as it is; None where that runs out of memory. A step may catch that and go on."""
        try:
            found = trace_workload(self.workload, micro_batch, card=self.as_it_is(), **self.told)
        except torch.OutOfMemoryError:
            return None
        note = "near the limit: these are the peaks on the card itself, whose allocator gives back what it has cached"
        return self._corrected(replace(found, notes=(*found.notes, note)))

    def _corrected(self, found: Traced) -> Traced:
        if self.correction is None:
            return found
        assert found.peaks is not None
        assert found.context is not None
        peaks, context = self.correction.applied(found.peaks, found.context)
        return replace(found, peaks=peaks, context=context)

    def calibrated(self, file: str | Path) -> OnCard:
        """Set predictions right by one real run on such a card."""
        run = read_run(file)
        if run.product not in (self.card.product, self.card.name) and not _is_card(run.product, self.card):
            raise InvalidInputError(
                f"'{file}' was recorded on {run.product}, and {self.card.name} is asked about.",
                remedy="a run on the same card: context and libraries differ from card to card",
            )
        if self.told.get("devices", 1) != 1:
            raise InvalidInputError(
                f"a run is recorded on one card, and one of {self.told['devices']} was asked about.",
                remedy="--calibrate without --devices",
            )
        if run.name.rpartition("/")[2] != self.workload.name.rpartition("/")[2]:  # folders differ between machines
            raise InvalidInputError(
                f"'{file}' was recorded of {run.name}, and {self.workload.name} is asked about.",
                remedy="a run of the same workload: what it took beyond its prediction is taken for this one's",
            )
        told = {**self.told, "shape": run.shape, "accumulation": run.accumulation, "clip_norm": run.clip_norm}
        predicted = trace_workload(self.workload, run.micro_batch, card=self.roomy(), **told)
        assert predicted.peaks is not None
        return replace(self, correction=Correction.between(run, predicted.peaks))

    def write_snapshot(self, micro_batch: int, file: Path) -> None:
        """Trace it once more on the card as it is, and write PyTorch's own memory snapshot of the run.

        A run that ends out of memory is written as well: that is when one wants to look.
        """
        history = History()
        card = self.as_it_is(history)
        with suppress(torch.OutOfMemoryError):
            trace_workload(self.workload, micro_batch, card=card, **self.told)
        write_snapshot(file, history, card.allocator)

    def fits(self, traced: Traced) -> bool:
        """Whether what was traced with room to spare runs on the card as it is."""
        assert traced.context is not None
        # What a real run took beyond its prediction is not among the requests; it is taken off what there is.
        beyond = 0 if self.correction is None else max(self.correction.reserved, 0)
        capacity = max(self.card.total_bytes - traced.context.typical_bytes - beyond, 0)
        return goes_through(traced.requests, capacity, self.settings, self.card.total_bytes)

    def largest(self, traced: Callable[[int], Traced], *, cap: int, to_the_last: bool = True) -> int:
        """Return the largest micro-batch that runs; or, in fewer looks, the largest whose peak has room to spare."""
        # One whose peak has room on the card runs for certain. Beyond, the card has the last word, up to the size whose
        # live tensors alone are too large.
        low = largest_within(lambda size: device_peak(traced(size)), self.card.total_bytes, cap=cap) or 0
        high = low + 1
        while to_the_last and high <= cap and self.fits(traced(high)):
            low, high = high, min(2 * high - low + 1, cap + 1)
        while to_the_last and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(traced(middle)) else (low, middle)
        if not low and not self.fits(traced(1)):
            raise self.nothing_fits(traced(1))
        return max(low, 1)

    def nothing_fits(self, smallest: Traced) -> NothingFitsError:
        """Say what micro-batch 1 would take."""
        assert smallest.context is not None
        parts = sorted(break_down(smallest.log).parts.items(), key=lambda part: -part[1])
        told = ", ".join(f"{part} {format_bytes(num_bytes)}" for part, num_bytes in parts if num_bytes >= 2**20)
        return NothingFitsError(
            f"micro-batch 1 does not fit on {self.card.product} with {format_bytes(self.card.total_bytes)}.",
            details=[
                f"needed {format_bytes(device_peak(smallest))}: {told}, "
                f"context {format_bytes(smallest.context.typical_bytes)}"
            ],
            remedy="--what-if in place of --max prints what each change of the set-up would save",
        )


def _is_card(product: str, card: Card) -> bool:
    try:
        return find_card(product) == find_card(card.name)
    except InvalidInputError:
        return False


def device_peak(traced: Traced) -> int:
    """Bytes of a card that a run takes, context and all."""
    assert traced.peaks is not None
    assert traced.peaks.device is not None
    return traced.peaks.device


def upper_on_card(peaks: PeakBytes, context: Context, unsure_bytes: int = 0) -> PeakBytes:
    """The peaks with a margin, or with the largest workspaces, and with the largest context that was reported."""
    assert peaks.allocated is not None
    assert peaks.reserved is not None
    allocated, reserved = (max(round(peak * _UPPER), peak + unsure_bytes) for peak in (peaks.allocated, peaks.reserved))
    return PeakBytes(allocated, reserved, reserved + context.high_bytes)


def read_settings(text: str | AllocatorSettings | None) -> AllocatorSettings:
    """Read allocator settings as PYTORCH_ALLOC_CONF has them."""
    return AllocatorSettings.parse(text) if isinstance(text, str) else text or AllocatorSettings()
