"""The loops that benchmarks/accumulate.py compares: by hand, and with `Accumulator`; each call trains one window."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator

if TYPE_CHECKING:
    from collections.abc import Callable

ACCUMULATION = 4
WIDTH, LENGTH, SAMPLES, LAYERS, VOCAB = 128, 32, 4, 4, 1024


class Model(nn.Module):
    """A small transformer: 1.1 million weights in 51 tensors, so that what is done per weight shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token."""
        return token_loss(self.head(self.layers(self.embedding(tokens[:, :-1]))), tokens)


class Bare(nn.Module):
    """As many weights, and next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(51)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return something that reaches every weight."""
        return torch.stack(list(self.weights)).sum()


def token_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def count_tokens(tokens: torch.Tensor) -> int:
    return tokens[:, 1:].numel()


def make_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (SAMPLES, LENGTH + 1), generator=generator) for _ in range(ACCUMULATION)]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Callable[[], None]:
    batches = make_batches()

    def window() -> None:
        for batch in batches:
            (model(batch) / ACCUMULATION).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return window


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Callable[[], None]:
    batches = make_batches()
    accumulator = Accumulator(model, optimizer, ACCUMULATION, clip_norm=clip_norm)

    def window() -> None:
        for batch in batches:
            accumulator.backward(model(batch))

    return window


def read_ahead(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Callable[[], None]:
    accumulator = Accumulator(model, optimizer, ACCUMULATION, clip_norm=clip_norm)
    micro_batches = accumulator.micro_batches(itertools.cycle(make_batches()), count_tokens)

    def window() -> None:
        for _ in range(ACCUMULATION):
            accumulator.backward(model(next(micro_batches)))

    return window


OURS = {"backward in a plain loop": plain, "micro_batches, weighted": read_ahead}
