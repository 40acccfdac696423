"""What the step reads from outside the workload: counted, named, and left as it was found."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import InvalidInputError, MixedDevicesError
from tests.trace.test_trace import predicted, really


def make(**changes: Any) -> bw.Workload:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(64, 64),
        "batch": lambda n: torch.randn(n, 64),
        "loss": lambda model, batch: model(batch).pow(2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return bw.Workload(**{**parts, **changes})


def test_a_module_closed_over_by_the_loss_is_counted_named_and_given_back() -> None:
    critic = nn.Linear(64, 64)
    critic.bias.grad = torch.ones(64)
    found = bw.estimate(make(loss=lambda model, batch: critic(model(batch)).pow(2).mean()), micro_batch=8)
    assert critic.weight.grad is None
    assert critic.bias.grad is not None
    assert torch.equal(critic.bias.grad, torch.ones(64))
    plain = bw.estimate(make(), micro_batch=8)
    assert (found.parts["weights"] or 0) - (plain.parts["weights"] or 0) == 64 * 64 * 4
    assert "from outside the workload was counted" in found.notes[0]
    assert "test_outside_tensors.py" in found.notes[0]


def test_the_random_states_of_python_and_numpy_come_back() -> None:
    before, numpy_before = random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    bw.estimate(make(loss=lambda m, b: m(b).mean() * (random.random() + np.random.rand())), micro_batch=2)
    assert random.getstate() == before
    assert (np.random.get_state()[1] == numpy_before).all()  # type: ignore[index]


class Holder(nn.Module):
    """Keeps tensors where nn.Module does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.listed, self.named = [torch.ones(64)], {"shift": torch.ones(64)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.listed[0] + self.named["shift"]
        return out


@pytest.mark.parametrize("model", [Holder, Holder()], ids=["built", "live"])
def test_tensors_in_lists_and_dicts_of_a_module_are_made_fake_too(model: Any) -> None:
    assert bw.estimate(make(model=model), micro_batch=8).notes == ()


@pytest.mark.parametrize("name", ["topk", "median"])
def test_backward_of_a_selection_writes_in_place(name: str) -> None:
    losses = {"topk": lambda m, b: m(b).topk(8, dim=-1)[0].mean(), "median": lambda m, b: m(b).median(dim=-1)[0].mean()}
    workload = make(loss=losses[name])
    assert predicted(workload, 512) == really(workload, 512)


def test_one_random_number_skips_no_layer() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        skipped = torch.rand([]) < 0.5
        out: torch.Tensor = batch.mean() if skipped else model(batch).mean()
        return out

    found = bw.estimate(make(loss=loss), micro_batch=4)
    assert any("layerdrop skips no layer" in note for note in found.notes)


def test_what_an_operator_hides_is_noted() -> None:
    found = bw.estimate(make(loss=lambda m, b: torch.linalg.svdvals(m(b)).sum()), micro_batch=64)
    assert any("is not seen" in note for note in found.notes)
    assert found.upper_bytes.allocated is None
    assert "a lower bound" in found._repr_html_()


def test_complex_numbers_are_noted() -> None:
    workload = make(model=lambda: nn.Linear(64, 64, dtype=torch.complex64), batch=lambda n: torch.ones(n, 64) * 1j)
    found = bw.estimate(dataclasses.replace(workload, loss=lambda m, b: m(b).abs().mean()), micro_batch=4)
    assert any("complex" in note for note in found.notes)


def test_a_batch_that_ignores_its_size_is_found_before_anything_is_traced() -> None:
    built: list[int] = []

    def build() -> nn.Module:
        built.append(1)
        return nn.Linear(64, 64)

    workload = make(batch=lambda n: torch.randn(4, 64), model=build)
    with pytest.raises(InvalidInputError, match="ignores its size"):
        bw.estimate(workload, micro_batch=4)
    assert built == []


@pytest.mark.parametrize("clip_norm", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_clip_norm_that_is_none_is_refused(clip_norm: float) -> None:
    with pytest.raises(InvalidInputError, match="clip norm must be a positive number"):
        bw.estimate(make(), clip_norm=clip_norm)


class TestOnASimulatedCard:
    """What the loss holds on the CPU is refused, as on a real card, and moving it there is the remedy."""

    @staticmethod
    def distil(teacher: nn.Module, *, moves: bool) -> bw.Workload:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            held = teacher.to(batch.device) if moves else teacher
            with torch.no_grad():
                target = held(batch)
            difference: torch.Tensor = model(batch) - target
            return difference.pow(2).mean()

        return make(loss=loss)

    @pytest.mark.parametrize("ask", [bw.estimate, bw.fit])
    def test_a_teacher_on_the_cpu_is_named_with_the_users_line(self, ask: Any) -> None:
        with pytest.raises(MixedDevicesError, match="mixes devices: aten") as caught:
            ask(self.distil(nn.Linear(64, 64), moves=False), on="t4-16gb")
        message = str(caught.value)
        assert "target = held(batch)" in message
        assert "teacher.to(batch.device)" in message
        assert "simulated:0" not in message

    def test_a_constant_on_the_cpu_is_refused_too(self) -> None:
        workload = make(loss=lambda model, batch: (model(batch) * torch.ones(64)).mean())
        with pytest.raises(MixedDevicesError, match=r"mixes devices: aten\.mul"):
            bw.estimate(workload, on="t4-16gb")

    def test_a_teacher_that_is_moved_is_followed_and_comes_back(self) -> None:
        teacher = nn.Linear(64, 64)
        weight = teacher.weight.detach().clone()
        assert bw.estimate(self.distil(teacher, moves=True), on="t4-16gb").fits
        assert teacher.weight.device.type == "cpu"
        assert torch.equal(teacher.weight, weight)
