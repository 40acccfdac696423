"""The predicted run as PyTorch's own memory snapshot, read by PyTorch's own tool."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viewer

import batchwright as bw

if TYPE_CHECKING:
    from pathlib import Path


def snapshot_of(file: Path, **options: Any) -> tuple[dict[str, Any], bw.Estimate]:
    workload = bw.Workload(
        model=lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        batch=lambda n: torch.randn(n, 512),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.AdamW(params),
    )
    found = bw.estimate(workload, micro_batch=64, on="t4-16gb", snapshot=file, **options)
    return pickle.loads(file.read_bytes()), found


def test_the_official_tool_reads_it(tmp_path: Path) -> None:
    told, _ = snapshot_of(tmp_path / "run.pickle")
    assert "cudaMalloc" in viewer.trace(told)
    assert "segments" in viewer.segsum(told)
    for page in (viewer.trace_plot(told), viewer.segment_plot(told)):
        assert "<script" in page


def test_its_events_add_up_to_the_peaks(tmp_path: Path) -> None:
    told, found = snapshot_of(tmp_path / "run.pickle")
    sizes: dict[int, int] = {}
    now = highest = reserved = 0
    for entry in told["device_traces"][0]:
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            now += entry["size"]
            highest = max(highest, now)
        elif entry["action"] == "free_completed":
            now -= sizes.pop(entry["addr"])
        elif entry["action"] == "segment_alloc":
            reserved += entry["size"]
    # What was asked for; what was handed out is rounded up to 512 bytes each.
    assert 0 <= found.peak - highest < 512 * len(told["device_traces"][0])
    assert reserved == found.peak_bytes.reserved == sum(segment["total_size"] for segment in told["segments"])
    assert any(frame["name"] == "aten.addmm" for entry in told["device_traces"][0] for frame in entry["frames"])


def test_a_run_that_ends_out_of_memory_is_written_too(tmp_path: Path) -> None:
    told, found = snapshot_of(tmp_path / "run.pickle", memory="150MiB")
    assert found.fits is False
    assert any(entry["action"] == "oom" for entry in told["device_traces"][0])


def test_a_host_has_none(tmp_path: Path) -> None:
    workload = bw.Workload(
        model=lambda: nn.Linear(1, 1), batch=lambda n: torch.randn(n, 1), loss=lambda m, b: m(b).sum()
    )
    with pytest.raises(bw.BatchwrightError, match="they need a card"):
        bw.estimate(workload, snapshot=tmp_path / "run.pickle")
