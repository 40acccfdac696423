"""How good and how quick are batches by length? `TokenBatchSampler` and `pack`, with the peers in the same run.

    python benchmarks/sampler.py            about half an hour: 200 thousand, 1 and 10 million samples
    python benchmarks/sampler.py --quick    minutes: who takes over a second for 200 thousand is timed there only

Lengths are lognormal(ln 180, 0.9), rounded and clipped to [8, 4096]; the budget is 16,384 padded tokens; 8 ranks. Waste
is the padding over all tokens of the batches, fill what a batch is padded to over the budget, idle the share that ranks
wait if the eight batches of a step run together and time goes as padded tokens, pair-repeat the chance that two samples
of one batch share one in the next epoch; all counted from the batches, and `stats()` must tell the same.

Times are CPU seconds of one thread, all in turn, the median of several rounds. "first" is construction and the first
epoch, "epoch" a further one. Who takes over five seconds has one round of the first alone, and who takes over a minute
for 1 million is not run at 10 million. The exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sampler_peers import BUDGET, FAIRSEQ, PACKAGES, RANKS, Peer, peers, trl_packing

import batchwright as bw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from batchwright.sampler.epoch_plan import SamplerStats

    Numbers = npt.NDArray[np.int64]
    Times = dict[int, dict[str, dict[str, float]]]

OURS = "batchwright TokenBatchSampler"
DRAWN = "the same, one rank, every batch drawn as a list"
SIZES = (200_000, 1_000_000, 10_000_000)
ROUNDS = {200_000: 7, 1_000_000: 7, 10_000_000: 3}
SLOW_SECONDS, TOO_SLOW_SECONDS, QUICK_SECONDS = 5.0, 60.0, 1.0
ROW = 4_096  # tokens of a packed row
MOST_WASTE, MOST_REPEAT, MOST_IDLE = 0.015, 0.04, 0.02


def make_lengths(number: int) -> Numbers:
    drawn = np.random.default_rng(0).lognormal(np.log(180), 0.9, number)
    return np.clip(np.rint(drawn), 8, 4096).astype(np.int64)


# --- ours


def ours(ranks: int, *, drawn: bool) -> Peer:
    def start(lengths: Numbers) -> bw.TokenBatchSampler:
        return bw.TokenBatchSampler(lengths, BUDGET, rank=0, world_size=ranks)

    def plan(sampler: bw.TokenBatchSampler, epoch: int) -> Any:
        sampler.set_epoch(epoch)
        return list(sampler) if drawn else sampler.planned

    def batches(sampler: bw.TokenBatchSampler, epoch: int) -> Iterable[list[int]]:
        sampler.set_epoch(epoch)
        planned = sampler.planned
        return (planned.batch(index, rank) for index in range(planned.rounds.number) for rank in range(ranks))

    return Peer(lambda lengths: lengths, start, plan, batches)


# --- quality


def quality(lengths: Numbers, epochs: Sequence[Iterable[Sequence[int]]]) -> dict[str, Any]:
    """Count what two epochs of batches are like."""
    first, second = ([np.asarray(batch, np.int64) for batch in epoch] for epoch in epochs)
    sizes = np.array([len(batch) for batch in first])
    flat = np.concatenate(first)
    padded = sizes * np.maximum.reduceat(lengths[flat], np.append(0, np.cumsum(sizes)[:-1]))
    whole = padded[: len(padded) // RANKS * RANKS].reshape(-1, RANKS)
    batch_of = np.full(len(lengths), -1)
    for number, batch in enumerate(second):
        batch_of[batch] = number
    again = 0
    for batch in first:
        together = np.unique(batch_of[batch], return_counts=True)[1]
        again += int((together * (together - 1)).sum())
    return {
        "batches": len(first),
        "waste": 1 - float(lengths[flat].sum() / padded.sum()),
        "fill": float(padded.mean()) / BUDGET,
        "largest": int(padded.max()),
        "idle": 1 - float(whole.sum() / (whole.max(axis=1).sum() * RANKS)),
        "pair_repeat": again / int((sizes * (sizes - 1)).sum()),
        "each_once": bool(len(flat) == len(lengths) == len(np.unique(flat))),
    }


# --- time


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    gc.collect()
    begin = time.process_time()
    result = work(*arguments)
    return time.process_time() - begin, result


def times_of(every: dict[str, Peer], number: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median times of all in turn."""
    lengths = make_lengths(number)
    seconds: dict[str, dict[str, list[float]]] = {name: {"first": [], "epoch": []} for name in every}
    for index in range(rounds):
        for name, peer in every.items():
            of = seconds[name]
            if index and of["first"][0] > SLOW_SECONDS:
                continue
            given = peer.given(lengths)
            begin, state = timed(peer.start, given)
            of["first"].append(begin + timed(peer.plan, state, 0)[0])
            if of["first"][0] <= SLOW_SECONDS:
                of["epoch"].append(timed(peer.plan, state, 1)[0])
            del given, state
            print(f"{number:,}, round {index + 1} of {rounds}, {name}: {of['first'][-1]:.3g} s", file=sys.stderr)
    return {name: {what: statistics.median(some) for what, some in of.items() if some} for name, of in seconds.items()}


def packing_rows(folder: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    prepare = trl_packing(folder)
    rows = []
    for number in sizes:
        lengths = make_lengths(number)
        seconds, packed = timed(bw.pack, lengths, ROW)
        found = [("batchwright pack", seconds, len(packed))]
        for name, chunk in (("TRL _pack_bfd, all at once", None), ("TRL _pack_bfd, chunks of 1,000", 1_000)):
            seconds, counts = timed(prepare(lengths, ROW, chunk))
            assert counts.sum() == number, "TRL lost samples"
            found.append((name, seconds, len(counts)))
        for name, spent, num_rows in found:
            waste = 1 - float(lengths.sum()) / (num_rows * ROW)
            told = {"who": name, "samples": number, "rows": num_rows, "waste": waste, "seconds": spent}
            rows.append({**told, "ratio": spent / found[0][1]})
    return rows


# --- the tables


def print_quality(rows: dict[str, dict[str, Any]], number: int) -> None:
    print(f"\nQuality, {number:,} samples.\n")
    print("| | batches | waste % | fill % | largest, padded | idle % | pair-repeat % | each sample once |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name, row in rows.items():
        shares = [f"{100 * row[key]:.2f}" for key in ("waste", "fill", "idle", "pair_repeat")]
        largest = f"{row['largest']:,}" + (" (over)" if row["largest"] > BUDGET else "")
        cells = [name, f"{row['batches']:,}", *shares[:2], largest, *shares[2:], "yes" if row["each_once"] else "no"]
        print(f"| {' | '.join(cells)} |")


def print_times(times: Times) -> None:
    for what in ("first", "epoch"):
        print(f"\nCPU seconds, {what} (times ours).\n")
        print("| | " + " | ".join(f"{number:,}" for number in SIZES) + " | growth, 1 to 10 million |")
        print("|---" + "|---:" * (len(SIZES) + 1) + "|")
        for name in times[SIZES[0]]:
            seconds = [times[number].get(name, {}).get(what) for number in SIZES]
            mine = [times[number][OURS][what] for number in SIZES]
            cells = [f"{s:.3g} ({s / of:.2f})" if s else "not run" for s, of in zip(seconds, mine, strict=True)]
            growth = f"{seconds[2] / seconds[1]:.1f}" if seconds[1] and seconds[2] else ""
            print(f"| {name} | {' | '.join(cells)} | {growth} |")


def print_packing(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\nPacking into rows of {ROW:,}.\n\n| | samples | rows | waste % | CPU s (times ours) |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {row['who']} | {row['samples']:,} | {row['rows']:,} | {100 * row['waste']:.2f} ", end="")
        print(f"| {row['seconds']:.3g} ({row['ratio']:.1f}) |")


def misses(mine: dict[str, Any], times: Times, stats: SamplerStats) -> list[str]:
    bars = {"waste": MOST_WASTE, "pair_repeat": MOST_REPEAT, "idle": MOST_IDLE}
    found = [f"{key} {100 * mine[key]:.2f} % is above {100 * bar:g} %" for key, bar in bars.items() if mine[key] > bar]
    if mine["largest"] > BUDGET or not mine["each_once"]:
        found.append("a batch is over the budget, or a sample does not come once")
    told = {"waste": stats.waste, "pair_repeat": stats.pair_repeat, "idle": stats.rank_idle}
    differ = [key for key in told if abs(told[key] - mine[key]) > 1e-9]
    found += [f"stats() tells {key} {told[key]:.6f}, counted {mine[key]:.6f}" for key in differ]
    for number in SIZES[1:]:
        for what in ("first", "epoch"):
            quickest = times[number][OURS][what]
            found += [
                f"{name} plans {number:,} ({what}) in {of[what] / quickest:.2f} of our time"
                for name, of in times[number].items()
                if name not in (OURS, DRAWN) and of.get(what, math.inf) <= quickest
            ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=Path, default=Path(tempfile.gettempdir(), "batchwright-sampler-peers"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    others, missing = peers(options.peers)
    ready = [f"{name} {version(name)}" for name in ("numpy", "torch", "transformers")]
    print(", ".join([*ready, *PACKAGES, FAIRSEQ]).replace("==", " "))
    for name, reason in missing.items():
        print(f"Not to be had: {name}: {reason}")
    every = {OURS: ours(RANKS, drawn=False), DRAWN: ours(1, drawn=True), **others}
    small = make_lengths(SIZES[0])
    rows = {}
    for name, peer in every.items():
        if name != DRAWN:
            state = peer.start(peer.given(small))
            rows[name] = quality(small, [list(peer.batches(state, 0)), list(peer.batches(state, 1))])
    print_quality(rows, SIZES[0])
    times: Times = {}
    chosen = every
    for number in SIZES:
        times[number] = times_of(chosen, number, ROUNDS[number])
        limit = TOO_SLOW_SECONDS if not options.quick else QUICK_SECONDS if number == SIZES[0] else math.inf
        chosen = {name: peer for name, peer in chosen.items() if times[number][name]["first"] <= limit}
    print_times(times)
    bound = 10 * math.log(SIZES[2]) / math.log(SIZES[1])
    print(f"\nn log n from 1 to 10 million: {bound:.1f}.")
    packing = packing_rows(options.peers, SIZES[: 1 if options.quick else 2])
    print_packing(packing)
    failures = misses(rows[OURS], times, bw.TokenBatchSampler(small, BUDGET, rank=0, world_size=RANKS).stats())
    growth = {what: times[SIZES[2]][OURS][what] / times[SIZES[1]][OURS][what] for what in ("first", "epoch")}
    failures += [f"{what} grows {ratio:.1f}-fold, above {bound:.1f}" for what, ratio in growth.items() if ratio > bound]
    if options.json:
        told = {"quality": rows, "times": times, "packing": packing, "missing": missing, "failures": failures}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    print("\n" + ("\n".join(failures) if failures else "Every bar is met."))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
