"""One probe: its phases, what it checks, and that the user's own errors stay the user's own."""

from __future__ import annotations

import copy
import functools
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.device.step import DEFAULT_STEPS, PHASES, StepSettings, build_optimizers, evaluating, run_probe
from batchwright.errors import InvalidInputError
from batchwright.state.untouched import thrown_away, untouched
from batchwright.workload import Workload
from tests.device.workloads import make_linear, mean_square

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_to_give_back() -> Iterator[None]:
    with thrown_away():
        yield


CPU = torch.device("cpu")
STEP = ["batch", "forward", "backward", "optimizer"]


def phases_of(workload: Any, *, steps: int = DEFAULT_STEPS, accumulation: int = 1) -> list[str]:
    heard: list[str] = []
    run_probe(workload, 4, StepSettings(accumulation=accumulation), device=CPU, steps=steps, on_phase=heard.append)
    assert set(heard) <= set(PHASES)
    return heard


class TestPhases:
    def test_two_steps_of_training(self) -> None:
        assert phases_of(make_linear()) == ["build", *STEP, *STEP, "done"]

    def test_accumulation(self) -> None:
        window = ["batch", "forward", "backward"] * 3 + ["optimizer"]
        assert phases_of(make_linear(), accumulation=3, steps=1) == ["build", *window, "done"]

    def test_training_generates_and_evaluates_once_after_its_steps(self) -> None:
        workload = make_linear(generate=lambda model, batch: model(batch), evaluate=lambda model, batch: model(batch))
        after = ["batch", "generate", "batch", "evaluate"]
        assert phases_of(workload) == ["build", *STEP, *STEP, *after, "done"]

    def test_inference_generates_in_each_step(self) -> None:
        workload = make_linear(optimizer=None, generate=lambda model, batch: model(batch))
        step = ["batch", "forward", "batch", "generate"]
        assert phases_of(workload) == ["build", *step, *step, "done"]

    def test_inference_without_a_loss(self) -> None:
        workload = make_linear(optimizer=None, loss=None, evaluate=lambda model, batch: model(batch))
        assert phases_of(workload, steps=1) == ["build", "batch", "evaluate", "done"]

    def test_seconds_of_each_step(self) -> None:
        ticks = iter(range(100))
        assert run_probe(make_linear(), 4, device=CPU, steps=3, now=lambda: float(next(ticks))) == (1.0, 1.0, 1.0)


class TestWhatRuns:
    def test_training_steps_equal_a_plain_loop(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        twin = copy.deepcopy(model)
        data = torch.randn(4, 8)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(3):
                (mean_square(twin, data) / 3).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()

        run_probe(
            make_linear(model=model, batch=lambda n: data), 4, StepSettings(accumulation=3, clip_norm=0.01), device=CPU
        )

        assert torch.equal(model.weight, twin.weight)
        assert model.weight.grad is None

    def test_batch_receives_size_and_shape(self) -> None:
        asked: list[Any] = []

        def batch(n: int, seq_len: int = 1) -> torch.Tensor:
            asked.append((n, seq_len))
            return torch.ones(n, 8)

        run_probe(make_linear(batch=batch), 5, StepSettings({"seq_len": 7}), device=CPU, steps=1)
        assert asked == [(5, 7)]

    def test_optimizer_receives_only_what_is_trained(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        received: list[Any] = []

        def optimizer(params: Any) -> Any:
            received.extend(params)
            return torch.optim.SGD(received)

        run_probe(make_linear(model=model, optimizer=optimizer), 4, device=CPU)
        assert [id(p) for p in received] == [id(p) for p in model[1].parameters()]

    def test_several_optimizers_all_step(self) -> None:
        model = nn.Linear(8, 1)
        before = copy.deepcopy(model.state_dict())

        def optimizers(params: Any) -> Any:
            weight, bias = params
            return [torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.1)]

        run_probe(make_linear(model=model, optimizer=optimizers), 4, device=CPU)
        assert not torch.equal(model.weight, before["weight"])
        assert not torch.equal(model.bias, before["bias"])

    @pytest.mark.parametrize("clip_norm", [None, 0.5])
    def test_scaler_scales_steps_and_updates(self, clip_norm: float | None) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        run_probe(make_linear(scaler=lambda: scaler), 4, StepSettings(clip_norm=clip_norm), device=CPU)
        assert scaler.get_scale() == 16.0

    def test_gradients_are_unscaled_before_they_are_clipped(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        twin = copy.deepcopy(model)
        data = torch.randn(4, 8)
        run_probe(make_linear(model=twin, batch=lambda n: data), 4, StepSettings(clip_norm=1.0), device=CPU)
        scaled = make_linear(
            model=model, batch=lambda n: data, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)
        )
        run_probe(scaled, 4, StepSettings(clip_norm=1.0), device=CPU)
        assert torch.allclose(model.weight, twin.weight)

    def test_nothing_of_a_step_lives_into_the_next(self) -> None:
        made: list[weakref.ref[torch.Tensor]] = []

        def batch(n: int) -> torch.Tensor:
            assert all(earlier() is None for earlier in made)
            data = torch.randn(n, 8)
            made.append(weakref.ref(data))
            return data

        def generate(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return mean_square(model, batch)

        run_probe(make_linear(batch=batch, generate=generate), 4, StepSettings(accumulation=2), device=CPU)
        run_probe(make_linear(batch=batch, optimizer=None, generate=generate), 4, device=CPU)
        assert len(made) == 5 + 4

    def test_inference_makes_no_gradients_and_is_in_eval_mode(self) -> None:
        model = nn.Linear(8, 1)
        seen: list[tuple[bool, bool]] = []

        def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = model(batch)
            seen.append((output.requires_grad, model.training))
            return output

        run_probe(make_linear(model=model, optimizer=None, loss=forward, generate=forward), 4, device=CPU, steps=1)
        assert seen == [(False, False)] * 2
        assert model.training

    def test_a_model_in_eval_mode_trains(self) -> None:
        # As from_pretrained hands it out.
        model = nn.Sequential(nn.Linear(8, 1), nn.Dropout()).eval()
        run_probe(make_linear(model=model), 4, device=CPU)
        assert model[1].training

    def test_evaluating_gives_each_module_its_own_mode_back(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[1].eval()
        with evaluating(model):
            assert not any(module.training for module in model.modules())
        with pytest.raises(ZeroDivisionError), evaluating(model):
            raise ZeroDivisionError
        assert [module.training for module in model.modules()] == [True, True, False]

    def test_the_model_is_built_where_it_is_asked_to_be(self) -> None:
        built_on: list[torch.device] = []

        def build(workload: Any, device: torch.device) -> nn.Module:
            built_on.append(device)
            return nn.Linear(8, 1).double()

        run_probe(make_linear(batch=lambda n: torch.ones(n, 8).double()), 4, device=CPU, build=build)
        assert built_on == [CPU]


class TestWrongWorkloads:
    def complaint(self, micro_batch: int = 4, **changes: Any) -> str:
        with pytest.raises(InvalidInputError) as raised:
            run_probe(make_linear(**changes), micro_batch, device=CPU)
        return str(raised.value)

    def test_loss_is_no_scalar(self) -> None:
        text = self.complaint(loss=lambda model, batch: model(batch))
        assert "received one of shape (4, 1)" in text
        assert "try: loss.mean()" in text

    def test_loss_is_no_tensor(self) -> None:
        assert "received float" in self.complaint(loss=lambda model, batch: mean_square(model, batch).item())

    def test_loss_is_a_models_whole_output(self) -> None:
        text = self.complaint(loss=lambda model, batch: SimpleNamespace(loss=mean_square(model, batch)))
        assert "it has a .loss, return that" in text

    def test_loss_has_no_gradient(self) -> None:
        text = self.complaint(loss=lambda model, batch: mean_square(model, batch).detach())
        assert "does not require a gradient" in text

    def test_batch_ignores_its_size(self) -> None:
        text = self.complaint(batch=lambda n: torch.ones(32, 8))
        assert "asked for 4 samples, received tensors of 32" in text

    def test_optimizer_over_no_parameters(self) -> None:
        text = self.complaint(model=lambda: nn.Linear(8, 1).requires_grad_(False))
        assert "none of the model's parameters requires a gradient" in text

    def test_optimizer_of_another_model(self) -> None:
        text = self.complaint(optimizer=lambda params: torch.optim.SGD(nn.Linear(8, 1).parameters()))
        assert "holds none of the 2 parameters" in text

    @pytest.mark.parametrize("made", [None, "adam", [3]])
    def test_no_optimizer(self, made: Any) -> None:
        assert "must return an optimizer" in self.complaint(optimizer=lambda params: made)

    def test_no_model(self) -> None:
        assert "model= must be a module" in self.complaint(model=lambda: "gpt2")

    def test_micro_batch_below_one(self) -> None:
        assert "micro-batch must be a whole number" in self.complaint(micro_batch=0)


@pytest.mark.parametrize("part", ["model", "batch", "loss", "optimizer", "generate", "evaluate", "scaler"])
def test_the_users_own_error_propagates_untouched(part: str) -> None:
    mistake = LookupError("mine")

    def fail(*_: Any) -> Any:
        raise mistake

    with pytest.raises(LookupError) as raised:
        run_probe(make_linear(**{part: fail}), 4, device=CPU)
    assert raised.value is mistake
    assert raised.traceback[-1].name == "fail"


def test_inference_that_never_calls_the_model_is_refused() -> None:
    workload = Workload(model=nn.Linear(2, 1), batch=lambda n: torch.ones(n, 2), loss=lambda model, batch: batch.sum())
    with pytest.raises(InvalidInputError, match="did nothing with the model"):
        run_probe(workload, 2, device=torch.device("cpu"))
    assert isinstance(workload.model, nn.Module)
    assert not workload.model._forward_pre_hooks


def test_a_step_that_trains_nothing_is_refused() -> None:
    other = nn.Linear(2, 1)
    workload = Workload(
        model=lambda: nn.Linear(2, 1),
        batch=lambda n: torch.ones(n, 2),
        loss=lambda model, batch: other(batch).sum(),
        optimizer=lambda params: torch.optim.SGD(params),
    )
    with pytest.raises(InvalidInputError, match="trained nothing"):
        run_probe(workload, 2, device=torch.device("cpu"))


class Configured(nn.Sequential):
    """As small GPTs do it: the model says itself what decays."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.LayerNorm(4))

    def configure_optimizers(self, decay: float) -> torch.optim.Optimizer:
        return by_name(list(self.named_parameters()), decay)


def by_name(named: list[tuple[str, nn.Parameter]], decay: float = 0.1) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": decay},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "sizes"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), [4]),
        (torch.optim.Adam, [4]),
        (lambda model: model.configure_optimizers(0.1), [2, 2]),
        (lambda model: [torch.optim.SGD(part.parameters(), lr=0.1) for part in model], [2, 2]),
        (lambda named_parameters: by_name(named_parameters), [2, 2]),
        (functools.partial(by_name, decay=0.5), [2, 2]),
        (lambda named_params: torch.optim.SGD(named_params, lr=0.1), [4]),
    ],
)
def test_an_optimizer_is_handed_what_its_argument_names(optimizer: Any, sizes: list[int]) -> None:
    workload = bw.Workload(
        model=Configured,
        batch=lambda n: torch.ones(n, 4),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=optimizer,
    )
    optimizers = build_optimizers(workload, Configured())
    assert [len(group["params"]) for each in optimizers for group in each.param_groups] == sizes
    assert bw.estimate(workload, on="cpu").parts["weights"] == 4 * (16 + 4 + 4 + 4)
    assert bw.estimate(workload, on="a100-40gb").fits


class SteppedInBackward(torch.optim.SGD):
    """A step of its own for each parameter, as soon as its gradient is there."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.0)
        self.steps: list[int] = []
        self.optimizers = {parameter: torch.optim.AdamW([parameter], fused=True) for parameter in params}
        for parameter in params:
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: torch.Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_an_optimizer_that_steps_in_backward_is_there_once() -> None:
    model = nn.Linear(8, 1)
    workload = make_linear(model=lambda: model, optimizer=lambda params: SteppedInBackward(params))
    with untouched(workload):
        build_optimizers(workload, model)
        assert [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()] == [1, 1]


@pytest.mark.parametrize("on", ["cpu", "a100-40gb"])
def test_an_optimizer_that_steps_in_backward_is_traced(on: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(1000), *(nn.Linear(1000, 1000) for _ in range(3)))

    def peak_of(optimizer: Any) -> int:
        workload = make_linear(model=build, batch=lambda n: torch.randn(n, 1000), optimizer=optimizer)
        peak = bw.estimate(workload, on=on).peak_bytes.allocated
        assert peak is not None
        return peak

    apart = peak_of(lambda params: SteppedInBackward(params))
    # The gradients of two layers of three are gone when the last one's is there.
    assert 7_000_000 < peak_of(lambda params: torch.optim.AdamW(params, fused=True)) - apart < 9_000_000
