"""What fused attention holds on a CPU, against the profiler's own events."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from batchwright.trace.cpu_workspaces import BACKWARD, FORWARD, goes_to_onednn, held_while_running


def freed_inside(func: object, *args: object) -> list[int]:
    """Bytes of the allocations that an operator made and gave back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        kept = func(*args)  # type: ignore[operator]
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    freed = sorted(-event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() < 0)
    del kept
    return freed


@pytest.mark.parametrize(("length", "keys"), [(1024, 1024), (256, 256), (64, 64), (16, 16), (300, 900)])
def test_the_tiles_of_forward_are_those_of_the_kernel(length: int, keys: int) -> None:
    query, key = torch.randn(2, 4, length, 32), torch.randn(2, 4, keys, 32)
    assert freed_inside(FORWARD, query, key, key) == list(held_while_running(FORWARD, (query, key, key)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sixteen_bit_kernel_keeps_its_tiles_in_that_type_too(dtype: torch.dtype) -> None:
    if goes_to_onednn(dtype):
        pytest.skip("here oneDNN multiplies, and the kernel is asked")
    query = torch.randn(2, 4, 40, 32, dtype=dtype)
    out, normaliser = FORWARD(query, query, query)
    assert freed_inside(FORWARD, query, query, query) == sorted(held_while_running(FORWARD, (query,) * 3))
    args = (torch.randn(out.shape, dtype=dtype), query, query, query, out, normaliser, 0.0, False)
    large = [num_bytes for num_bytes in freed_inside(BACKWARD, *args) if num_bytes > 4096]
    assert large == sorted(num_bytes for num_bytes in held_while_running(BACKWARD, args) if num_bytes)


@pytest.mark.parametrize("layout", ["in order", "heads first", "expanded"])
@pytest.mark.parametrize("length", [1024, 256, 64])
def test_backward_copies_a_gradient_that_lies_otherwise(length: int, layout: str) -> None:
    query = torch.randn(2, length, 4, 32).transpose(1, 2)
    out, normaliser = FORWARD(query, query, query)
    gradient = {
        "in order": torch.randn_like(out),
        "heads first": torch.randn(out.shape),
        "expanded": torch.ones(()).expand(out.shape),
    }[layout]
    args = (gradient, query, query, query, out, normaliser, 0.0, False)
    large = [num_bytes for num_bytes in freed_inside(BACKWARD, *args) if num_bytes > 4096]
    assert large == sorted(num_bytes for num_bytes in held_while_running(BACKWARD, args) if num_bytes)
