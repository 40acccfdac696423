"""Sizes that follow from a few traces ask for the same as a trace of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.device.step import PLAIN_STEP
from batchwright.memory.on_card import CardsAlike, OnCard
from batchwright.simulated.allocator.settings import AllocatorSettings

CARD = find_card("a100-40gb")


class Tagger(nn.Module):
    """An embedding, a layer of attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.embedding(tokens)))
        return out


def tagger(**changes: Any) -> bw.Workload:
    told = {
        "model": Tagger,
        "batch": lambda n: torch.zeros(n, 32, dtype=torch.long),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda params: torch.optim.AdamW(params),
    }
    return bw.Workload(**{**told, **changes})


def on_card(workload: bw.Workload) -> OnCard:
    return OnCard(workload, CARD, AllocatorSettings(), PLAIN_STEP)


@pytest.mark.slow
@pytest.mark.parametrize("size", [300, 700, 1400])
def test_a_size_that_was_not_traced_asks_for_what_its_trace_would(size: int) -> None:
    there = on_card(tagger())
    said: list[str] = []
    cards = CardsAlike(there, 4096, said.append)
    cards.traced(2 * size, CARD)
    found, traced = cards.traced(size, CARD), there.traced(size)
    assert not any(f"micro-batch {size:,}" in line for line in said)
    assert len(found.requests) == len(traced.requests)
    # The backward of an embedding sums ten rows at a time, so it asks in steps.
    assert all(
        abs(one - other) < 512 + other // 1024 for one, other in zip(found.requests, traced.requests, strict=True)
    )
    assert found.peaks is not None
    assert traced.peaks is not None
    assert found.peaks.reserved == traced.peaks.reserved
    assert found.peaks.allocated == pytest.approx(traced.peaks.allocated, abs=8192)


def test_a_step_that_changes_its_course_with_the_size_is_traced_at_every_size() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        for _ in range(len(batch) % 7):
            out = out.exp()
        return out.square().mean()

    there = on_card(tagger(loss=loss))
    said: list[str] = []
    assert CardsAlike(there, 4096, said.append).traced(200, CARD).requests == there.traced(200).requests
    assert any("micro-batch 200" in line for line in said)


def test_a_small_dataset_is_not_asked_for_more_than_it_has() -> None:
    said: list[str] = []
    CardsAlike(on_card(tagger()), 20, said.append).traced(20, CARD)
    assert said == ["a100-40gb and its like: tracing micro-batch 20"]


def test_the_largest_of_a_step_that_pads_its_batch_is_the_top_of_a_stair() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(nn.functional.pad(batch, (0, 0, 0, -len(batch) % 64)))
        return out.sum()

    workload = bw.Workload(
        model=lambda: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 8)),
        batch=lambda n: torch.randn(n, 1024),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    found = bw.estimate(workload, on="a100-40gb", memory="720MiB", find_max=True)
    assert found.fits
    assert found.max_micro_batch is not None
    assert found.max_micro_batch % 64 == 0


def test_a_step_near_the_limit_shows_the_peaks_of_the_card_itself() -> None:
    found = bw.estimate(tagger(), on="a100-40gb", memory="700MiB", find_max=True)
    assert found.fits
    assert found.peak_bytes.device is not None
    assert found.peak_bytes.device <= 700 * 2**20
