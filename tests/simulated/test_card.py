"""A simulated card runs out of memory where the real one would, and errors of the user's own come out as they are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchwright.catalogue.cards import context_of, cublas_workspace_bytes, find_card
from batchwright.device.step import PLAIN_STEP
from batchwright.errors import CannotTraceError
from batchwright.memory.on_card import OnCard
from batchwright.simulated.allocator.settings import AllocatorSettings
from batchwright.simulated.card import SimulatedCard, kernels_of
from batchwright.trace.run import trace_workload
from batchwright.units import format_bytes
from tests.device.workloads import make_linear, mean_square

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.catalogue.cards import Card
    from batchwright.simulated.allocator.segments import Block
    from batchwright.trace.run import Traced
    from batchwright.workload import Workload

MIB = 2**20
WIDTH = 512
TERABYTE = 10**12


def card_with(mib: int, name: str = "a100-40gb") -> Card:
    """A card with so much left for PyTorch."""
    card = find_card(name)
    return replace(card, total_bytes=context_of(card).typical_bytes + mib * MIB)


def make_deep(**changes: Any) -> Workload:
    """Four layers: weights of 4 MiB in all, and 2 KiB per sample and layer."""
    fields: dict[str, Any] = {
        "model": lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]),
        "batch": lambda n: torch.randn(n, WIDTH),
    }
    return make_linear(**{**fields, **changes})


def run(workload: Workload, micro_batch: int = 8, *, mib: int = 100, steps: int = 1) -> Traced:
    return trace_workload(workload, micro_batch, steps=steps, card=SimulatedCard(card_with(mib)))


def watched_phases(**changes: Any) -> tuple[Workload, list[str]]:
    """A workload, and a log of where its run is, told by its own parts; a log stays as it was written."""
    phases: list[str] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        phases.append("forward")
        result = mean_square(model, batch)
        phases.append("backward")
        return result

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(params)
        made.register_step_pre_hook(lambda *_: phases.append("optimizer"))
        return made

    return make_deep(**{"loss": loss, "optimizer": optimizer, **changes}), phases


class TestOutOfMemory:
    @pytest.mark.parametrize(
        ("micro_batch", "mib", "phase"),
        [(8192, 60, "forward"), (6144, 120, "backward"), (8, 30, "optimizer")],
    )
    def test_it_comes_where_the_capacity_ends(self, micro_batch: int, mib: int, phase: str) -> None:
        workload, phases = watched_phases()
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
            run(workload, micro_batch, mib=mib)
        assert phases[-1] == phase
        assert not torch.cuda.is_available()

    def test_in_building_the_model_too(self) -> None:
        with pytest.raises(torch.OutOfMemoryError):
            run(make_deep(), mib=3)

    def test_the_message_has_the_card_and_its_numbers(self) -> None:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            run(make_deep(), 100_000, mib=64)
        total = format_bytes(card_with(64).total_bytes)
        assert f"NVIDIA A100 40GB (simulated) has a total capacity of {total} of which" in str(raised.value)
        assert "Tried to allocate 195 MiB" in str(raised.value)

    def test_with_room_to_spare_it_never_comes(self) -> None:
        roomy = SimulatedCard(card_with(3), is_roomy=True)
        assert trace_workload(make_deep(), 100_000, steps=1, card=roomy).peaks is not None

    def test_who_catches_it_in_forward_can_go_on(self) -> None:
        caught = []

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            try:
                torch.empty(TERABYTE, device="cuda")
            except torch.OutOfMemoryError:
                caught.append(torch.cuda.memory_allocated())
                torch.cuda.empty_cache()
            return mean_square(model, batch)

        traced = run(make_deep(loss=loss), steps=2)
        assert len(caught) == 2
        assert traced.peaks is not None
        assert traced.peaks == run(make_deep(), steps=2).peaks

    def test_who_catches_it_around_backward_can_go_on_with_fewer_samples(self) -> None:
        sizes = []

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            try:
                mean_square(model, batch).backward()
            except torch.OutOfMemoryError:
                model.zero_grad()
                batch = batch[: len(batch) // 8]
            sizes.append(len(batch))
            return mean_square(model, batch)

        run(make_deep(loss=loss), 6144, mib=120)
        assert sizes == [768]

    def test_after_it_the_next_run_and_the_cpu_are_as_before(self) -> None:
        plain = run(make_deep()).peaks
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                run(make_deep(), 6144, mib=120)
        assert run(make_deep()).peaks == plain
        weight = torch.ones(2, requires_grad=True)
        (weight * 3).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0, 3.0]


class TestErrorsOfTheUsersOwnInBackward:
    def run_with(self, backward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        class Theirs(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
                return given * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return backward(gradient)

        doubled: Any = Theirs.apply
        run(make_deep(loss=lambda model, batch: doubled(model(batch)).mean()))

    @pytest.mark.parametrize("kind", [KeyError, LookupError, KeyboardInterrupt, torch.OutOfMemoryError])
    def test_of_a_function_keeps_its_type(self, kind: type[BaseException]) -> None:
        def fail(_: torch.Tensor) -> torch.Tensor:
            raise kind("mine")

        with pytest.raises(kind, match="mine"):
            self.run_with(fail)

    def test_of_an_operator_in_it_too(self) -> None:
        with pytest.raises(RuntimeError, match="same reduction dim"):
            self.run_with(lambda gradient: gradient @ gradient.new_ones(3, 3))

    def test_a_value_that_is_read_there_cannot_be_traced(self) -> None:
        with pytest.raises(CannotTraceError, match="reads a value out of a tensor"):
            self.run_with(lambda gradient: gradient * gradient.sum().item())

    def test_a_gradient_of_the_wrong_shape_is_torchs_error(self) -> None:
        with pytest.raises(RuntimeError, match="invalid gradient"):
            self.run_with(lambda gradient: gradient[:, :3])

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_of_a_forward_that_runs_again(self, use_reentrant: bool) -> None:
        calls = []

        def forward(model: nn.Module, given: torch.Tensor) -> Any:
            calls.append(len(given))
            if len(calls) == 2:
                raise LookupError("mine")
            return model(given).exp()

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(forward, model, batch.requires_grad_(), use_reentrant=use_reentrant)
            return result.mean()

        with pytest.raises(LookupError, match="mine"):
            run(make_deep(loss=loss))
        assert len(calls) == 2

    def test_of_what_gives_back_a_saved_tensor(self) -> None:
        def fail(_: Any) -> torch.Tensor:
            raise LookupError("mine")

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
                return mean_square(model, batch)

        with pytest.raises(LookupError, match="mine"):
            run(make_deep(loss=loss))

    def test_a_graph_that_is_gone_is_torchs_error(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            result = mean_square(model, batch)
            result.backward()
            return result

        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            run(make_deep(loss=loss))

    def test_a_second_backward_through_the_first_is_followed(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            batch = batch.requires_grad_()
            (gradient,) = torch.autograd.grad(mean_square(model, batch), batch, create_graph=True)
            return gradient.pow(2).sum()

        assert run(make_deep(loss=loss)).peaks is not None


class Recomputed(nn.Module):
    """Three blocks under activation checkpointing, whose memory is that of one block as it runs again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.requires_grad_()
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        return hidden


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_running_out_of_memory_as_a_forward_runs_again_is_out_of_memory(use_reentrant: bool) -> None:
    workload = make_deep(model=lambda: Recomputed(use_reentrant))
    for mib in (90, 100, 110):
        with pytest.raises(torch.OutOfMemoryError):
            run(workload, 2048, mib=mib)


# In a process of its own, and forked for each: it is feared to end its process. Fork goes with no backward before it.
FEARED = """
import os, sys, torch
from torch.utils.checkpoint import checkpoint
from tests.simulated.test_card import TERABYTE, make_deep, run
from tests.device.workloads import mean_square

def fail(*_):
    raise LookupError("mine")

def hook_of_a_tensor(model, batch):
    hidden = model(batch)
    hidden.register_hook(fail)
    return hidden.mean()

def hook_of_a_module(model, batch):
    model[2].register_full_backward_hook(fail)
    return mean_square(model, batch)

def hook_of_a_gradient(model, batch):
    model[2].weight.register_post_accumulate_grad_hook(fail)
    return mean_square(model, batch)

calls = []

def forward(model, given):
    calls.append(given)
    if len(calls) > 1:
        given.new_empty(TERABYTE)
    return model(given).exp()

def forward_that_drops_a_tensor(model, batch):
    return checkpoint(forward, model, batch.requires_grad_(), use_reentrant=True).mean()

class Careful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given * 2

    @staticmethod
    def backward(ctx, gradient):
        try:
            gradient.new_empty(TERABYTE)
        except torch.OutOfMemoryError:
            return gradient * 2
        return gradient

def backward_that_catches_it(model, batch):
    return Careful.apply(model(batch)).mean()

run(make_deep(optimizer=None))
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            run(make_deep(loss=globals()[name]))
        except (LookupError, torch.OutOfMemoryError) as error:
            print(name, type(error).__name__, flush=True)
        else:
            print(name, "ran", flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        print(name, "ended with", status, flush=True)
"""
EXPECTED = {
    "hook_of_a_tensor": "LookupError",
    "hook_of_a_module": "LookupError",
    "hook_of_a_gradient": "LookupError",
    "forward_that_drops_a_tensor": "OutOfMemoryError",
    "backward_that_catches_it": "ran",
}


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    """How each of the feared runs ended."""
    command = [sys.executable, "-c", FEARED, *EXPECTED]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(line.split(" ", 1) for line in ran.stdout.splitlines())


@pytest.mark.parametrize("name", EXPECTED)
def test_no_error_in_backward_ends_the_process(ends: dict[str, str], name: str) -> None:
    assert ends[name] == EXPECTED[name]


class TestWorkspaces:
    def test_each_of_the_two_threads_takes_one_once(self) -> None:
        card = find_card("a100-40gb")
        traced = run(make_deep(), steps=3)
        taken = [b.num_bytes for b, change in traced.log.changes if b.operator == "cuBLAS" and change > 0]
        assert taken == [cublas_workspace_bytes(card)] * 2
        assert [b.phase for b, _ in traced.log.changes if b.operator == "cuBLAS"] == ["forward", "backward"]

    def test_inference_takes_one(self) -> None:
        traced = run(make_deep(optimizer=None))
        assert [b.phase for b, _ in traced.log.changes if b.operator == "cuBLAS"] == ["forward"]

    def test_a_step_that_multiplies_nothing_takes_none(self) -> None:
        workload = make_linear(model=lambda: nn.Embedding(8, 8), batch=lambda n: torch.zeros(n, dtype=torch.long))
        assert not [b for b, _ in run(workload).log.changes if b.operator == "cuBLAS"]

    def test_cards_alike_in_them_trace_alike(self) -> None:
        assert kernels_of(find_card("rtx-3090")) == kernels_of(find_card("rtx-4090"))
        assert kernels_of(find_card("rtx-3090")) != kernels_of(find_card("h100-80gb"))
        assert kernels_of(find_card("v100-16gb")) != kernels_of(find_card("a100-40gb"))


def runs_on(card: Card, settings: AllocatorSettings, workload: Workload, micro_batch: int) -> bool:
    try:
        trace_workload(workload, micro_batch, card=SimulatedCard(card, settings))
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_what_was_traced_with_room_to_spare_tells_which_sizes_run_on_the_card_as_it_is(text: str) -> None:
    card, settings, workload = card_with(80), AllocatorSettings.parse(text), make_deep()
    there = OnCard(workload, card, settings, PLAIN_STEP)
    largest = there.largest(there.traced, cap=2**16)
    sizes = [largest - 1, largest, largest + 1, largest + 64]
    told = [there.fits(there.traced(size)) for size in sizes]
    assert told == [runs_on(card, settings, workload, size) for size in sizes]
    assert told[1:3] == [True, False]


def test_a_replay_on_a_card_without_an_end_takes_what_the_trace_took() -> None:
    card = SimulatedCard(card_with(80), is_roomy=True)
    traced = trace_workload(make_deep(), 512, card=card)
    assert traced.peaks == card.peak_bytes
    born = sum(event >= 0 for event in traced.requests)
    freed = sum(event < 0 for event in traced.requests)
    assert 0 < freed < born
    assert sorted(-1 - event for event in traced.requests if event < 0) == sorted(
        {-1 - event for event in traced.requests if event < 0}
    ), "nothing is freed twice"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 << 28), st.integers(0, 5)), min_size=1, max_size=60))
def test_a_replay_of_what_ran_with_room_ends_as_a_run_without(requests: list[tuple[int, int]]) -> None:
    card = card_with(1 << 12)
    roomy, real = SimulatedCard(card, is_roomy=True), SimulatedCard(card)
    ran_out = False
    blocks: list[tuple[Block, Block | None]] = []
    for size, num_freed in requests:
        other = None
        if not ran_out:
            try:
                other = real.malloc(size)
            except torch.OutOfMemoryError:
                ran_out = True
        blocks.append((roomy.malloc(size), other))
        for _ in range(min(num_freed, len(blocks) - 1) if num_freed < 3 else 0):
            block, other = blocks.pop(0)
            roomy.free(block)
            if other is not None and not ran_out:
                real.free(other)
    assert roomy.replay_within() == (roomy.peak_bytes if ran_out else real.peak_bytes)


def test_an_emptied_cache_is_no_request_and_cannot_be_replayed() -> None:
    roomy = SimulatedCard(card_with(1 << 12), is_roomy=True)
    roomy.free(roomy.malloc(30 << 20))
    roomy.allocator.empty_cache()
    roomy.malloc(40 << 20)
    assert roomy.replay_within() is None
