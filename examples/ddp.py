"""Two processes or more under torchrun, with DDP: a small net learns the next character of lines that differ in length.

Tune it, then train with the answer (here from one machine):

torchrun --nproc-per-node 2 -m batchwright tune examples/ddp.py:workload --memory 1GiB --limit 64
torchrun --nproc-per-node 2 examples/ddp.py --micro-batch 15 --accumulation 1 --learning-rate 0.00233

All that was added for batchwright is `workload`, and an Accumulator where `backward()` and `optimizer.step()` stood:
it synchronises ranks once per optimizer step, and takes the mean over the characters of all of them.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import batchwright as bw

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_LINES, CONTEXT, WIDTH, EPOCHS, IGNORED = 2048, 8, 32, 2, -100
# Suits an effective batch of 64, the default of --noise-batch.
LEARNING_RATE = 3e-3

Batch = dict[str, torch.Tensor]


class Lines(Dataset[torch.Tensor]):
    """The lines of Python's own help on its topics, as bytes."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        lines = [line for name in sorted(topics) for line in topics[name].splitlines() if len(line) > 1]
        self.codes = [torch.tensor(list(line.encode())) for line in lines[:NUM_LINES]]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.codes[index]


def padded(rows: list[torch.Tensor]) -> Batch:
    """Make a batch: the shorter lines are filled up, and the loss ignores that."""
    pad = nn.utils.rnn.pad_sequence
    before = [nn.functional.pad(row[:-1], (CONTEXT - 1, 0)) for row in rows]
    return {"before": pad(before, True), "after": pad([row[1:] for row in rows], True, padding_value=IGNORED)}


def count_characters(batch: Batch) -> int:
    """Count what the loss is a mean over."""
    return int((batch["after"] != IGNORED).sum())


class NextCharacter(nn.Module):
    """The last few characters in, logits of the next one out, at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 256))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.layers(self.letters(codes.unfold(1, CONTEXT, 1)).flatten(2))
        return logits


def make_optimizer(parameters: Iterable[nn.Parameter], learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=learning_rate)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy of the next character, the mean over all of them."""
    logits: torch.Tensor = model(batch["before"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["after"].flatten(), ignore_index=IGNORED)


def train_on(accumulator: bw.Accumulator, micro_batches: Iterable[Batch]) -> list[float]:
    """Train on micro-batches, and return the loss of every step: the mean over the characters of all ranks."""
    losses = []
    for micro in accumulator.micro_batches(micro_batches, weight=count_characters):
        step = accumulator.backward(loss(accumulator.model, micro))
        if step:
            losses.append(step.loss)
    return losses


def workload() -> bw.Workload:
    """What batchwright is pointed at: the parts of this script, how ranks wrap the model, and the loop to audit."""
    return bw.Workload(
        model=NextCharacter,
        data=Lines(),
        collate=padded,
        loss=loss,
        optimizer=make_optimizer,
        units=count_characters,
        wrap=DistributedDataParallel,
        window=lambda model, optimizer, parts: train_on(bw.Accumulator(model, optimizer, len(parts)), parts),
    )


def train(micro_batch: int, accumulation: int, learning_rate: float) -> None:
    """Train on every rank, and tell from the first how it went."""
    dist.init_process_group("gloo")  # with GPUs: nccl, and model and batches on the device of LOCAL_RANK
    torch.manual_seed(0)
    data, ranks = Lines(), dist.get_world_size()
    model = DistributedDataParallel(NextCharacter())
    optimizer = make_optimizer(model.parameters(), learning_rate)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=micro_batch, sampler=sampler, collate_fn=padded)
    accumulator = bw.Accumulator(model, optimizer, accumulation=accumulation)
    losses: list[float] = []
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses += train_on(accumulator, loader)
    if dist.get_rank() == 0:
        rate = EPOCHS * len(data) / (time.perf_counter() - start)
        effective = micro_batch * accumulation * ranks
        print(f"loss {losses[0]:.3f} at the first of {len(losses)} steps, {losses[-1]:.3f} at the last")
        print(f"effective batch {micro_batch} x {accumulation} x {ranks} = {effective}, {rate:,.0f} samples/s")
    # Gloo's threads abort a process, now and then, in which a model outlives its group until Python ends.
    del accumulator, model, optimizer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    train(**vars(parser.parse_args()))
