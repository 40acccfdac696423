"""Probes on a card that is not there: the step is traced, and the replayed allocator says whether it fits.

Promises:
- the search is the same as on a real device, and so is what ends it: `torch.OutOfMemoryError`;
- nothing runs, so nothing is certified and nothing of the user's is touched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.gpus import context_of
from batchwright.device.outcome import judge
from batchwright.errors import NothingFitsError
from batchwright.fitting.budget import Budget
from batchwright.fitting.result import Restored
from batchwright.memory.estimate import without_torchs_own_log
from batchwright.memory.on_card import upper_on_card
from batchwright.memory.tracing import trace_workload
from batchwright.simulated.simulated_card import SimulatedCard
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchwright.catalogue.gpus import Card
    from batchwright.device.outcome import Outcome
    from batchwright.fitting.result import Fit
    from batchwright.simulated.allocator_settings import AllocatorSettings
    from batchwright.workload import Workload


class OnSimulatedCard:
    """Probes of a workload on one card of the catalogue."""

    where = "on a simulated card: traced, not run"

    def __init__(self, workload: Workload, card: Card, settings: AllocatorSettings | None = None, **told: Any) -> None:
        self._workload = workload
        self._card = card
        self._settings = settings
        self._told = told

    @property
    def on(self) -> str:
        """The card."""
        return self._card.name

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        """Trace full steps on the card."""
        card = SimulatedCard(self._card, self._settings)

        def run() -> tuple[float, ...]:
            with without_torchs_own_log():
                trace_workload(self._workload, micro_batch, shape=shape, card=card, **self._told)
            return (0.0,)

        found = judge(run, micro_batch=micro_batch, shape=shape, accumulation=1, peak=lambda: card.peak_bytes)
        return replace(found, step_seconds=None, accumulation=self._told.get("accumulation", 1))

    def restored(self) -> Restored:
        """Nothing ran, so nothing was changed."""
        return Restored(("everything, as nothing ran",), ())


def budget_on(card: Card, margin: float) -> Budget:
    """Return what PyTorch can take of a card: all but its context."""
    context = context_of(card).typical_bytes
    total = format_bytes(card.total_bytes)
    if context >= card.total_bytes:
        raise NothingFitsError(
            f"nothing fits into {total} of {card.product}: its CUDA context alone takes {format_bytes(context)}."
        )
    return Budget(
        card.total_bytes - context,
        margin,
        (f"{card.product} has {total}, of which a CUDA context takes {format_bytes(context)}",),
        was_asked=True,
    )


def with_margin(found: Fit, card: Card) -> Fit:
    """Say what the three peaks at the answer are with their margin."""
    peaks = found.peak_bytes
    if peaks is None or peaks.allocated is None or peaks.reserved is None:
        return found
    upper = upper_on_card(peaks, context_of(card))
    told = ", ".join(
        f"{name} {format_bytes(peak or 0)} ({format_bytes(bound or 0)})"
        for name, peak, bound in (
            ("allocated", peaks.allocated, upper.allocated),
            ("reserved", peaks.reserved, upper.reserved),
            ("device", peaks.device, upper.device),
        )
    )
    return replace(found, notes=(*found.notes, f"predicted peaks, and with a margin: {told}"))
