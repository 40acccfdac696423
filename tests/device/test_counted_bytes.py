"""The counted peak is the allocator's own peak; the profiler's memory events are the oracle."""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.device.host import ByteCounter, HostDevice
from batchwright.trace.cpu_workspaces import record_allocations
from tests.device.workloads import make_linear, make_mlp, make_transformer, run_probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.workload import Workload


def profiled_peak_bytes(run: Callable[[], object]) -> int:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    alive = peak = 0
    for _, num_bytes in sorted(changes, key=lambda change: change[0]):
        alive += num_bytes
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(
    ("make", "micro_batch"),
    [(make_mlp, 8), (make_mlp, 512), pytest.param(make_transformer, 16, marks=pytest.mark.slow)],
)
def test_counted_peak_equals_the_profilers(make: Callable[[], Workload], micro_batch: int) -> None:
    workload = make()
    oracle = profiled_peak_bytes(lambda: run_probe(workload, micro_batch, device=torch.device("cpu")))

    outcome = HostDevice().probe(workload, micro_batch)

    assert outcome.peak_bytes is not None
    assert outcome.peak_bytes.allocated == pytest.approx(oracle, rel=1e-3)


class LargestScratch(TorchDispatchMode):
    """Ask every kernel of a step how far it rises above what it returns, and keep the most."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results: list[Any] = []
        events = record_allocations(lambda: results.append(func(*args, **(kwargs or {}))))
        self.num_bytes = max(self.num_bytes, max(accumulate(events), default=0) - sum(events))
        return results[0]


def test_memory_inside_an_operator_is_all_that_is_not_counted() -> None:
    # The known gap: oneDNN's LSTM takes memory inside one operator, how much differs by processor and by version.
    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 64, batch_first=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.lstm(inputs)[0]
            return outputs

    workload = make_linear(model=Lstm, batch=lambda n: torch.randn(n, 32, 32))
    oracle = profiled_peak_bytes(lambda: run_probe(workload, 64, device=torch.device("cpu")))
    peak = HostDevice().probe(workload, 64).peak_bytes
    assert peak is not None
    assert peak.allocated is not None
    with LargestScratch() as scratch:  # type: ignore[no-untyped-call]
        run_probe(workload, 64, device=torch.device("cpu"))
    assert 0.999 * oracle - scratch.num_bytes <= peak.allocated <= 1.001 * oracle


def test_views_share_and_death_is_noticed() -> None:
    with ByteCounter() as counter:
        whole = torch.zeros(1000)
        half = whole[:500]
        assert counter.alive_bytes == 4000
        del whole
        assert counter.alive_bytes == 4000
        del half
        assert counter.alive_bytes == 0
    assert counter.peak_bytes == 4000


def test_saved_for_backward_stays_counted() -> None:
    weight = torch.ones(100, requires_grad=True)
    with ByteCounter() as counter:
        loss = weight.exp().sum()
        # weight, its exponential (saved by autograd alone) and the sum
        assert counter.alive_bytes == 400 + 400 + 4
        del loss
        assert counter.alive_bytes == 400


def test_resize_and_tensors_from_outside_are_counted() -> None:
    numpy = pytest.importorskip("numpy")
    outside = torch.from_numpy(numpy.zeros(250, dtype="float32"))
    with ByteCounter() as counter:
        outside.add_(1)
        assert counter.alive_bytes == 1000
        grown = torch.zeros(10)
        grown.resize_(100)
        assert counter.alive_bytes == 1400


def test_other_devices_are_not_counted() -> None:
    with ByteCounter() as counter:
        torch.zeros(1000, device="meta")
    assert counter.peak_bytes == 0


def test_limit_is_kept_in_forward_and_in_backward() -> None:
    with ByteCounter(limit_bytes=5000) as counter:
        torch.zeros(1250)
        with pytest.raises(MemoryError, match=r"limit is 4\.88 KiB"):
            torch.zeros(1251)
        assert counter.alive_bytes == 0

        weight = torch.ones(500, requires_grad=True)
        loss = weight.exp().sum()
        with pytest.raises(MemoryError, match="the tensors alive would take"):
            loss.backward()
    assert counter.peak_bytes <= 5000
