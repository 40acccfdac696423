"""Is the accumulated gradient that of the big batch? `Accumulator`, and the peers on the same samples.

    python benchmarks/exactness.py            minutes: five heads of transformers, 1, 2 and 4 gloo ranks
    python benchmarks/exactness.py --quick    two heads, 1 and 2 ranks

Each rank has eight samples of lengths from 3 to 30, cut as 4x2 (micro-batch x accumulation), 2x4, 1x8, 3+3+2 and 1+7,
each rank beginning its cut at another place; and, for the tail, micro-batches of two in windows of four, of which the
second window has one on rank 0 and none elsewhere. The reference is plain autograd on all samples of a window in one
batch, in the same type. An error is the norm of the difference over the norm of the reference, all weights together; a
cell is the worst over cuts and windows. The exit code is 1 where ours is above its bound, or where a peer fails
nowhere: then the benchmark could not tell.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from exactness_models import (
    BLOCKS,
    CASES,
    big_batch_gradient,
    collate,
    loss_of,
    make_model,
    make_samples,
    relative_error,
)
from exactness_peers import PEERS, quietly
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from batchwright.accumulate.accumulator import Accumulator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exactness_models import Case
    from torch import nn

SAMPLES = 8
CUTS = {"4x2": [4, 4], "2x4": [2] * 4, "1x8": [1] * 8, "3+3+2": [3, 3, 2], "1+7": [1, 7]}
TAIL = "tail"
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
BOUNDS = {"fp32": 1e-6, "fp64": 1e-12}
QUICK_CASES, QUICK_CUTS = 2, ("2x4", "1+7", TAIL)
# The peers get these: eight samples, then ten, of which the last two are a window of their own.
PEER_MICRO_BATCH, PEER_ACCUMULATION = 2, 4
PEER_FAILS = 1e-3


# --- ours


def sizes_of(cut: str, rank: int) -> list[int]:
    """Return the micro-batches of a rank."""
    if cut == TAIL:
        return [2] * (5 if rank == 0 else 4)
    sizes = CUTS[cut]
    start = rank % len(sizes)
    return [*sizes[start:], *sizes[:start]]


def windows_of(samples: Sequence[Any], cut: str, ranks: int) -> tuple[list[list[list[Any]]], list[list[Any]]]:
    """Return the micro-batches of each rank, as samples, and all samples of each window."""
    accumulation = 4 if cut == TAIL else len(CUTS[cut])
    rest = iter(samples)
    per_rank = [[[next(rest) for _ in range(size)] for size in sizes_of(cut, rank)] for rank in range(ranks)]
    longest = max(map(len, per_rank))
    windows = []
    for start in range(0, longest, accumulation):
        micros = [micro for micro_batches in per_rank for micro in micro_batches[start : start + accumulation]]
        windows.append([sample for micro in micros for sample in micro])
    return per_rank, windows


def spread(model: nn.Module, kind: str) -> nn.Module:
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP2":
        for module in model.modules():
            if type(module).__name__ in BLOCKS:
                fully_shard(module)
        fully_shard(model)
    return model


def errors_of(case: Case, dtype: torch.dtype, kind: str, cut: str) -> list[float]:
    """Train an epoch at rate 0; return the error of each window."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    samples = make_samples(case, SAMPLES * ranks + (2 if cut == TAIL else 0))
    per_rank, windows = windows_of(samples, cut, ranks)
    twin = make_model(case, dtype)
    references = [big_batch_gradient(twin, window) for window in windows]
    model = spread(make_model(case, dtype), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[list[torch.Tensor]] = []

    def see(*_: Any) -> None:
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in model.parameters()]
        seen.append([g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in gradients])

    optimizer.register_step_pre_hook(see)
    accumulator = Accumulator(model, optimizer, 4 if cut == TAIL else len(CUTS[cut]))
    batches = [collate(micro) for micro in per_rank[rank]]
    for batch in accumulator.micro_batches(batches, case.count):
        accumulator.backward(loss_of(model, batch))
    return [relative_error(gradient, reference) for gradient, reference in zip(seen, references, strict=True)]


def measure(cases: Sequence[Case], cuts: Sequence[str]) -> list[dict[str, Any]]:
    kinds = ["DDP", "FSDP2"] if dist.is_initialized() else ["one process"]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return [
        {
            "model": case.name,
            "dtype": name,
            "kind": kind,
            "ranks": ranks,
            "cut": cut,
            "errors": errors_of(case, dtype, kind, cut),
        }
        for case in cases
        for name, dtype in DTYPES.items()
        for kind in kinds
        for cut in cuts
    ]


def work(path: str, cases: Sequence[Case], cuts: Sequence[str]) -> None:
    """One rank under torchrun."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rows = measure(cases, cuts)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(rows))
    dist.barrier()
    # A plain end now and then hangs in gloo's threads.
    os._exit(0)


def launched(ranks: int, *, quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "rows"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        arguments = [str(Path(__file__).resolve()), "--rank", path, *(["--quick"] if quick else [])]
        subprocess.run([*command, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows: list[dict[str, Any]] = json.loads(Path(path).read_text())
        return rows


def has_narrow_loss(case: Case) -> bool:
    """Whether a head computes its loss in fp32 though its weights are fp64."""
    batch = collate(make_samples(case, 2))
    return loss_of(make_model(case, torch.float64), batch).dtype == torch.float32


# --- the peers


def peer_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        samples = make_samples(case, SAMPLES + 2)
        twin = make_model(case, torch.float32)
        references = [big_batch_gradient(twin, window) for window in (samples[:SAMPLES], samples[SAMPLES:])]
        for name, peer in PEERS.items():
            model = make_model(case, torch.float32)
            seen = quietly(peer, model, samples, PEER_MICRO_BATCH, PEER_ACCUMULATION).seen
            pairs = list(zip(seen, references, strict=True))
            errors = [relative_error(gradient, reference) for gradient, reference in pairs]
            ratios = [_norm(gradient) / _norm(reference) for gradient, reference in pairs]
            rows.append({"model": case.name, "peer": name, "errors": errors, "ratios": ratios})
    return rows


def _norm(gradient: Sequence[torch.Tensor]) -> float:
    return float(sum(float(value.double().square().sum()) for value in gradient) ** 0.5)


# --- the tables


def print_ours(rows: Sequence[dict[str, Any]], narrow: Sequence[str]) -> list[str]:
    """Print the worst error of each model and setting; return what is above its bound."""
    settings = sorted({(row["dtype"], row["ranks"], row["kind"]) for row in rows})
    titles = [f"{dtype} {kind}" + (f" x{ranks}" if ranks > 1 else "") for dtype, ranks, kind in settings]
    print("| model | " + " | ".join(titles) + " |\n" + "|---" * (len(titles) + 1) + "|")
    failures = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for dtype, ranks, kind in settings:
            here = [r for r in rows if (r["model"], r["dtype"], r["ranks"], r["kind"]) == (model, dtype, ranks, kind)]
            worst = max(error for row in here for error in row["errors"])
            bound = BOUNDS["fp32" if model in narrow else dtype]
            if not worst <= bound:
                failures.append(f"{model}, {dtype}, {kind} x{ranks}: {worst:.1e} is above {bound:.0e}")
            cells.append(f"{worst:.1e}")
        print(f"| {model} | " + " | ".join(cells) + " |")
    if narrow:
        print(f"\nLoss in fp32 even where the weights are fp64, so bound by {BOUNDS['fp32']:.0e}: {', '.join(narrow)}.")
    return failures


def print_peers(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Print error and ratio of norms of each peer; return those that never fail."""
    print(f"\nPeers, fp32, one process, {PEER_MICRO_BATCH}x{PEER_ACCUMULATION}: error (ratio of norms).\n")
    print("| model | peer | full window | tail of one micro-batch |\n|---|---|---|---|")
    for row in rows:
        cells = [f"{error:.1e} ({ratio:.3f})" for error, ratio in zip(row["errors"], row["ratios"], strict=True)]
        print(f"| {row['model']} | {row['peer']} | " + " | ".join(cells) + " |")
    worst = {peer: max(max(row["errors"]) for row in rows if row["peer"] == peer) for peer in PEERS}
    return [f"{peer} failed nowhere" for peer, error in worst.items() if error < PEER_FAILS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = CASES[:QUICK_CASES] if options.quick else CASES
    cuts = QUICK_CUTS if options.quick else (*CUTS, TAIL)
    if options.rank:
        work(options.rank, cases, cuts)
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "lightning")}
    print(", ".join(f"{name} {number}" for name, number in versions.items()) + "\n")
    rows = measure(cases, cuts)
    for ranks in (2,) if options.quick else (2, 4):
        rows += launched(ranks, quick=options.quick)
    narrow = [case.name for case in cases if has_narrow_loss(case)]
    failures = print_ours(rows, narrow)
    peers = peer_rows(cases)
    failures += print_peers(peers)
    if options.json:
        told = {"versions": versions, "ours": rows, "peers": peers, "fp32_loss": narrow, "failures": failures}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    print("\n" + ("\n".join(failures) if failures else "Every bound is kept, and every peer fails somewhere."))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
