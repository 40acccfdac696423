"""Small real workloads that the tests of device/ share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchwright.device import step
from batchwright.state.untouched import thrown_away
from batchwright.workload import Workload


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).pow(2).mean()
    return loss


def make_linear(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(8, 1),
        "batch": lambda n: torch.randn(n, 8),
        "loss": mean_square,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return Workload(**{**fields, **changes})


def make_mlp(**changes: Any) -> Workload:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))

    fields: dict[str, Any] = {
        "model": build,
        "batch": lambda n: torch.randn(n, 256),
        "loss": mean_square,
        "optimizer": lambda params: torch.optim.AdamW(params),
    }
    return Workload(**{**fields, **changes})


class SmallTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embed(tokens)))
        return logits


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_transformer(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": SmallTransformer,
        "batch": lambda n, seq_len=33: torch.randint(0, 1000, (n, seq_len)),
        "loss": next_token_loss,
        "optimizer": lambda params: torch.optim.AdamW(params),
    }
    return Workload(**{**fields, **changes})


def run_probe(*args: Any, **options: Any) -> tuple[float, ...]:
    """Run a probe of objects that nobody needs afterwards."""
    with thrown_away():
        return step.run_probe(*args, **options)
