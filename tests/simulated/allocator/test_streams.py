"""Streams: each has pools of its own, and a replay of requests keeps them apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.device.step import StepSettings
from batchwright.memory.on_card import ScaledRequests
from batchwright.simulated.allocator.caching_allocator import (
    FARTHEST_AHEAD,
    CachingAllocator,
    peaks_with_room,
    size_and_stream,
)
from batchwright.simulated.allocator.settings import AllocatorSettings
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import Traced, trace_workload

MIB = 2**20


def test_what_one_stream_has_freed_another_is_not_given() -> None:
    allocator = CachingAllocator(None)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.stream = 1
    block = allocator.malloc(30 * MIB)
    assert allocator.stats.reserved.current == 60 * MIB
    allocator.stream = 0
    allocator.free(block)  # goes back to the pool it is from, whoever frees it
    allocator.malloc(30 * MIB)
    assert allocator.stats.reserved.peak == 60 * MIB
    assert {segment["stream"] for segment in allocator.segments()} == {0, 1}


def test_near_the_limit_every_streams_cache_is_given_back() -> None:
    allocator = CachingAllocator(64 * MIB)
    allocator.stream = 1
    allocator.free(allocator.malloc(40 * MIB))
    allocator.stream = 0
    allocator.malloc(60 * MIB)
    assert allocator.stats.num_alloc_retries == 1


class TestRecordStream:
    """What another stream uses is not free for others before that stream has passed."""

    def test_memory_waits_until_the_host_has_waited(self) -> None:
        allocator = CachingAllocator(None)
        block = allocator.malloc(30 * MIB)
        allocator.record_stream(block, 7)
        allocator.free(block)
        assert allocator.stats.allocated.current == 0
        assert allocator.segments()[0]["blocks"][0]["state"] == "active_pending_free"
        other = allocator.malloc(30 * MIB)
        assert allocator.stats.reserved.current == 60 * MIB
        allocator.passed()
        allocator.free(other)
        allocator.malloc(30 * MIB)
        assert allocator.stats.reserved.current == 60 * MIB

    def test_its_own_stream_makes_no_difference(self) -> None:
        allocator = CachingAllocator(None)
        block = allocator.malloc(30 * MIB)
        allocator.record_stream(block, 0)
        allocator.free(block)
        allocator.malloc(30 * MIB)
        assert allocator.stats.reserved.current == 30 * MIB

    def test_it_passes_when_the_queue_of_launches_is_full(self) -> None:
        allocator = CachingAllocator(None)
        block = allocator.malloc(30 * MIB)
        allocator.record_stream(block, 7)
        allocator.free(block)
        for _ in range(FARTHEST_AHEAD):
            allocator.launched()
        allocator.malloc(30 * MIB)
        assert allocator.stats.reserved.current == 30 * MIB

    def test_near_the_limit_the_allocator_waits_itself(self) -> None:
        allocator = CachingAllocator(64 * MIB)
        block = allocator.malloc(40 * MIB)
        allocator.record_stream(block, 7)
        allocator.free(block)
        allocator.malloc(60 * MIB)
        assert allocator.stats.num_alloc_retries == 1

    @pytest.mark.parametrize("wait", [None, "stream", "event", "card", "read"])
    def test_a_step_that_hands_memory_to_a_stream(self, wait: str | None) -> None:
        """Each round takes 30 MiB on one stream and uses it on another; who waits takes the same again."""

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            aside = torch.cuda.Stream()
            for _ in range(4):
                kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
                kept.record_stream(aside)
                event = aside.record_event()
                del kept
                if wait == "stream":
                    aside.synchronize()
                elif wait == "event":
                    event.synchronize()
                elif wait == "card":
                    torch.cuda.synchronize()
                elif wait == "read":
                    torch.zeros((), device="cuda").item()
            out: torch.Tensor = model(batch).mean()
            return out

        workload = bw.Workload(
            model=lambda: nn.Linear(8, 8),
            batch=lambda n: torch.randn(n, 8),
            loss=loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
        run = trace_workload(workload, 2, card=card)
        allocated, reserved = run.on_card[0].of_allocator
        assert allocated < 60 * MIB
        # Two steps of four rounds, none of which passes by itself.
        assert (reserved > 8 * 30 * MIB) == (wait is None)
        assert peaks_with_room(run.requests, AllocatorSettings()) == (allocated, reserved)


def fsdp2(num_samples: int) -> Traced:
    """A rank of four that shards three blocks."""

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.children():
            fully_shard(block)
        fully_shard(model)
        return model

    workload = bw.Workload(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3))),
        batch=lambda n: torch.randn(n, 1024),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        wrap=wrap,
    )
    card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
    return trace_workload(workload, num_samples, StepSettings(devices=4), card=card)


def test_fsdp2_gathers_and_reduces_on_streams_of_its_own_and_a_replay_tells_the_same() -> None:
    run, larger, largest = map(fsdp2, (1024, 2048, 4096))
    taken = [size_and_stream(event) for event in run.requests if event >= 0]
    streams = {stream for _, stream in taken}
    assert len(streams) >= 3  # compute, gathers, reduced gradients
    assert any(stream and size > 4 * MIB for size, stream in taken)
    assert peaks_with_room(run.requests, AllocatorSettings()) == run.on_card[0].of_allocator
    # Lines through two sizes keep streams.
    lines = ScaledRequests.through(1024, run.requests, 2048, larger.requests)
    assert lines is not None
    assert lines.agrees_with(4096, largest.requests)
    one_stream = tuple(event if event < 0 else size_and_stream(event)[0] for event in run.requests)
    assert peaks_with_room(one_stream, AllocatorSettings())[1] < run.on_card[0].of_allocator[1]
