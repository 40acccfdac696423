"""What shuffling costs where samples are few: padding, batches and pairs that meet again, by the number of windows.

    python benchmarks/sampler_mixing.py     under a minute

Lengths are lognormal(ln 180, 0.9), clipped to [8, 4096]; the budget is 16,384 padded tokens; one rank. Pair-repeat is
the chance that two samples of one batch share one in the next epoch. "default" is what the sampler chooses by itself.
"""

from __future__ import annotations

import numpy as np

import batchwright as bw


def describe(number: int, waste: float | None) -> str:
    """Return one row of the table."""
    drawn = np.random.default_rng(1).lognormal(np.log(180), 0.9, number)
    lengths = np.clip(drawn, 8, 4096).astype(np.int64)
    stats = bw.TokenBatchSampler(lengths, 16_384, rank=0, world_size=1, waste=waste).stats()
    named = "default" if waste is None else f"{waste:.3f}"
    shares = f"{stats.waste:.1%} | {stats.pair_repeat:.1%}"
    return f"| {number:,} | {named} | {stats.num_windows} | {stats.batches:,} | {shares} |"


def main() -> None:
    """Print the table, and what equal lengths need."""
    print("| samples | waste | windows | batches | padding | pair-repeat |\n|---:|---:|---:|---:|---:|---:|")
    for number in (1_000, 4_000, 20_000, 50_000, 200_000):
        for waste in (0.015, None, 0.05, 0.1):
            print(describe(number, waste))
    equal = bw.TokenBatchSampler([16] * 40_960, 16_384, rank=0, world_size=1).stats()
    print(f"\n40,960 samples of 16 tokens: {equal.batches} batches (40 hold them), pair-repeat {equal.pair_repeat:.1%}")


if __name__ == "__main__":
    main()
