"""A plain PyTorch loop: a small convolutional net learns which way a stroke in a noisy picture runs.

Tune it, then train with the answer (here from one machine):

batchwright tune examples/plain_loop.py:workload --memory 1GiB --limit 128
python examples/plain_loop.py --micro-batch 39 --accumulation 1 --learning-rate 0.00172

All that was added for batchwright is `workload`, and an Accumulator where `backward()` and `optimizer.step()` stood.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_PICTURES, SIDE, STROKE, EPOCHS = 2048, 16, 8, 2
# Suits an effective batch of 64, the default of --noise-batch.
LEARNING_RATE = 2e-3
DIRECTIONS = torch.tensor([[0, 1], [1, 0], [1, 1], [-1, 1]])


def pictures() -> TensorDataset:
    """Strokes at random places, in one of four directions, under noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, len(DIRECTIONS), (NUM_PICTURES,), generator=generator)
    starts = torch.randint(0, SIDE, (NUM_PICTURES, 2, 1), generator=generator)
    places = (starts + DIRECTIONS[labels].unsqueeze(-1) * torch.arange(STROKE)) % SIDE
    images = torch.randn(NUM_PICTURES, 1, SIDE, SIDE, generator=generator) / 2
    images[torch.arange(NUM_PICTURES).unsqueeze(-1), 0, places[:, 0], places[:, 1]] += 1
    return TensorDataset(images, labels)


def make_model() -> nn.Module:
    """Two convolutions, and the strongest answer of each channel."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(32, len(DIRECTIONS)),
    )


def make_optimizer(parameters: Iterable[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=learning_rate)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the direction."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def workload() -> bw.Workload:
    """What batchwright is pointed at: model, data, loss and optimizer of this script."""
    return bw.Workload(model=make_model, data=pictures(), loss=loss, optimizer=make_optimizer)


def train(micro_batch: int, accumulation: int, learning_rate: float) -> None:
    """Train, and tell how it went."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters(), learning_rate)
    loader = DataLoader(pictures(), batch_size=micro_batch, shuffle=True)
    accumulator = bw.Accumulator(model, optimizer, accumulation=accumulation)
    losses, start = [], time.perf_counter()
    for _ in range(EPOCHS):
        for micro in accumulator.micro_batches(loader):
            step = accumulator.backward(loss(model, micro))
            if step:
                losses.append(step.loss)
    rate = EPOCHS * NUM_PICTURES / (time.perf_counter() - start)
    print(f"loss {losses[0]:.3f} at the first of {len(losses)} steps, {losses[-1]:.3f} at the last")
    print(f"effective batch {micro_batch} x {accumulation} = {micro_batch * accumulation}, {rate:,.0f} samples/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    train(**vars(parser.parse_args()))
