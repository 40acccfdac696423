"""The memory of the process: what is free inside the heap is no room for a step."""

from __future__ import annotations

import sys

import pytest
import torch

from batchwright.device.host import holes_filled, read_memory

MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory of a process")


def private_bytes() -> int:
    reading = read_memory()
    assert reading is not None
    return reading.data


def test_a_tensor_takes_new_memory_though_the_heap_has_holes() -> None:
    # Below the threshold from which on a block has a mapping of its own; those that stay keep the heap from shrinking.
    blocks = [torch.empty(60 * 1024, dtype=torch.uint8) for _ in range(400)]
    stay = blocks[::40]
    del blocks
    with holes_filled() as free_bytes:
        before = private_bytes()
        tensor = torch.empty(4 * MIB, dtype=torch.uint8)
        assert private_bytes() - before >= tensor.numel()
    assert free_bytes >= 4 * MIB
    assert len(stay) == 10


def test_the_holes_are_there_again_afterwards() -> None:
    with holes_filled() as first:
        pass
    with holes_filled() as second:
        pass
    assert second == pytest.approx(first, abs=4 * MIB)
