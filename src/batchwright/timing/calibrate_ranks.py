"""Collectives of the ranks that `torchrun` started, timed by size: the part of a profile that one device cannot tell.

Promises:
- every rank runs the same collectives in the same order; the time of one is that of the rank that waits longest;
- nothing is left of it but the numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

_SMALLEST, _LARGEST, _STEP = 1 << 12, 1 << 26, 4
_REPEATS, _SECONDS = 5, 20.0


def time_collectives(
    on: str, *, largest: int = _LARGEST, seconds: float = _SECONDS
) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Return for each collective its bytes, of the whole tensor, and its seconds; every rank gets the same."""
    device = torch.device(on)
    ranks = dist.get_world_size()
    curves: dict[str, list[tuple[float, float]]] = {}
    size, start = _SMALLEST, time.monotonic()
    while size <= largest:
        for kind, run in _collectives(size, ranks, device).items():
            try:
                run()  # the first one sets up connections
            except RuntimeError as error:
                if "support" not in str(error):
                    raise
                continue  # a backend without it: every rank is refused alike
            curves.setdefault(kind, []).append((float(size), _slowest(run, device)))
        size *= _STEP
        # No rank goes on alone.
        goes_on = torch.tensor(float(time.monotonic() - start < seconds), device=device)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        if not goes_on.item():
            break
    return curves


def _collectives(num_bytes: int, ranks: int, device: torch.device) -> dict[str, Callable[[], object]]:
    count = max(num_bytes // 4 // ranks, 1)
    whole, part = torch.ones(count * ranks, device=device), torch.ones(count, device=device)
    parts = list(whole.chunk(ranks))
    # torch 2.13 gave it another name.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": lambda: dist.all_reduce(whole.fill_(1.0)),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: scatter(part, whole),
    }


def _slowest(run: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(taken), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
