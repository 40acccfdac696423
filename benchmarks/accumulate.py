"""What `Accumulator` costs beside a loop written by hand: time, memory, collectives; and what `precise=True` brings.

    python benchmarks/accumulate.py                 minutes
    python benchmarks/accumulate.py --json FILE     the same, kept

Time is CPU time of this process on one thread. Both loops train one and the same model on the same batches, a window
of four micro-batches each, by turns; a row is the median over pairs of windows, with the interval that holds it at 95 %
(order statistics, no distribution assumed). The hand-written loop against itself shows what the machine alone does: on
a busy one a percent of a real step is lost in it, so the cost is measured again where a window is nearly only its
loop. It does not depend on the model, but on the number of its weights. Memory is the bytes of tensors alive at the
peak of a window.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accumulate_loops import ACCUMULATION, OURS, Bare, by_hand, count_tokens, make, read_ahead, token_loss
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.device.host import ByteCounter

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_UP, PAIRS, BARE_PAIRS = 8, 300, 3000
LEAST_SECONDS = 0.05
BF16_MICRO_BATCHES = 64
RANKS = 2


# --- what is measured


def seconds_of(window: Callable[[], None]) -> float:
    start = time.process_time()
    window()
    return time.process_time() - start


def by_turns(mine: Callable[[], None], theirs: Callable[[], None], pairs: int) -> list[tuple[float, float]]:
    """Time both by turns, and change who begins: a machine that slows down meanwhile slows both."""
    for _ in range(WARM_UP):
        theirs()
        mine()
    taken = []
    for index in range(pairs):
        if index % 2:
            ours, by_hand_then = seconds_of(mine), seconds_of(theirs)
        else:
            by_hand_then, ours = seconds_of(theirs), seconds_of(mine)
        taken.append((ours, by_hand_then))
    return taken


def time_ratio(ours: Callable[..., Any], clip_norm: float | None, pairs: int) -> dict[str, Any]:
    # One model for both: where a second one lies in memory made up to 2 % of difference, between like loops too.
    model, optimizer = make()
    theirs, mine = by_hand(model, optimizer, clip_norm), ours(model, optimizer, clip_norm)
    taken = by_turns(mine, theirs, pairs)
    step = statistics.median(b for _, b in taken)
    assert step >= LEAST_SECONDS, f"a step of {step * 1e3:.0f} ms is too short to say anything"
    median, low, high = with_interval([a / b - 1 for a, b in taken])
    return {"step_ms": step * 1e3, "overhead": median, "interval": [low, high], "pairs": pairs}


def with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and the values between which it lies with 95 %: those of rank n/2 +- 0.98 sqrt(n)."""
    ranked, number = sorted(values), len(values)
    reach = 0.98 * math.sqrt(number)
    low, high = max(0, math.floor(number / 2 - reach)), min(number - 1, math.ceil(number / 2 + reach))
    return statistics.median(ranked), ranked[low], ranked[high]


def bare_extra(ours: Callable[..., Any], clip_norm: float | None) -> dict[str, Any]:
    """Return what a window costs more than by hand, in microseconds, where a window is nearly only its loop."""
    model = Bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    theirs, mine = by_hand(model, optimizer, clip_norm), ours(model, optimizer, clip_norm)
    taken = by_turns(mine, theirs, BARE_PAIRS)
    median, low, high = with_interval([(a - b) * 1e6 for a, b in taken])
    return {"extra_us": median, "interval": [low, high], "of_50_ms": median / 1e6 / LEAST_SECONDS}


def peak_bytes(loop: Callable[..., Any], clip_norm: float | None) -> dict[str, int]:
    model, optimizer = make()
    window = loop(model, optimizer, clip_norm)
    for _ in range(WARM_UP):
        window()
    with ByteCounter() as counter:
        counter.count(model.parameters())
        counter.count(value for state in optimizer.state.values() for value in state.values())
        held = counter.alive_bytes
        window()
    return {"peak": counter.peak_bytes, "beyond": counter.peak_bytes - held}


def bf16_errors() -> dict[str, float]:
    """Return how far 64 micro-batches are from their sum in fp64, in a bf16 buffer and with `precise=True`."""
    found = {}
    for name, precise in (("bf16 buffer", False), ("precise", True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)).to(torch.bfloat16)
        weights = list(model.parameters())
        optimizer = torch.optim.SGD(weights, lr=0.0)
        got: list[torch.Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_, weights=weights, got=got: got.extend(w.grad.double() for w in weights)
        )
        accumulator = Accumulator(model, optimizer, BF16_MICRO_BATCHES, precise=precise)
        lengths = [3 + index % 13 for index in range(BF16_MICRO_BATCHES)]
        batches = [torch.randint(0, 64, (2, length)) for length in lengths]
        total = sum(map(count_tokens, batches))
        exact = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
        for batch in accumulator.micro_batches(batches, count_tokens):
            loss = token_loss(model(batch[:, :-1]), batch)
            for value, gradient in zip(exact, torch.autograd.grad(loss, weights, retain_graph=True), strict=True):
                value += gradient.double() * (count_tokens(batch) / total)
            accumulator.backward(loss)
        difference = sum(float((a - b).square().sum()) for a, b in zip(got, exact, strict=True))
        found[name] = (difference / sum(float(value.square().sum()) for value in exact)) ** 0.5
    return found


# --- two ranks


def count_collectives(path: str) -> None:
    """One rank: train three windows under DDP and write down how many collectives each took."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    counts = {"all_reduce": 0, "all_gather": 0}
    for name in counts:
        call = getattr(dist, name)

        def counted(*args: Any, name: str = name, call: Any = call, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        setattr(dist, name, counted)
    model, _ = make()
    # One bucket, so that a synchronisation is one collective; the hook averages as DDP does, where it can be counted.
    spread = DistributedDataParallel(model, bucket_cap_mb=1024)
    spread.register_comm_hook(None, allreduce_hook)
    window = read_ahead(spread, torch.optim.AdamW(spread.parameters(), lr=1e-4), 1.0)
    rows = []
    for _ in range(3):
        counts.update(all_reduce=0, all_gather=0)
        window()
        rows.append(dict(counts))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)


def collectives() -> list[dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "rows"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([*command, __file__, "--rank", path], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows: list[dict[str, int]] = json.loads(Path(path).read_text())
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        count_collectives(options.rank)
    told: dict[str, Any] = {"torch": torch.__version__, "overhead": [], "bare": [], "memory": []}
    print(f"torch {torch.__version__}, windows of {ACCUMULATION} micro-batches, one thread\n")
    print("| loop | clip | hand-written step, ms | overhead | 95 % interval | pairs |\n|---|---|---|---|---|---|")
    for name, ours in {"by hand, against itself": by_hand, **OURS}.items():
        for clip_norm in (None, 1.0):
            row = time_ratio(ours, clip_norm, options.pairs)
            told["overhead"].append({"loop": name, "clip_norm": clip_norm, **row})
            low, high = row["interval"]
            shown = f"{row['step_ms']:.0f} | {row['overhead']:+.2%} | {low:+.2%} .. {high:+.2%} | {row['pairs']}"
            print(f"| {name} | {clip_norm or '-'} | {shown} |", flush=True)
    print("\n| loop, next to nothing in it | clip | more than by hand, us | 95 % interval | of a step of 50 ms |")
    print("|---|---|---|---|---|")
    for name, ours in {"by hand, against itself": by_hand, **OURS}.items():
        for clip_norm in (None, 1.0):
            row = bare_extra(ours, clip_norm)
            told["bare"].append({"loop": name, "clip_norm": clip_norm, **row})
            low, high = row["interval"]
            shown = f"{row['extra_us']:.0f} | {low:.0f} .. {high:.0f} | {row['of_50_ms']:.2%}"
            print(f"| {name} | {clip_norm or '-'} | {shown} |", flush=True)
    print("\n| loop | clip | peak, bytes | beyond weights and optimizer | more than by hand |\n|---|---|---|---|---|")
    for clip_norm in (None, 1.0):
        base = peak_bytes(by_hand, clip_norm)
        for name, loop in {"by hand": by_hand, **OURS}.items():
            row = peak_bytes(loop, clip_norm)
            more = row["peak"] - base["peak"]
            told["memory"].append({"loop": name, "clip_norm": clip_norm, **row, "more": more})
            print(f"| {name} | {clip_norm or '-'} | {row['peak']:,} | {row['beyond']:,} | {more:,} |", flush=True)
    told["bf16"] = bf16_errors()
    print(f"\n{BF16_MICRO_BATCHES} micro-batches in bf16, error of the sum:", end=" ")
    print(", ".join(f"{name} {error:.2e}" for name, error in told["bf16"].items()))
    told["collectives"] = collectives()
    print(f"\n{RANKS} ranks, DDP, collectives of each step after the first: {told['collectives'][1:]}")
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
