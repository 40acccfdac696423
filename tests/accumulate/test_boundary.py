"""At the end of a window, once and in this order: unscale, clip, step, scheduler, zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.errors import InvalidInputError
from tests.accumulate.tagging import Watched, count_tokens, make_batches, make_tagger, token_loss
from tests.oracle.big_batch import big_batch_gradient, relative_error

INFINITE = "the scaler found an infinite or undefined gradient"


def epoch(accumulator: Accumulator, sizes: list[int], *, factors: dict[int, float] | None = None) -> list[Any]:
    """Train over micro-batches of these sizes; a factor makes the loss of one of them what it is not."""
    steps = []
    for index, batch in enumerate(accumulator.micro_batches(make_batches(sizes), count_tokens)):
        factor = (factors or {}).get(index, 1.0)
        step = accumulator.backward(token_loss(accumulator.model, batch) * factor)
        steps += [step] if step else []
    return steps


@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_the_gradient_of_the_window_is_clipped_as_torch_does(clip_norm: float) -> None:
    model = make_tagger()
    optimizer = Watched(model)
    reference = big_batch_gradient(model, make_batches([2, 3, 1]), token_loss)
    (step,) = epoch(Accumulator(model, optimizer, 3, clip_norm=clip_norm), [2, 3, 1])
    weights = [nn.Parameter(gradient.clone()) for gradient in reference]
    for weight, gradient in zip(weights, reference, strict=True):
        weight.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(weights, clip_norm)
    assert relative_error(optimizer.seen[0], [weight.grad for weight in weights if weight.grad is not None]) <= 1e-12
    assert step.gradient_norm == pytest.approx(norm.item(), rel=1e-12)


def test_the_norm_is_that_of_the_corrected_gradient_in_a_plain_loop_too() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 2, clip_norm=0.05)
    batches = make_batches([1, 7])
    reference = big_batch_gradient(model, batches, token_loss)
    for batch in batches:
        step = accumulator.backward(token_loss(model, batch), weight=count_tokens(batch))
    assert step is not None
    norm = sum(gradient.square().sum().item() for gradient in reference) ** 0.5
    assert step.gradient_norm == pytest.approx(norm, rel=1e-12)
    clipped = [gradient * 0.05 / (norm + 1e-6) for gradient in reference]
    assert relative_error(optimizer.seen[0], clipped) <= 1e-12


def test_each_thing_happens_once_per_window_in_this_order() -> None:
    told: list[str] = []

    class Scaler(torch.amp.GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            told.append("unscale")
            super().unscale_(optimizer)

        def update(self, new_scale: Any = None) -> None:
            told.append("update")
            super().update(new_scale)

    class Telling(Watched):
        def step(self, closure: Any = None) -> Any:
            norm = sum(gradient.square().sum().item() for gradient in self.gradients()) ** 0.5
            told.append("clipped step" if norm == pytest.approx(0.05, rel=1e-4) else f"step {norm}")
            return super().step(closure)

        def gradients(self) -> list[torch.Tensor]:
            return [weight.grad for weight in self.param_groups[0]["params"] if weight.grad is not None]

    model = make_tagger()
    optimizer = Telling(model)

    class Schedule(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            told.append("scheduler" if optimizer.gradients() else "scheduler after zero")
            super().step(epoch)

    schedule = Schedule(optimizer, 1)
    told.clear()
    accumulator = Accumulator(model, optimizer, 3, clip_norm=0.05, scaler=Scaler("cpu"), scheduler=schedule)
    epoch(accumulator, [2] * 5)
    assert told == ["unscale", "clipped step", "update", "scheduler"] * 2
    assert optimizer.gradients() == []


def test_the_scheduler_steps_once_per_window() -> None:
    model = make_tagger()
    optimizer = Watched(model, lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    epoch(Accumulator(model, optimizer, 3, scheduler=schedule), [1] * 8)
    assert schedule.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_scaler_changes_nothing_where_all_is_finite() -> None:
    plain, scaled = make_tagger(), make_tagger()
    epoch(Accumulator(plain, Watched(plain), 3, clip_norm=0.1), [2, 3, 1, 2])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    epoch(Accumulator(scaled, Watched(scaled), 3, clip_norm=0.1, scaler=scaler), [2, 3, 1, 2])
    for mine, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_infinity_in_one_micro_batch_skips_the_whole_window_once(bad: float, clip_norm: float | None) -> None:
    model = make_tagger()
    optimizer = Watched(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accumulator = Accumulator(model, optimizer, 4, clip_norm=clip_norm, scaler=scaler, scheduler=schedule)
    before = [weight.detach().clone() for weight in model.parameters()]
    steps = epoch(accumulator, [1] * 4, factors={1: bad})
    assert [step.skipped for step in steps] == [INFINITE]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())
    assert schedule.last_epoch == 0
    assert scaler.get_scale() == 512.0
    steps = epoch(accumulator, [1] * 4)
    assert [step.skipped for step in steps] == [None]
    assert schedule.last_epoch == 1
    assert scaler.get_scale() == 512.0


def test_the_scaler_may_meet_a_window_without_units_first() -> None:
    model = make_tagger()
    scaler = torch.amp.GradScaler("cpu")
    accumulator = Accumulator(model, Watched(model), 2, scaler=scaler)
    accumulator.skip()
    step = accumulator.skip()
    assert step is not None
    assert step.skipped == "the window holds no units: every weight is 0"
    assert [step.skipped for step in epoch(accumulator, [1] * 4)] == [None, None]


def test_several_optimizers_step_together() -> None:
    one, several = make_tagger(), make_tagger()
    epoch(Accumulator(one, Watched(one), 2), [2, 3, 1])
    optimizers = [Watched(several.inner), Watched(several.outer)]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 100) for optimizer in optimizers]
    accumulator = Accumulator(several, optimizers, 2, scheduler=schedules)
    epoch(accumulator, [2, 3, 1])
    for mine, other in zip(several.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)
    assert [schedule.last_epoch for schedule in schedules] == [2, 2]
    assert accumulator.optimizer == optimizers


def test_an_infinity_in_the_gradients_of_one_optimizer_skips_all_of_them() -> None:
    model = make_tagger()
    optimizers = [Watched(model.inner), Watched(model.outer)]
    accumulator = Accumulator(model, optimizers, 2, scaler=torch.amp.GradScaler("cpu"))
    before = [weight.detach().clone() for weight in model.parameters()]
    accumulator.backward(token_loss(model, make_batches([2])[0]))
    step = accumulator.backward((model.inner.weight * float("inf")).sum())
    assert step is not None
    assert step.skipped == INFINITE
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_without_gradients_does_not_stop_the_scaler() -> None:
    model = make_tagger()
    optimizers = [Watched(model.inner), Watched(model.outer)]
    accumulator = Accumulator(model, optimizers, 1, scaler=torch.amp.GradScaler("cpu"))
    step = accumulator.backward(model.inner.weight.square().sum())
    assert step is not None
    assert step.skipped is None
    assert [len(optimizer.seen) for optimizer in optimizers] == [1, 0]


def test_gradients_of_weights_that_no_optimizer_has_are_forgotten_too() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, torch.optim.SGD(model.inner.parameters(), lr=0.1), 1)
    accumulator.backward(token_loss(model, make_batches([2])[0]))
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
@pytest.mark.parametrize("kind", ["rows of a table", "complex weights"])
def test_sparse_and_complex_gradients_are_clipped_as_dense_and_real_ones(kind: str, clip_norm: float) -> None:
    def make(*, sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        if kind == "complex weights":
            return nn.Linear(3, 2, dtype=torch.complex128)
        return nn.Embedding(20, 3, sparse=sparse, dtype=torch.float64)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(ids if sparse else ids.to(torch.complex128)).abs().square().sum((1,)).mean()
        return result

    sparse = kind != "complex weights"
    # A row that comes twice in a micro-batch, and in two of them, counts with the sum of its gradients.
    ids = torch.tensor([3, 3, 7, 1, 3, 9, 1]) if sparse else torch.randn(7, 3, dtype=torch.float64)
    model, twin = make(sparse=True), make(sparse=False)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, clip_norm=clip_norm)
    for piece in ids.split([3, 2, 2]):
        step = accumulator.backward(loss(model, piece), weight=len(piece))
    loss(twin, ids).backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip_norm)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert step is not None
    assert step.gradient_norm == pytest.approx(norm.item(), rel=1e-12)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)


def test_an_optimizer_of_sparse_gradients_gets_them_sparse_after_clipping() -> None:
    table = nn.Embedding(20, 3, sparse=True)
    before = table.weight.detach().clone()
    accumulator = Accumulator(table, torch.optim.SparseAdam(table.parameters(), lr=0.1), 2, clip_norm=1.0)
    for ids in accumulator.micro_batches([torch.tensor([1, 2]), torch.tensor([2])]):
        accumulator.backward(table(ids).square().sum(1).mean())
    assert (table.weight != before).any(1).nonzero().flatten().tolist() == [1, 2]


def test_an_optimizer_that_needs_a_closure_is_refused_at_once() -> None:
    class Sharp(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step(closure)

    model = make_tagger()
    with pytest.raises(InvalidInputError, match="Sharp computes the loss again within its step"):
        Accumulator(model, Sharp(model.parameters()), 2)
