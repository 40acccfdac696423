"""A Lightning module: a small net learns how a wave goes on.

Tune it, then train with the answer (here from one machine):

batchwright tune examples/lightning_module.py:workload --memory 1GiB --limit 128
python examples/lightning_module.py --micro-batch 128 --accumulation 2 --learning-rate 0.00513

All that was added for batchwright is `workload`, and a callback that watches the batch during the training.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from batchwright.integrations.lightning import BatchwrightCallback

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_WAVES, LENGTH, WIDTH, EPOCHS = 2048, 32, 64, 2
# Suits an effective batch of 64, the default of --noise-batch.
LEARNING_RATE = 3e-3

Batch = tuple[torch.Tensor, torch.Tensor]


def waves() -> TensorDataset:
    """Sines of some frequency and phase: what was heard, with noise, and the value that comes next."""
    generator = torch.Generator().manual_seed(0)
    frequency, phase = torch.rand(2, NUM_WAVES, 1, generator=generator)
    clean = torch.sin((0.2 + frequency) * torch.arange(LENGTH + 1) + 6 * phase)
    heard = clean[:, :-1] + torch.randn(NUM_WAVES, LENGTH, generator=generator) / 4
    return TensorDataset(heard, clean[:, -1])


def make_optimizer(parameters: Iterable[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=learning_rate)


class Forecast(lightning.LightningModule):
    """What was heard in, the next value out."""

    def __init__(self, learning_rate: float = LEARNING_RATE) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.losses: list[float] = []

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean squared error; apart from the training step, which logs, and for that needs a Trainer."""
        heard, following = batch
        return nn.functional.mse_loss(self.layers(heard).squeeze(-1), following)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return make_optimizer(self.parameters(), self.learning_rate)


def workload() -> bw.Workload:
    """What batchwright is pointed at: module, data, loss and optimizer of this script."""
    return bw.Workload(model=Forecast, data=waves(), loss=Forecast.loss, optimizer=make_optimizer)


def train(micro_batch: int, accumulation: int, learning_rate: float) -> None:
    """Train, and tell how it went."""
    lightning.seed_everything(0, verbose=False)
    module, callback = Forecast(learning_rate), BatchwrightCallback()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulation,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
    )
    start = time.perf_counter()
    trainer.fit(module, DataLoader(waves(), batch_size=micro_batch, shuffle=True))
    rate = EPOCHS * NUM_WAVES / (time.perf_counter() - start)
    losses = module.losses
    print(f"loss {losses[0]:.3f} at the beginning, {losses[-1]:.3f} at the end of {trainer.global_step} steps")
    print(f"effective batch {micro_batch} x {accumulation} = {micro_batch * accumulation}, {rate:,.0f} samples/s")
    print(f"critical batch {callback.critical_batch}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    train(**vars(parser.parse_args()))
