"""What torch.cuda, torch.accelerator and their libraries answer in a step on a simulated card, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from batchwright.errors import CannotTraceError
from tests.simulated.torch_patches.test_redirected_calls import KIB, in_a_step

if TYPE_CHECKING:
    from collections.abc import Callable


def told(ask: Callable[[], Any]) -> Any:
    """Return what a question is answered with inside a step."""
    (answer,) = in_a_step(lambda _, __: ask())
    return answer


class TestMemory:
    @pytest.mark.parametrize(
        "name", ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"]
    )
    def test_accelerator_says_what_cuda_says(self, name: str) -> None:
        mine, other = told(lambda: (getattr(torch.accelerator, name)(), getattr(torch.cuda, name)()))
        assert mine
        assert mine == other

    def test_every_family_rises_and_falls(self) -> None:
        def ask() -> list[dict[str, int]]:
            torch.cuda.reset_accumulated_memory_stats()
            before = torch.cuda.memory_stats()
            taken = torch.empty(3 << 20, device="cuda", dtype=torch.uint8)
            during = torch.cuda.memory_stats()
            del taken
            return [before, during, torch.cuda.memory_stats()]

        before, during, after = told(ask)
        for family, amount in (
            ("allocated_bytes", 3 << 20),
            ("active_bytes", 3 << 20),
            ("allocation", 1),
            ("active", 1),
        ):
            assert [stats[f"{family}.all.allocated"] for stats in (before, during, after)] == [0, amount, amount]
            assert [stats[f"{family}.all.freed"] for stats in (before, during, after)] == [0, 0, amount]
            assert during[f"{family}.all.current"] - before[f"{family}.all.current"] == amount
        for family in ("reserved_bytes", "segment", "inactive_split_bytes"):
            for kind in ("current", "peak", "allocated", "freed"):
                assert after[f"{family}.all.{kind}"] >= 0
        assert after["segment.all.current"] > 0

    def test_a_snapshot_holds_what_is_reserved(self) -> None:
        segments, reserved = told(lambda: (torch.cuda.memory_snapshot(), torch.cuda.memory_reserved()))
        assert sum(segment["total_size"] for segment in segments) == reserved
        assert told(lambda: torch.cuda.memory._snapshot()["segments"])

    def test_emptying_the_cache_through_accelerator(self) -> None:
        def ask() -> tuple[int, int]:
            torch.empty(64 << 20, device="cuda", dtype=torch.uint8)
            before = torch.accelerator.memory_reserved()
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            return before, torch.accelerator.memory_reserved()

        before, after = told(ask)
        assert before - after >= 64 * KIB * KIB


class TestEverythingElse:
    @pytest.mark.parametrize(
        ("ask", "answer"),
        [
            (lambda: torch.accelerator.current_accelerator(), torch.device("cuda")),
            (lambda: torch.accelerator.is_available(), True),
            (lambda: torch.cuda.initial_seed() == torch.initial_seed(), True),
            (lambda: len(torch.cuda.get_rng_state_all()), 1),
            (lambda: torch.cuda.is_current_stream_capturing(), False),
            (lambda: torch.cuda.nccl.version() >= (2, 0), True),
            (lambda: int(str(torch.version.cuda).split(".")[0]) >= 12, True),
            (
                lambda: (torch.backends.cudnn.is_available(), (torch.backends.cudnn.version() or 0) > 90000),
                (True, True),
            ),
            (lambda: torch.cuda.get_device_properties(0).warp_size, 32),
            (lambda: torch.cuda.get_device_properties(0).L2_cache_size, 40 << 20),
        ],
    )
    def test_is_answered(self, ask: Callable[[], Any], answer: Any) -> None:
        assert told(ask) == answer

    def test_random_numbers_may_be_forked(self) -> None:
        def ask() -> int:
            with torch.random.fork_rng():
                torch.manual_seed(1)
            with torch.random.fork_rng(devices=[0], device_type="cuda"):
                return torch.randn(3, device="cuda").numel()

        assert told(ask) == 3

    def test_cudnn_may_be_set_for_a_while(self) -> None:
        def ask() -> bool:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                return bool(torch.backends.cudnn.benchmark)

        assert told(ask) is True

    def test_an_event_that_a_stream_records_can_be_waited_for(self) -> None:
        def ask() -> Any:
            event = torch.cuda.current_stream().record_event()
            event.synchronize()
            return event.query()

        assert told(ask) is True


def test_data_parallel_on_one_card_is_its_module() -> None:
    (made,) = in_a_step(lambda model, batch: nn.DataParallel(model)(batch.cpu()).is_cuda)
    assert made is True


@pytest.mark.parametrize(
    "name", ["MemPool", "utilization", "host_memory_stats", "list_gpu_processes", "current_blas_handle"]
)
def test_what_cannot_be_answered_is_refused_with_the_line(name: str) -> None:
    with pytest.raises(CannotTraceError, match=r"(?s)torch\.cuda\..*simulated.*at .*\.py:\d+"):
        told(lambda: getattr(torch.cuda, name)())


def test_torch_is_as_it_was() -> None:
    places = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.nccl, torch.accelerator, torch.version)

    def state() -> list[dict[str, Any]]:
        return [dict(vars(place)) for place in (*places, nn.Module, torch.backends.cudnn)]

    told(lambda: None)  # what torch imports when first asked
    before, names = state(), set(dir(torch._C))
    told(lambda: torch.cuda.memory_stats())
    assert state() == before
    assert set(dir(torch._C)) == names
