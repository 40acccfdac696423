"""The workloads that a check runs: a small language model for the devices, a smaller net for the parts.

Promises:
- nothing is read or downloaded; tokens are random;
- the kinds of memory that a training has are all there: attention, logits over a vocabulary, AdamW's moments.
"""

from __future__ import annotations

import torch
from torch import nn

from batchwright.workload import Workload

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 256, 4, 2, 8192, 128
NAME = f"a GPT of {LAYERS} layers, width {WIDTH}, {VOCABULARY:,} tokens, length {LENGTH}, AdamW, fp32"


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream with what the block adds."""
        query, key, value = self.qkv(self.norms[0](stream)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        changed: torch.Tensor = stream + self.mlp(self.norms[1](stream))
        return changed


class SmallGpt(nn.Module):
    """Predicts the next of random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions(places))))
        return logits


def workload() -> Workload:
    """Return the training step that is predicted and measured on each device."""
    return Workload(
        model=SmallGpt,
        batch=lambda n: torch.randint(VOCABULARY, (n, LENGTH)),
        loss=lambda model, tokens: nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        ),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def small_net() -> Workload:
    """Return a step of milliseconds, for the parts."""
    data = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)),
        data=torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )


# What `estimate -- python train.py` is tried on: a program that knows nothing of batchwright.
PROGRAM = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
model = torch.nn.Linear(16, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(data, batch_size=options.batch_size):
    torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
