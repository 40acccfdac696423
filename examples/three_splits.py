"""One batch of 32, split in three ways: 32 at once, 4 times 8, 8 times 4. The losses agree, the memory does not.

python examples/three_splits.py
"""

from __future__ import annotations

import time

import torch
from char_gpt import CharGPT, Windows, loss, topics, workload

import batchwright as bw

SPLITS = ((32, 1), (8, 4), (4, 8))
STEPS = 60


def train(data: Windows, micro_batch: int, accumulation: int, steps: int = STEPS) -> list[float]:
    """Train from the same weights on the same samples; return the loss of every optimizer step."""
    torch.manual_seed(0)
    model = CharGPT(data.num_letters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[: 32 * steps]
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(data, order.tolist()), batch_size=micro_batch)
    accumulator = bw.Accumulator(model, optimizer, accumulation, clip_norm=1.0)
    losses = []
    for micro in accumulator.micro_batches(loader):
        step = accumulator.backward(loss(model, micro))
        if step:
            losses.append(step.loss)
    return losses


def main() -> None:
    """Train the three, and print them side by side."""
    data = Windows(topics())
    rows = []
    for micro_batch, accumulation in SPLITS:
        predicted = bw.estimate(workload(), micro_batch=micro_batch, accumulation=accumulation).peak_bytes.allocated
        start = time.perf_counter()
        losses = train(data, micro_batch, accumulation)
        rows.append((micro_batch, accumulation, losses, predicted or 0, time.perf_counter() - start))
    shown = sorted({1, *range(STEPS // 4, STEPS + 1, STEPS // 4)})
    print("loss after step " + "".join(f"{step:>9}" for step in shown) + "   peak memory   seconds")
    for micro_batch, accumulation, losses, predicted, seconds in rows:
        shown_losses = "".join(f"{losses[step - 1]:9.5f}" for step in shown)
        print(f"{micro_batch:>4} x {accumulation:<8} {shown_losses}{predicted / 2**20:10.1f} MiB{seconds:10.1f}")
    first = rows[0][2]
    off = max(abs(a - b) / b for _, _, losses, *_ in rows[1:] for a, b in zip(losses, first, strict=True))
    print(
        f"\nthe losses of all {STEPS} steps agree to {off:.1e} of their value: fp32 sums in another order, and no more."
    )
    print("peak memory is predicted, the rest measured.")


if __name__ == "__main__":
    main()
