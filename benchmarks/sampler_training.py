"""Do batches by budget train as well, and how much quicker? A small transformer on text of many lengths.

    python benchmarks/sampler_training.py            minutes: three seeds
    python benchmarks/sampler_training.py --quick    one seed, less text

The text is the docstrings of Python's own library, cut at 512 characters; the model is a transformer on characters.
Fixed counts are steps of 16 random docstrings in a plain loop, as one batch, or two at a time with accumulation, which
bounds memory as ours does. Ours are `TokenBatchSampler` batches of at most 1,024 padded tokens, joined to optimizer
steps by `Accumulator`, with the limit of a step such that there are as many steps. All see every docstring twice from
the same first weights, at the same rate, and take the mean loss over the real tokens of each step. Loss is that of
held-out docstrings per token, at four points of the training. CPU time is of one thread without the evaluations, all in
turn; peak bytes are counted in an epoch of its own. The exit code is 1 where ours is not quicker than both, takes more
memory than one batch, or ends with a loss higher by more than the spread of the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sampler_training_model import Transformer, collate, docstrings, evaluate, loss_of, real_tokens
from torch import nn

import batchwright as bw
from batchwright.device.host import ByteCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Texts = Sequence[torch.Tensor]
    Steps = Iterator[tuple[nn.Module, int, int]]

COUNT, MAX_TOKENS, WASTE = 16, 1_024, 0.05
EPOCHS, RATE, WARM_UP, CLIP = 2, 2e-3, 20, 1.0
LOOKS = 4


# --- the sides: each yields, after every optimizer step, the real and the padded tokens of it


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1.0))


def fixed_count(texts: Texts, seed: int, epochs: int, at_a_time: int = COUNT) -> Steps:
    model, optimizer, scheduler = make(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(texts)).split(COUNT):
            batches = [collate([texts[index] for index in some]) for some in chosen.split(at_a_time)]
            real = sum(map(real_tokens, batches))
            for batch in batches:
                (loss_of(model, batch, "sum") / real).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield model, real, sum(batch["inputs"].numel() for batch in batches)


def budgeted(texts: Texts, seed: int, epochs: int) -> Steps:
    model, optimizer, scheduler = make(seed)
    lengths = [len(text) - 1 for text in texts]
    sampler = as_many_steps(lengths, -(-len(texts) // COUNT), seed)
    accumulator = bw.Accumulator(model, optimizer, accumulation=sampler.windows, clip_norm=CLIP, scheduler=scheduler)
    loader: Any = torch.utils.data.DataLoader(texts, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    for _ in range(epochs):
        real = padded = 0
        for batch in accumulator.micro_batches(loader, weight=real_tokens):
            real, padded = real + real_tokens(batch), padded + batch["inputs"].numel()
            if accumulator.backward(loss_of(model, batch)):
                yield model, real, padded
                real = padded = 0


def as_many_steps(lengths: Sequence[int], steps: int, seed: int) -> bw.TokenBatchSampler:
    """Return the sampler whose limit of a step is the first that gives at most so many steps."""
    for slack in np.arange(1.0, 3.0, 0.05):
        limit = max(sum(lengths) / steps * slack, MAX_TOKENS)
        sampler = bw.TokenBatchSampler(
            lengths, MAX_TOKENS, waste=WASTE, seed=seed, max_tokens_per_step=limit, rank=0, world_size=1
        )
        if len(sampler.windows) <= steps:
            break
    return sampler


PLAIN, OURS = "16 at random", "TokenBatchSampler + Accumulator"
SIDES: dict[str, Callable[[Texts, int, int], Steps]] = {
    PLAIN: fixed_count,
    "the same, 2 at a time": partial(fixed_count, at_a_time=2),
    OURS: budgeted,
}


def train(side: str, texts: Texts, held_out: Texts, seed: int) -> dict[str, Any]:
    """Train, and look at the held-out loss whenever another quarter of all tokens was seen."""
    total = EPOCHS * sum(len(text) - 1 for text in texts)
    steps = SIDES[side](texts, seed, EPOCHS)
    seen = padding = num_steps = 0
    seconds = 0.0
    losses: list[float] = []
    while True:
        begin = time.process_time()
        step = next(steps, None)
        seconds += time.process_time() - begin
        if step is None:
            break
        model, real, padded = step
        seen, padding, num_steps = seen + real, padding + padded - real, num_steps + 1
        if seen >= total * (len(losses) + 1) / LOOKS:
            losses.append(evaluate(model, held_out))
    assert seen == total, "every docstring as often"
    share = padding / (padding + seen)
    return {"losses": losses, "seconds": seconds, "tokens": seen, "steps": num_steps, "padding": share}


def peak_bytes(side: str, texts: Texts) -> int:
    """Count the bytes alive in an epoch."""
    with ByteCounter() as counter:
        for _ in SIDES[side](texts, 0, 1):
            pass
    return int(counter.peak_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = docstrings()[: 400 if options.quick else 1_000]
    texts, held_out = texts[len(texts) // 10 :], texts[: len(texts) // 10]
    lengths = [len(text) - 1 for text in texts]
    weights = sum(weight.numel() for weight in Transformer().parameters())
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {weights:,} weights, {len(texts):,} docstrings")
    print(f"of {min(lengths)} to {max(lengths)} characters, mean {statistics.mean(lengths):.0f}.\n")
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for seed in range(1 if options.quick else 3):
        for side in SIDES:
            runs[side].append(train(side, texts, held_out, seed))
            print(seed, side, runs[side][-1], file=sys.stderr)
    peaks = {side: peak_bytes(side, texts) for side in SIDES}
    shares = [f"loss at {look / LOOKS:.0%}" for look in range(1, LOOKS + 1)]
    titles = [
        *shares,
        "steps",
        "tokens per step",
        "padding %",
        "peak MiB",
        "CPU us per real token",
        "times ours, by seed",
    ]
    print(f"| | {' | '.join(titles)} |\n|---{'|---:' * len(titles)}|")
    ratios = {}
    for side, some in runs.items():
        losses = [f"{statistics.mean(run['losses'][look] for run in some):.3f}" for look in range(LOOKS)]
        steps, padding = (statistics.mean(run[key] for run in some) for key in ("steps", "padding"))
        spent = 1e6 * statistics.median(run["seconds"] / run["tokens"] for run in some)
        ratios[side] = [run["seconds"] / mine["seconds"] for run, mine in zip(some, runs[OURS], strict=True)]
        print(f"| {side} | {' | '.join(losses)} | {steps:.0f} | {some[0]['tokens'] / steps:,.0f} ", end="")
        print(f"| {100 * padding:.1f} | {peaks[side] / 2**20:.1f} | {spent:.1f} ", end="")
        print(f"| {', '.join(f'{ratio:.2f}' for ratio in ratios[side])} |")
    ends = {side: [run["losses"][-1] for run in some] for side, some in runs.items()}
    gaps = [mine - plain for mine, plain in zip(ends[OURS], ends[PLAIN], strict=True)]
    spread = max(*(max(some) - min(some) for some in ends.values()), 0.01)
    print(f"\nFinal loss, ours less {PLAIN}: {', '.join(f'{gap:+.3f}' for gap in gaps)}; spread of seeds {spread:.3f}.")
    if options.json:
        options.json.write_text(json.dumps({"runs": runs, "peak_bytes": peaks}, indent=1) + "\n")
    is_quicker = all(min(some) > 1 for side, some in ratios.items() if side != OURS)
    ok = is_quicker and peaks[OURS] < peaks[PLAIN] and statistics.mean(gaps) <= spread
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
