"""Which cards take a step, and with what micro-batch: one answer for every card of the catalogue.

Cards whose kernels are alike share their traces; each is then asked with its own memory. The largest micro-batch is the
largest whose peak has room to spare: `estimate --on CARD --max` may find one or two more, near the limit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import all_cards
from batchwright.device.step import StepSettings
from batchwright.errors import NothingFitsError
from batchwright.memory.estimate import LARGEST_MICRO_BATCH, check_ranks, check_shape, without_torchs_own_log
from batchwright.memory.on_card import CardsAlike, OnCard, device_peak, read_settings
from batchwright.printed_result import PrintedResult
from batchwright.simulated.card import kernels_of
from batchwright.state.untouched import untouched
from batchwright.trace.run import check_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType

    from batchwright.catalogue.cards import Card
    from batchwright.simulated.allocator.settings import AllocatorSettings
    from batchwright.trace.run import Traced
    from batchwright.workload import Workload


@dataclass(frozen=True)
class CardRow:
    """One card: does the micro-batch asked for run there, and what is the largest that does."""

    card: str
    total_bytes: int
    fits: bool
    device_bytes: int
    """What the micro-batch asked for takes of the card, context and all."""
    max_micro_batch: int | None
    """None where not even 1 runs."""


@dataclass(frozen=True, repr=False)
class EveryCard(PrintedResult):
    """The cards of the catalogue, the smallest that takes the step first."""

    in_repr = ("name", "micro_batch", "fits")

    name: str
    micro_batch: int
    rows: tuple[CardRow, ...]
    source: str = "predicted"

    @property
    def fits(self) -> bool:
        """Whether any card takes the micro-batch asked for."""
        return any(row.fits for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, the same as `batchwright estimate --on all --json` prints."""
        return {"schema": 1, **asdict(self), "rows": [asdict(row) for row in self.rows]}

    def __rich__(self) -> RenderableType:
        from batchwright.report.text.memory_text import draw_cards

        return draw_cards(self)

    def _repr_html_(self) -> str:
        from batchwright.report.display import table_to_html
        from batchwright.report.text.memory_text import cards_columns, summarize_cards

        return table_to_html(summarize_cards(self), cards_columns(self), ())


def estimate_every_card(
    workload: Workload,
    *,
    micro_batch: int = 1,
    shape: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    clip_norm: float | None = None,
    routing: str = "balanced",
    devices: int = 1,
    allocator: str | AllocatorSettings | None = None,
    progress: Callable[[str], None] | None = None,
) -> EveryCard:
    """Ask every card of the catalogue; arguments as those of `estimate`."""
    say = progress or (lambda _: None)
    step = StepSettings(shape or {}, accumulation, clip_norm, routing, devices)
    check_ranks(workload, devices, is_card=True)
    check_shape(workload, step.shape)
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
            rows.append(CardRow(card.name, card.total_bytes, place.fits(run), device_peak(run), largest))
    return EveryCard(workload.name, micro_batch, tuple(sorted(rows, key=lambda row: (not row.fits, row.total_bytes))))
