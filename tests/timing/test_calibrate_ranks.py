"""Collectives of ranks that torchrun started: timed by size, the same numbers on each, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from batchwright.timing.calibrate_ranks import time_collectives
from tests.torchrun import told_by_ranks

SIZES = [4096, 16384, 65536]


def test_every_collective_has_a_time_at_each_size(tmp_path: Path) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        curves = time_collectives("cpu", largest=SIZES[-1])
    finally:
        dist.destroy_process_group()
    assert {"all_reduce", "all_gather"} <= set(curves)
    for curve in curves.values():
        assert [size for size, _ in curve] == SIZES
        assert all(seconds > 0 for _, seconds in curve)


@pytest.mark.slow
def test_ranks_agree_on_what_they_timed(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = told_by_ranks(Path(__file__).with_name("ranks_worker.py"), tmp_path_factory)
    assert first == second
    assert [size for size, _ in first["all_reduce"]] == SIZES
