"""User code that names `cuda` runs on the simulated card, and finds there what a GPU would tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.errors import CannotTraceError
from batchwright.simulated.card import SimulatedCard
from batchwright.simulated.torch_patches.backend import is_on_card
from batchwright.trace.run import trace_workload
from tests.device.workloads import make_linear, make_mlp, mean_square

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.trace.run import Traced
    from batchwright.workload import Workload

KIB = 1024


def traced(workload: Workload, micro_batch: int = 8, *, card: str = "a100-40gb", steps: int = 1) -> Traced:
    return trace_workload(workload, micro_batch, steps=steps, card=SimulatedCard(find_card(card), is_roomy=True))


def in_a_step(check: Callable[[nn.Module, torch.Tensor], Any], **fields: Any) -> list[Any]:
    """Call a function inside a step on the card, and return what it returned."""
    returned = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        returned.append(check(model, batch))
        return mean_square(model, batch)

    traced(make_linear(loss=loss, **fields))
    return returned


def operators(run: Traced, phase: str) -> set[str]:
    return {block.operator for block, _ in run.log.changes if block.phase == phase}


def inside_a_device_context() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.zeros(3)


def values_inside_a_device_context() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.tensor([1.0, 2.0])


def under_a_current_device() -> torch.Tensor:
    with torch.cuda.device(0):
        return torch.zeros(3, device="cuda")


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    ".cuda()": lambda batch: torch.ones(3).cuda(),
    ".cuda(0)": lambda batch: torch.ones(3).cuda(0),
    ".cuda(non_blocking=True)": lambda batch: torch.ones(3).cuda(non_blocking=True),
    '.to("cuda")': lambda batch: torch.ones(3).to("cuda"),
    '.to("cuda:0", dtype)': lambda batch: torch.ones(3).to("cuda:0", torch.bfloat16),
    ".to(0)": lambda batch: torch.ones(3).to(0),
    ".to(device=0)": lambda batch: torch.ones(3).to(device=0),
    ".to(other)": lambda batch: torch.ones(3).to(batch),
    ".to(other.device)": lambda batch: torch.ones(3).to(batch.device),
    "zeros, a device": lambda batch: torch.zeros(3, device=torch.device("cuda")),
    "zeros, a number": lambda batch: torch.zeros(3, device=0),
    "zeros, where another lies": lambda batch: torch.zeros(3, device=batch.device),
    "tensor": lambda batch: torch.tensor([1.0, 2.0], device="cuda"),
    "tensor of one": lambda batch: torch.tensor(1.0, device=batch.device),
    "as_tensor": lambda batch: torch.as_tensor([1.0, 2.0], device="cuda"),
    "arange": lambda batch: torch.arange(5, device="cuda:0"),
    "randn": lambda batch: torch.randn(5, device="cuda"),
    "randperm": lambda batch: torch.randperm(5, device="cuda"),
    "zeros_like": lambda batch: torch.zeros_like(torch.ones(3), device="cuda"),
    "new_zeros": lambda batch: batch.new_zeros(3),
    "copy_": lambda batch: torch.empty(3, device="cuda").copy_(torch.ones(3)),
    "a parameter": lambda batch: nn.Parameter(torch.zeros(3, device="cuda")),
    "a module": lambda batch: nn.Linear(3, 3, device="cuda").weight,
    "with torch.device": lambda batch: inside_a_device_context(),
    "values with torch.device": lambda batch: values_inside_a_device_context(),
    "with torch.cuda.device": lambda batch: under_a_current_device(),
    "pinned": lambda batch: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "made pinned": lambda batch: torch.ones(3, pin_memory=True).cuda(),
    "drawn by a generator of the CPU": lambda batch: torch.randn(3, generator=torch.Generator().manual_seed(0)).cuda(),
}


class TestWaysToTheCard:
    def test_each_of_them_leads_there(self) -> None:
        (found,) = in_a_step(lambda model, batch: {way: is_on_card(make(batch)) for way, make in WAYS.items()})
        assert found == dict.fromkeys(WAYS, True)

    def test_what_names_no_device_stays_on_the_host(self) -> None:
        (found,) = in_a_step(lambda model, batch: [is_on_card(t) for t in (torch.ones(3), batch.cpu(), batch)])
        assert found == [False, False, True]

    def test_the_hosts_tensors_take_nothing_of_the_card(self) -> None:
        run = traced(
            make_linear(loss=lambda model, batch: mean_square(model, batch + 0 * torch.ones(1000).sum().cuda()))
        )
        assert max(b.num_bytes for b, _ in run.log.changes if b.part != "workspaces") < 4000

    @pytest.mark.parametrize(
        "build",
        [
            lambda: nn.Linear(8, 1).cuda(),
            lambda: nn.Linear(8, 1).to("cuda"),
            lambda: nn.Linear(8, 1, device="cuda"),
            lambda: nn.Sequential(nn.Linear(8, 4).to(0), nn.Linear(4, 1).cuda()),
        ],
        ids=["cuda", "to", "device", "to a number"],
    )
    def test_a_model_may_be_built_there(self, build: Callable[[], nn.Module]) -> None:
        (found,) = in_a_step(lambda model, _: [is_on_card(p) for p in model.parameters()], model=build)
        assert found
        assert all(found)

    def test_buffers_and_plain_attributes_too(self) -> None:
        class Shifted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 1).cuda()
                self.places: torch.Tensor
                self.register_buffer("places", torch.arange(8, device="cuda"))
                self.scale = torch.tensor([2.0], device="cuda")

            def forward(self, given: torch.Tensor) -> Any:
                return self.linear(given + self.places) * self.scale

        def ask(model: Any, _: torch.Tensor) -> list[bool]:
            return [is_on_card(model.places), is_on_card(model.scale)]

        (found,) = in_a_step(ask, model=Shifted)
        assert found == [True, True]

    @pytest.mark.parametrize(
        "batch", [lambda n: torch.randn(n, 8).cuda(), lambda n: torch.randn(n, 8, device="cuda")], ids=["moved", "made"]
    )
    def test_a_batch_may_be_made_there(self, batch: Callable[[int], torch.Tensor]) -> None:
        assert in_a_step(lambda _, inputs: is_on_card(inputs), batch=batch) == [True]

    def test_tensors_of_host_and_card_do_not_mix(self) -> None:
        with pytest.raises(RuntimeError, match=r"same device|two different devices"):
            in_a_step(lambda model, batch: batch + torch.ones(8))

    def test_values_may_be_put_beside_a_tensor(self) -> None:
        assert in_a_step(lambda model, batch: is_on_card(batch.new_tensor([1.0, 2.0]))) == [True]

    @pytest.mark.parametrize(
        "move", [lambda t, _: t.cuda(), lambda t, batch: t.to(batch.device)], ids=["cuda", "to the batch"]
    )
    def test_a_tensor_from_outside_may_be_moved_in_the_step(
        self, move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        outside = torch.ones(8)
        assert in_a_step(lambda model, batch: is_on_card(move(outside, batch))) == [True]

    def test_values_that_want_a_gradient_are_a_leaf(self) -> None:
        made = in_a_step(lambda model, batch: torch.tensor([1.0], device="cuda", requires_grad=True).is_leaf)
        assert made == [True]

    def test_a_generator_of_the_card_may_be_made(self) -> None:
        def draw(_: nn.Module, __: torch.Tensor) -> bool:
            generator = torch.Generator("cuda").manual_seed(0)
            return is_on_card(torch.randn(3, generator=generator, device="cuda"))

        assert in_a_step(draw) == [True]


class TestAModuleThatIsMoved:
    @pytest.mark.parametrize(
        "move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to(torch.device("cuda", 0))]
    )
    def test_the_workloads_own_model_is_there_already(self, move: Callable[[nn.Module], nn.Module]) -> None:
        moved = traced(make_linear(loss=lambda model, batch: mean_square(move(model), batch.to("cuda"))), steps=2)
        assert moved.peaks == traced(make_linear(), steps=2).peaks

    def test_one_of_the_host_takes_its_bytes_of_the_card_and_gives_them_back(self) -> None:
        def move(_: nn.Module, __: torch.Tensor) -> list[int]:
            model, before = nn.Linear(64, 128, bias=False), torch.cuda.memory_allocated()
            taken = []
            for there in (model.cpu, model.cuda, model.cuda, model.half, model.cpu):
                there()
                taken.append(torch.cuda.memory_allocated() - before)
            return taken

        assert in_a_step(move) == [[0, 32 * KIB, 32 * KIB, 16 * KIB, 0]]

    def test_it_keeps_its_parameters_and_their_gradients(self) -> None:
        def move(_: nn.Module, __: torch.Tensor) -> tuple[Any, ...]:
            model = nn.Linear(8, 4)
            weight = model.weight
            model(torch.ones(2, 8)).sum().backward()
            model.to("cuda", torch.float64)
            assert weight.grad is not None
            return (
                weight is model.weight,
                weight.is_leaf,
                is_on_card(weight),
                is_on_card(weight.grad),
                weight.grad.dtype,
            )

        assert in_a_step(move) == [(True, True, True, True, torch.float64)]


class TestOldNamesOfTypes:
    def test_lead_to_the_card_and_back(self) -> None:
        def cast(_: nn.Module, batch: torch.Tensor) -> tuple[Any, ...]:
            made = torch.ones(3).type("torch.cuda.HalfTensor")
            back = made.type("torch.LongTensor")
            return (
                is_on_card(made),
                made.dtype,
                made.type(),
                is_on_card(back),
                back.type(),
                batch.type(torch.float64).dtype,
            )

        found = (True, torch.float16, "torch.cuda.HalfTensor", False, "torch.LongTensor", torch.float64)
        assert in_a_step(cast) == [found]

    def test_are_types_of_what_lies_there(self) -> None:
        def ask(_: nn.Module, batch: torch.Tensor) -> tuple[Any, ...]:
            kind: Any = getattr(torch.cuda, "FloatTensor")  # noqa: B009 - mypy knows no such name
            made = kind(3, 2)
            valued = kind([1.0, 2.0])
            return (
                isinstance(batch, kind),
                isinstance(batch.cpu(), kind),
                made.shape,
                is_on_card(made),
                is_on_card(valued),
            )

        assert in_a_step(ask) == [(True, False, (3, 2), True, True)]


class TestInsideBackward:
    def test_a_function_of_the_users_own_is_led_there_too(self) -> None:
        found = []

        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
                return given * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                found.append(is_on_card(torch.ones(1, device="cuda")))
                return gradient * 2

        doubled: Any = Doubled.apply
        traced(make_linear(loss=lambda model, batch: doubled(model(batch)).mean()))
        assert found == [True]

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_a_forward_that_runs_again_is_led_there_too(self, use_reentrant: bool) -> None:
        def forward(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (model(given) + torch.ones(1, device="cuda")).exp()
            return result

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(forward, model, batch.requires_grad_(), use_reentrant=use_reentrant)
            return result.mean()

        traced(make_linear(loss=loss))


class TestWhatATensorSays:
    def test_that_it_is_on_cuda(self) -> None:
        assert in_a_step(lambda model, batch: (batch.is_cuda, next(model.parameters()).is_cuda)) == [(True, True)]

    def test_that_its_device_is_cuda_0(self) -> None:
        assert in_a_step(lambda model, batch: (batch.device.type, str(batch.device))) == [("cuda", "cuda:0")]

    def test_the_number_of_its_device_and_that_it_lies_beside_the_weights(self) -> None:
        (found,) = in_a_step(lambda model, batch: (batch.get_device(), batch.device == model.weight.device))
        assert found == (0, True)

    def test_on_the_host_the_contrary(self) -> None:
        (found,) = in_a_step(lambda model, batch: (torch.ones(1).is_cuda, batch.cpu().device.type))
        assert found == (False, "cpu")


class TestWhatTorchCudaSays:
    def test_that_there_is_one_card_and_which(self) -> None:
        def ask(_: nn.Module, __: torch.Tensor) -> tuple[Any, ...]:
            cuda = torch.cuda
            properties = cuda.get_device_properties(0)
            assert properties.total_memory == find_card("a100-40gb").total_bytes
            assert (properties.major, properties.minor, properties.multi_processor_count) == (8, 0, 108)
            assert properties.name == cuda.get_device_name(0) == "NVIDIA A100 40GB"
            return cuda.is_available(), cuda.device_count(), cuda.current_device(), cuda.get_device_capability()

        assert in_a_step(ask) == [(True, 1, 0, (8, 0))]

    @pytest.mark.parametrize(("card", "has"), [("a100-40gb", True), ("v100-16gb", False)])
    def test_which_number_formats_it_knows(self, card: str, has: bool) -> None:
        said = []

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            said.append(torch.cuda.is_bf16_supported(including_emulation=False))
            return mean_square(model, batch)

        traced(make_linear(loss=loss), card=card)
        assert said == [has]

    def test_what_is_taken_rises_and_falls_within_a_step(self) -> None:
        def ask(_: nn.Module, __: torch.Tensor) -> None:
            cuda = torch.cuda
            before, peak = cuda.memory_allocated(), cuda.max_memory_allocated()
            assert 0 < before <= peak <= cuda.memory_reserved()
            taken = torch.empty(64 * KIB, device="cuda", dtype=torch.uint8)
            assert cuda.memory_allocated() - before == 64 * KIB
            assert cuda.max_memory_allocated() >= before + 64 * KIB
            del taken
            assert cuda.memory_allocated() == before
            cuda.reset_peak_memory_stats()
            assert cuda.max_memory_allocated() == before
            assert cuda.memory_stats()["allocated_bytes.all.current"] == before

        in_a_step(ask)

    def test_what_is_free_on_a_card_as_it_is(self) -> None:
        said = []

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            said.append((*torch.cuda.mem_get_info(), torch.cuda.memory_reserved()))
            return mean_square(model, batch)

        card = SimulatedCard(find_card("t4-16gb"))
        trace_workload(make_linear(loss=loss), 8, steps=1, card=card)
        ((free, total, reserved),) = said
        assert total == find_card("t4-16gb").total_bytes
        assert free == total - card.context.typical_bytes - reserved

    def test_no_more_is_free_than_there_is(self) -> None:
        ((free, total),) = in_a_step(lambda model, batch: torch.cuda.mem_get_info())
        assert free < total

    def test_streams_and_events_order_nothing(self) -> None:
        def run(_: nn.Module, batch: torch.Tensor) -> tuple[Any, ...]:
            stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
            start.record()
            with torch.cuda.stream(stream):
                doubled = batch * 2
            stream.wait_stream(torch.cuda.current_stream())
            end.record(stream)
            end.synchronize()
            torch.cuda.synchronize()
            return is_on_card(doubled), start.elapsed_time(end), end.query()

        assert in_a_step(run) == [(True, 0.0, True)]

    def test_seeds_and_random_states_are_taken(self) -> None:
        def run(_: nn.Module, __: torch.Tensor) -> torch.dtype:
            torch.manual_seed(0)
            torch.cuda.manual_seed_all(0)
            state = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state)
            return state.dtype

        assert in_a_step(run) == [torch.uint8]

    @pytest.mark.parametrize("name", ["CUDAGraph", "graph", "make_graphed_callables"])
    def test_graphs_are_refused(self, name: str) -> None:
        with pytest.raises(CannotTraceError, match="CUDA graph"):
            in_a_step(lambda model, batch: getattr(torch.cuda, name)(None))

    @pytest.mark.parametrize(
        "call",
        [
            lambda batch: torch.cuda.memory.memory_allocated() > 0,
            lambda batch: "allocated" in torch.cuda.memory_summary().lower(),
            lambda batch: torch.cuda.memory_stats()["num_alloc_retries"] == 0,
            lambda batch: [torch.cuda.set_per_process_memory_fraction(0.5)] == [None],  # type: ignore[func-returns-value]
            lambda batch: torch.cuda.nvtx.range_push("here") is not None,
            lambda batch: batch.record_stream(torch.cuda.current_stream()) is None,
        ],
        ids=["memory.memory_allocated", "memory_summary", "memory_stats", "fraction", "nvtx", "record_stream"],
    )
    def test_what_else_training_loops_call(self, call: Callable[[torch.Tensor], bool]) -> None:
        assert in_a_step(lambda model, batch: call(batch)) == [True]


class TestTheStep:
    def test_optimizers_take_their_multi_tensor_form(self) -> None:
        found = operators(traced(make_mlp()), "optimizer")
        assert any(name.startswith("aten._foreach_") for name in found)
        on_host = operators(trace_workload(make_mlp(), 8, steps=1), "optimizer")
        assert not any(name.startswith("aten._foreach_") for name in on_host)

    def test_a_gradient_scaler_is_enabled_and_steps(self) -> None:
        enabled: list[bool] = []

        def scaler() -> torch.amp.GradScaler:
            made = torch.amp.GradScaler("cuda")
            enabled.append(made.is_enabled())
            return made

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda"):
                return mean_square(model, batch)

        run = traced(make_mlp(loss=loss, scaler=scaler), steps=2)
        assert enabled == [True]
        parts = {block.part for block, _ in run.log.changes}
        assert "optimizer" in parts, "AdamW has its moments, so it stepped"

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointing_runs_the_forward_again_in_backward(self, use_reentrant: bool) -> None:
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

            def forward(self, given: torch.Tensor) -> Any:
                return checkpoint(self.body, given.requires_grad_(), use_reentrant=use_reentrant)

        run = traced(make_linear(model=Checkpointed))
        again = [b for b, change in run.log.changes if b.is_recomputed and b.operator == "aten.addmm" and change > 0]
        assert again
        assert {b.phase for b in again} == {"backward"}

    def test_dropout_keeps_a_mask_of_bytes(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(model(batch), 0.5).mean()

        changes = traced(make_linear(loss=loss), 1000).log.changes
        dropped = [b.num_bytes for b, change in changes if change > 0 and b.operator == "aten.native_dropout"]
        assert sorted(dropped) == [1000, 4000]

    def test_a_number_that_was_put_on_the_card_can_be_read_back(self) -> None:
        (found,) = in_a_step(lambda model, batch: (torch.tensor(3.0, device="cuda").item(), bool(torch.ones(1).cuda())))
        assert found == (3.0, True)


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_torch_is_as_it_was(fails: bool) -> None:
    def names() -> dict[str, Any]:
        asked = ("is_available", "memory_allocated", "Stream", "graph", "device", "current_stream", "mem_get_info")
        return {name: getattr(torch.cuda, name) for name in asked} | {
            "autocast": torch.is_autocast_enabled,
            "backward": torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
            "hooks": torch.autograd.graph.saved_tensors_hooks.__init__,
            "foreach": tuple(torch.utils._foreach_utils._foreach_supported_types),
        }

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if fails:
            raise LookupError("mine")
        return mean_square(model, batch)

    before, state = names(), torch.get_rng_state()
    try:
        traced(make_linear(loss=loss))
    except LookupError:
        assert fails
    assert names() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.cuda.is_available()
    assert (torch.get_default_device().type, torch.zeros(2).device.type) == ("cpu", "cpu")
    assert torch.accelerator.is_available() is False
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to("cuda:1"),
        lambda x: x.to(1),
        lambda x: x.cuda(1),
        lambda x: x + torch.zeros(1, device="cuda:1"),
        lambda x: x + torch.zeros(1, device=torch.device("cuda", 1)),
    ],
)
def test_a_second_card_is_not_there(move: Any) -> None:
    workload = bw.Workload(
        model=lambda: nn.Linear(4, 4), batch=lambda n: torch.randn(n, 4), loss=lambda model, x: model(move(x)).sum()
    )
    with pytest.raises(RuntimeError, match="asks for cuda:1, and one card is simulated"):
        bw.estimate(workload, micro_batch=2, on="a100-40gb")
