"""The trace against the run it stands for: the profiler's memory events are the oracle."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchwright as bw
from batchwright.device.step import StepSettings
from batchwright.errors import InvalidInputError
from batchwright.memory.breakdown import break_down, part_of
from batchwright.trace.run import trace_workload
from tests.device.test_counted_bytes import profiled_peak_bytes
from tests.device.workloads import SmallTransformer, make_linear, make_mlp, make_transformer, mean_square, run_probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.trace.storages import Block
    from batchwright.workload import Workload

# Numbers that Python hands to an operator, and a few bytes of the profiler's own: no tensor of the user's.
FEW_BYTES = 64


def predicted(workload: Workload, micro_batch: int, **settings: Any) -> int:
    return break_down(trace_workload(workload, micro_batch, StepSettings(**settings)).log).peak_bytes


def really(workload: Workload, micro_batch: int, **settings: Any) -> int:
    step = StepSettings(**settings)
    return profiled_peak_bytes(lambda: run_probe(workload, micro_batch, step, device=torch.device("cpu")))


def blocks_of(workload: Workload, micro_batch: int = 4, **options: Any) -> list[Block]:
    return list(dict.fromkeys(block for block, _ in trace_workload(workload, micro_batch, **options).log.changes))


def num_bytes(blocks: list[Block], part: str) -> int:
    return sum(block.num_bytes for block in blocks if part_of(block) == part)


def parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "two": lambda params: [torch.optim.AdamW(params[:3]), torch.optim.SGD(params[3:], lr=0.1, momentum=0.9)],
}


class TestThePeakIsTheRealOne:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_of_an_mlp_under_every_optimizer(self, name: str) -> None:
        workload = make_mlp(optimizer=OPTIMIZERS[name])
        assert predicted(workload, 4) == pytest.approx(really(workload, 4), abs=FEW_BYTES)

    @pytest.mark.parametrize("name", ["SGD", "AdamW"])
    def test_of_an_mlp_to_the_byte_where_it_comes_in_backward(self, name: str) -> None:
        workload = make_mlp(optimizer=OPTIMIZERS[name])
        assert predicted(workload, 512) == really(workload, 512)

    def test_of_a_transformer_to_the_byte(self) -> None:
        assert predicted(make_transformer(), 8) == really(make_transformer(), 8)

    @pytest.mark.parametrize("options", [{"accumulation": 3}, {"accumulation": 2, "clip_norm": 1.0}])
    def test_with_accumulation_and_clipping(self, options: dict[str, Any]) -> None:
        assert predicted(make_mlp(), 256, **options) == pytest.approx(really(make_mlp(), 256, **options), abs=FEW_BYTES)

    @pytest.mark.parametrize("clip_norm", [None, 1.0])
    def test_with_a_gradient_scaler(self, clip_norm: float | None) -> None:
        workload = make_mlp(scaler=lambda: torch.amp.GradScaler("cpu"))
        real = really(workload, 16, clip_norm=clip_norm)
        assert predicted(workload, 16, clip_norm=clip_norm) == pytest.approx(real, abs=FEW_BYTES)

    def test_under_autocast(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return mean_square(model, batch)

        workload = make_mlp(loss=loss)
        assert predicted(workload, 500) == pytest.approx(really(workload, 500), abs=FEW_BYTES)
        # Not the peaks: what bf16 saves, a processor's kernels may take as scratch.
        assert {block.num_bytes for block in blocks_of(workload, 500) if block.shape == (500, 512)} == {500 * 512 * 2}

    @pytest.mark.parametrize(
        "changes",
        [
            {"generate": lambda model, batch: [model(batch.repeat(8, 1)) for _ in range(2)]},
            {"evaluate": lambda model, batch: model(batch.repeat(8, 1)).sum()},
            {"optimizer": None},
            {"optimizer": None, "loss": None, "evaluate": lambda model, batch: model(batch)},
            {"optimizer": None, "loss": None, "generate": lambda model, batch: model(batch)},
        ],
        ids=["train and generate", "train and evaluate", "inference", "evaluate only", "generate only"],
    )
    def test_with_generation_evaluation_and_inference_only(self, changes: dict[str, Any]) -> None:
        workload = make_mlp(**changes)
        assert predicted(workload, 256) == pytest.approx(really(workload, 256), abs=FEW_BYTES)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_of_a_checkpointed_model(self, use_reentrant: bool) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return mean_square(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), batch.requires_grad_())  # type: ignore[arg-type]

        workload = make_mlp(loss=loss)
        # Each checkpoint keeps the state of the random generator, of which a fake run knows nothing.
        kept = torch.get_rng_state().nbytes
        assert predicted(workload, 512) == pytest.approx(really(workload, 512), abs=kept + FEW_BYTES)


class TestParts:
    def test_weights_gradients_and_adam_state_are_the_parameters_once_once_and_twice(self) -> None:
        size = parameter_bytes(make_mlp().model())
        blocks = blocks_of(make_mlp(), steps=1)
        assert num_bytes(blocks, "weights") == size
        assert num_bytes(blocks, "gradients") == size
        counters = 6 * 4
        assert num_bytes(blocks, "optimizer") == 2 * size + counters

    def test_sgd_keeps_nothing_and_momentum_one_copy(self) -> None:
        size = parameter_bytes(make_mlp().model())
        plain, momentum = (make_mlp(optimizer=OPTIMIZERS[name]) for name in ("SGD", "SGD with momentum"))
        assert num_bytes(blocks_of(plain), "optimizer") == 0
        assert num_bytes(blocks_of(momentum), "optimizer") == size

    def test_inputs_are_the_batch(self) -> None:
        blocks = blocks_of(make_mlp(), 32, steps=1)
        assert num_bytes(blocks, "inputs") == 32 * 256 * 4

    def test_buffers_count_as_weights(self) -> None:
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

        model = build()
        size = parameter_bytes(model) + sum(b.numel() * b.element_size() for b in model.buffers())
        assert num_bytes(blocks_of(make_linear(model=build)), "weights") == size

    def test_tied_weights_count_once(self) -> None:
        def build() -> nn.Module:
            model = SmallTransformer()
            model.head.weight = model.embed.weight
            return model

        model = build()
        blocks = blocks_of(make_transformer(model=build), steps=1)
        assert num_bytes(blocks, "weights") == parameter_bytes(model) < parameter_bytes(SmallTransformer())
        live = blocks_of(make_transformer(model=model), steps=1)
        assert num_bytes(live, "weights") == parameter_bytes(model)

    def test_frozen_weights_have_neither_gradients_nor_state(self) -> None:
        def build() -> nn.Module:
            model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 16))
            model[0].requires_grad_(False)
            return model

        blocks = blocks_of(make_mlp(model=build), steps=1)
        trained = (512 * 16 + 16) * 4
        assert num_bytes(blocks, "gradients") == trained
        assert num_bytes(blocks, "optimizer") == 2 * trained + 2 * 4

    def test_inference_has_no_gradients_and_keeps_no_activations(self) -> None:
        blocks = blocks_of(make_mlp(optimizer=None))
        assert {part_of(block) for block in blocks} == {"weights", "inputs", "temporaries"}

    def test_the_state_of_each_optimizer_is_recognised(self) -> None:
        blocks = blocks_of(make_mlp(optimizer=OPTIMIZERS["two"]), steps=1)
        sizes = [p.numel() * 4 for p in make_mlp().model().parameters()]
        assert num_bytes(blocks, "optimizer") == 2 * sum(sizes[:3]) + sum(sizes[3:]) + 3 * 4

    def test_what_checkpointing_recomputes_is_an_activation(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(model, batch, use_reentrant=False)
            return out.pow(2).mean()

        blocks = blocks_of(make_mlp(loss=loss), 64, steps=1)
        again = [block for block in blocks if block.is_recomputed]
        assert {part_of(block) for block in again} == {"activations"}
        assert {block.phase for block in again} == {"backward"}
        assert {(block.module, block.operator) for block in again} >= {("1", "aten.relu"), ("3", "aten.relu")}
        plain = blocks_of(make_mlp(), 64, steps=1)
        assert not any(block.is_recomputed for block in plain)


class TestOwners:
    def test_forward_names_the_module_and_the_operator(self) -> None:
        blocks = blocks_of(make_transformer(), steps=1)
        forward = {(block.module, block.operator) for block in blocks if block.phase == "forward"}
        assert ("embed", "aten.embedding") in forward
        assert ("encoder.layers.1.linear1", "aten.addmm") in forward
        assert ("", "aten._log_softmax") in forward, "the loss belongs to no module"

    def test_backward_is_laid_at_the_door_of_the_module_that_ran_forward(self) -> None:
        blocks = blocks_of(make_mlp(), 64, steps=1)
        backward = {(block.module, block.operator) for block in blocks if block.phase == "backward"}
        assert {("1", "aten.threshold_backward"), ("3", "aten.threshold_backward"), ("2", "aten.mm")} <= backward

    def test_gradients_and_state_bear_the_name_of_their_parameter(self) -> None:
        blocks = blocks_of(make_mlp(), steps=1)
        names = {name for name, _ in make_mlp().model().named_parameters()}
        for part, operator in (("weights", "parameter"), ("gradients", "gradient"), ("optimizer", "state")):
            owners = {(block.module, block.operator) for block in blocks if part_of(block) == part}
            assert owners == {(name, operator) for name in names}

    def test_the_peak_of_a_wide_loss_is_in_the_backward_of_its_softmax(self) -> None:
        moment = break_down(trace_workload(make_transformer(), 64).log).moment
        assert (moment.phase, moment.operator) == ("backward", "aten._log_softmax_backward_data")


class TestNothingIsChanged:
    def test_a_live_module_is_untouched_bit_for_bit(self) -> None:
        torch.manual_seed(0)
        model = SmallTransformer()
        model.encoder.layers[0].eval()
        model.embed.requires_grad_(False)
        model.head.weight.grad = torch.full_like(model.head.weight, 0.5)
        before = copy.deepcopy(model.state_dict())
        objects = {name: id(parameter) for name, parameter in model.named_parameters()}
        modes = [module.training for module in model.modules()]
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        random = torch.get_rng_state()
        trace_workload(make_transformer(model=model), 4)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == objects
        assert [module.training for module in model.modules()] == modes
        assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["embed.weight"]
        assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight"]
        assert model.head.weight.grad.eq(0.5).all()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    def test_modes_of_torch_come_back_after_an_error_too(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

        random, hooks = torch.get_rng_state(), len(torch.nn.modules.module._global_forward_pre_hooks)
        with pytest.raises(KeyError, match="mine"):
            trace_workload(make_mlp(loss=loss), 4)
        assert torch.equal(torch.get_rng_state(), random)
        assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
        assert torch.is_grad_enabled()
        assert torch.zeros(2).sum().item() == 0, "tensors are real again"

    def test_the_same_question_has_the_same_answer(self) -> None:
        assert len({predicted(make_mlp(), 32) for _ in range(3)}) == 1

    def test_a_live_module_and_a_function_that_builds_it_give_the_same_peak(self) -> None:
        live = SmallTransformer()
        assert predicted(make_transformer(model=live), 4) == predicted(make_transformer(), 4)


def test_what_a_model_reads_of_positions_it_has_made_itself_is_known() -> None:
    seen: list[bool] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        # As transformers does to see whether sequences are packed: 128 KiB, and none of it from the batch.
        positions = torch.arange(1024).expand(16, 1024)
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        seen.append(bool(((steps != 1).cumsum(-1)[:, -1] == 0).all()))
        out: torch.Tensor = model(batch).mean()
        return out

    trace_workload(make_mlp(loss=loss), 4)
    assert seen
    assert all(seen)


class TestNotes:
    def test_a_plain_run_has_none(self) -> None:
        assert trace_workload(make_mlp(), 4).notes == ()

    def test_a_constructor_that_reads_values_is_run_for_real_and_says_so(self) -> None:
        class Drops(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rates = torch.linspace(0, 1, 4).tolist()
                self.layer = nn.Linear(8, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.layer(x) * self.rates[2]
                return out

        run = trace_workload(make_linear(model=Drops), 4)
        assert any("built with real memory" in note for note in run.notes)
        assert break_down(run.log).peak_bytes == pytest.approx(really(make_linear(model=Drops), 4), abs=FEW_BYTES)

    def test_numbers_that_an_optimizer_reads_are_assumed_and_said(self) -> None:
        notes = trace_workload(make_mlp(optimizer=OPTIMIZERS["Adafactor"]), 4).notes
        assert notes == ("numbers that the optimizer reads from its tensors were taken as 1",)


class Experts(nn.Module):
    """Each token goes to one of four experts, chosen by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.one_hot(self.router(x).argmax(-1), num_classes=4)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen[:, number])
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class TestRouting:
    def make(self) -> Workload:
        return make_linear(model=Experts, batch=lambda n: torch.randn(n, 64))

    def rows(self, routing: str) -> set[int]:
        run = trace_workload(self.make(), 256, StepSettings(routing=routing))
        assert [note for note in run.notes if note.startswith(f"routing {routing}")]
        blocks = {block for block, _ in run.log.changes}
        return {b.shape[0] for b in blocks if b.module.startswith("experts") and b.operator == "aten.addmm"}

    def test_balanced_gives_each_expert_its_share(self) -> None:
        assert self.rows("balanced") == {64}

    def test_worst_gives_all_to_the_one_at_hand(self) -> None:
        assert self.rows("worst") == {256}

    def test_worst_needs_more_than_balanced_and_the_truth_lies_between(self) -> None:
        real = really(self.make(), 256)
        assert predicted(self.make(), 256, routing="balanced") < predicted(self.make(), 256, routing="worst")
        assert predicted(self.make(), 256, routing="balanced") * 0.98 <= real
        assert real <= predicted(self.make(), 256, routing="worst")

    def test_another_word_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="routing must be one of balanced, worst; received 'even'"):
            trace_workload(make_linear(), 4, StepSettings(routing="even"))


def test_a_module_that_the_step_makes_can_be_moved_and_cast() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made = nn.Linear(8, 8).to(batch.device).double().float()
        out: torch.Tensor = made(model(batch)).pow(2).mean()
        return out

    workload = bw.Workload(model=lambda: nn.Linear(8, 8), batch=lambda n: torch.randn(n, 8), loss=loss)
    assert bw.estimate(workload, micro_batch=4).peak_bytes.allocated
