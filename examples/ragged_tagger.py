"""A token classifier over sentences of different lengths, with the accumulation loop that most tutorials show.

batchwright audit examples/ragged_tagger.py:workload
batchwright audit examples/ragged_tagger.py:exact_workload
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import batchwright as bw

NUM_SENTENCES, VOCABULARY, CLASSES = 64, 100, 5


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, CLASSES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        logits: torch.Tensor = self.layers(self.embed(ids))
        return logits


def sentences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sentences of 2 to 29 tokens, and a class for each token."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (NUM_SENTENCES,), generator=generator).tolist()
    return [
        (
            torch.randint(0, VOCABULARY, (n,), generator=generator),
            torch.randint(0, CLASSES, (n,), generator=generator),
        )
        for n in lengths
    ]


def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch: the shorter sentences are filled up, and the loss ignores that."""
    ids, labels = zip(*rows, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return {"ids": pad(list(ids), True), "labels": pad(list(labels), True, padding_value=-100)}


def token_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over the tokens of a batch."""
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def count_tokens(batch: dict[str, torch.Tensor]) -> int:
    """Count what the loss is a mean over."""
    return int((batch["labels"] != -100).sum())


def plain_window(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[Any]) -> None:
    """Accumulate as most tutorials do: four micro-batches, each loss divided by four."""
    for batch in micro_batches:
        (token_mean(model, batch) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def exact_window(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[Any]) -> None:
    """Accumulate with weights: the tokens of each micro-batch."""
    accumulator = bw.Accumulator(model, optimizer, accumulation=len(micro_batches))
    for batch in accumulator.micro_batches(micro_batches, weight=count_tokens):
        accumulator.backward(token_mean(model, batch))


def workload() -> bw.Workload:
    """Return the step with the plain loop."""
    return bw.Workload(
        model=Tagger,
        data=sentences(),
        collate=padded,
        loss=token_mean,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        units=count_tokens,
        window=plain_window,
    )


def exact_workload() -> bw.Workload:
    """Return the step with the exact loop."""
    return replace(workload(), window=exact_window)
