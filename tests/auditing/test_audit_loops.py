"""Loops as people write them: a wrong one is found and its cause named, a right one raises no alarm."""

from __future__ import annotations

import json
import queue
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

from batchwright.auditing.audit import audit_workload
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.auditing.audit_result import Audit

Batch = dict[str, torch.Tensor]
Loop = Any
VOCABULARY = 11


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 12), nn.Linear(12, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.hidden(self.embed(tokens))))
        return logits


def samples(n: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (n, 7))
    labels = tokens.roll(-1, 1)
    labels[torch.arange(7)[None] >= (torch.arange(n) % 6 + 1)[:, None]] = -100
    return {"tokens": tokens, "labels": labels}


def units(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    return summed(model, batch) / units(batch)


def total(batches: Sequence[Batch]) -> int:
    return sum(map(units, batches))


def audit(window: Loop, **changes: Any) -> Audit:
    parts: dict[str, Any] = {
        "model": Tagger,
        "batch": samples,
        "loss": mean,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "units": units,
    }
    return audit_workload(Workload(**{**parts, **changes}, window=window))


def add_up(model: nn.Module, batches: Sequence[Batch], *, after: Callable[[int], object] = lambda _: None) -> None:
    """Add up the gradient of a window, right, and do something after each micro-batch."""
    count = total(batches)
    for index, batch in enumerate(batches):
        (summed(model, batch) / count).backward()
        after(index)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def norm(model: nn.Module) -> torch.Tensor:
    return torch.stack([g.square().sum() for g in gradients(model)]).sum().sqrt()


def scale(model: nn.Module, factor: Any) -> None:
    for gradient in gradients(model):
        gradient.mul_(factor)


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


WRONG: dict[str, tuple[str, Loop]] = {}
RIGHT: dict[str, Loop] = {}


def wrong(cause: str) -> Callable[[Loop], Loop]:
    def keep(loop: Loop) -> Loop:
        WRONG[loop.__name__] = cause, loop
        return loop

    return keep


def right(loop: Loop) -> Loop:
    RIGHT[loop.__name__] = loop
    return loop


@wrong("clipping per micro-batch")
def clips_the_norm_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda _: clip_grad_norm_(model.parameters(), 1e-2))
    finish(optimizer)


@wrong("clipping per micro-batch")
def clips_values_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda _: clip_grad_value_(model.parameters(), 1e-3, foreach=True))
    finish(optimizer)


@wrong("clipping per micro-batch")
def clips_a_known_norm_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    def clip(_: int) -> None:
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, nn.utils.get_total_norm(gradients(model)))

    add_up(model, batches, after=clip)
    finish(optimizer)


@wrong("clipping per micro-batch")
def clips_by_hand_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda _: scale(model, torch.clamp(1e-2 / norm(model), max=1.0)))
    finish(optimizer)


@wrong("clipping per micro-batch")
def clips_only_the_head_and_only_once_too_early(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda i: clip_grad_norm_(model.head.parameters(), 1e-2) if i == 1 else None)
    clip_grad_norm_(model.parameters(), 1.0)
    finish(optimizer)


@wrong("clipping per micro-batch")
def clips_where_the_limit_is_not_reached(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda _: clip_grad_norm_(model.parameters(), 1e6))
    finish(optimizer)


@wrong("clipping after the step")
def clips_after_the_step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    optimizer.step()
    clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.zero_grad()


@wrong("clipping before unscale")
def clips_scaled_gradients(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    scaler, count = torch.amp.GradScaler("cpu", init_scale=256.0), total(batches)
    for batch in batches:
        scaler.scale(summed(model, batch) / count).backward()
    clip_grad_norm_(model.parameters(), 1e-2)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@wrong("constant factor")
def forgets_to_unscale(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    scaler, count = torch.amp.GradScaler("cpu", init_scale=256.0), total(batches)
    for batch in batches:
        scaler.scale(summed(model, batch) / count).backward()
    finish(optimizer)


@wrong("several steps")
def steps_twice(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    optimizer.step()
    finish(optimizer)


@wrong("several steps")
def steps_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda _: finish(optimizer))


@wrong("gradients dropped")
def steps_before_the_last_backward(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for index, batch in enumerate(batches):
        if index == len(batches) - 1:
            finish(optimizer)
        (summed(model, batch) / count).backward()


@wrong("gradients dropped")
def zeroes_before_the_step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    optimizer.zero_grad()
    optimizer.step()


@wrong("gradients dropped")
def forgets_the_last_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for batch in batches[: max(len(batches) - 1, 1)]:
        (summed(model, batch) / count).backward()
    finish(optimizer)


@wrong("gradients dropped")
def zeroes_in_the_middle(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda i: optimizer.zero_grad(set_to_none=False) if i == 1 else None)
    finish(optimizer)


@wrong("part zeroed")
def zeroes_one_layer_in_the_middle(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda i: model.embed.weight.grad.zero_() if i == 1 else None)
    finish(optimizer)


@wrong("part never zeroed")
def zeroes_only_the_head(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    optimizer.step()
    model.head.zero_grad()


@wrong("windows differ")
def keeps_a_buffer_of_its_own(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    model.zero_grad()
    add_up(model, batches)
    kept = vars(model).setdefault("kept", [torch.zeros_like(p) for p in model.parameters()])
    for parameter, buffer in zip(model.parameters(), kept, strict=True):
        buffer.add_(parameter.grad)
        parameter.grad.copy_(buffer)
    optimizer.step()


@wrong("part detached")
def detaches_the_embedding_after_the_first(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for index, batch in enumerate(batches):
        hidden = model.embed(batch["tokens"])
        logits = model.head(torch.tanh(model.hidden(hidden.detach() if index else hidden)))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        (loss / count).backward()
    finish(optimizer)


@wrong("micro-batch repeated")
def runs_the_last_micro_batch_twice(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for batch in [*batches, batches[-1]]:
        (summed(model, batch) / count).backward()
    finish(optimizer)


@wrong("wrong weights")
def halves_what_came_before(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    kept: list[torch.Tensor] = []
    for batch in batches:
        model.zero_grad()
        mean(model, batch).backward()
        now = [g.clone() for g in gradients(model)]
        kept = [(a + b) / 2 for a, b in zip(kept, now, strict=True)] if kept else now
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.grad = value
    finish(optimizer)


@wrong("gradient changed after the last backward")
def multiplies_one_layer(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    model.head.weight.grad.mul_(1.01)
    finish(optimizer)


@wrong("gradient changed between micro-batches")
def smooths_between_micro_batches(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda i: model.head.weight.grad.sub_(1e-2) if i < 2 else None)
    finish(optimizer)


@wrong("random gradient")
def adds_noise(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    for gradient in gradients(model):
        gradient.add_(1e-3 * torch.randn_like(gradient))
    finish(optimizer)


@wrong("gradient changed after the last backward")
def multiplies_by_a_constant(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    scale(model, 0.8)
    finish(optimizer)


@wrong("auxiliary loss multiplied")
def adds_a_penalty_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for batch in batches:
        penalty = 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
        (summed(model, batch) / count + penalty).backward()
    finish(optimizer)


@wrong("scheduler per micro-batch")
def steps_the_scheduler_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    add_up(model, batches, after=lambda _: scheduler.step())
    finish(optimizer)


@wrong("another optimizer")
def steps_an_optimizer_of_its_own(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    torch.optim.Adam(model.parameters()).step()
    optimizer.zero_grad()


@wrong("weights changed by hand")
def changes_the_weights_by_hand(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    optimizer.zero_grad()


@right
def zeroes_at_the_start(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    optimizer.zero_grad(set_to_none=False)
    add_up(model, batches)
    clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()


@right
def zeroes_weight_by_weight(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    add_up(model, batches)
    optimizer.step()


@right
def clips_each_part_once(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    for part in (model.embed, model.hidden, model.head):
        clip_grad_norm_(part.parameters(), 1e-2, foreach=True)
    finish(optimizer)


@right
def asks_for_the_norm_in_every_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches, after=lambda _: clip_grad_norm_(model.parameters(), float("inf")))
    finish(optimizer)


@right
def clips_by_hand_once(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    scale(model, torch.clamp(1e-2 / (norm(model) + 1e-6), max=1.0))
    finish(optimizer)


@right
def divides_and_clips_by_hand(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    for batch in batches:
        summed(model, batch).backward()
    scale(model, 1 / total(batches))
    scale(model, torch.clamp(1e-2 / (norm(model) + 1e-6), max=1.0))
    finish(optimizer)


@right
def clamps_by_hand_once(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    for gradient in gradients(model):
        gradient.clamp_(-1e-3, 1e-3)
    finish(optimizer)


@right
def unscales_clips_and_steps(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    scaler, count = torch.amp.GradScaler("cpu", init_scale=256.0), total(batches)
    for batch in batches:
        scaler.scale(summed(model, batch) / count).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1e-2)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@right
def steps_the_scheduler_once(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    add_up(model, batches)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


@right
def keeps_an_average_of_the_weights(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    add_up(model, batches)
    optimizer.step()
    average.update_parameters(model)
    optimizer.zero_grad()


@right
def clamps_weights_after_the_step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    add_up(model, batches)
    finish(optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


@right
def leaves_out_synchronisation(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for batch in batches[:-1]:
        with model.no_sync():
            (summed(model, batch) / count).backward()
    (summed(model, batches[-1]) / count).backward()
    finish(optimizer)


@right
def computes_activations_again(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for batch in batches:
        hidden = checkpoint(lambda x: torch.tanh(model.hidden(model.embed(x))), batch["tokens"], use_reentrant=False)
        logits = model.head(hidden)
        (F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / count).backward()
    finish(optimizer)


@right
def goes_backward_twice_per_micro_batch(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for batch in batches:
        loss = summed(model, batch) / count
        (0.3 * loss).backward(retain_graph=True)
        (0.7 * loss).backward()
    finish(optimizer)


@right
def runs_in_a_closure(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        add_up(model, batches)
        return torch.zeros(())

    optimizer.step(closure)


@right
def weights_means_by_tokens(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    count = total(batches)
    for batch in reversed(batches):
        (mean(model, batch) * (units(batch) / count)).backward()
    finish(optimizer)


@right
def zeroes_in_a_hook_after_the_step(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    handle = optimizer.register_step_post_hook(lambda stepped, *_: stepped.zero_grad())
    add_up(model, batches)
    optimizer.step()
    handle.remove()


@right
def adds_up_elsewhere_in_fp64(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    weights, count = list(model.parameters()), total(batches)
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    for batch in batches:
        for kept, gradient in zip(sums, torch.autograd.grad(summed(model, batch), weights), strict=True):
            kept.add_(gradient)
    for weight, kept in zip(weights, sums, strict=True):
        weight.grad = (kept / count).to(weight.dtype)
    optimizer.step()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_found_and_its_cause_is_named(name: str) -> None:
    cause, loop = WRONG[name]
    found = audit(loop)
    assert (found.exact, found.cause) == (False, cause)
    assert found.remedy
    assert cause in str(found)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_raises_no_alarm(name: str) -> None:
    found = audit(RIGHT[name])
    assert found.exact, str(found)
    assert (found.cause, found.defects, found.condition) == (None, (), None)


def test_several_optimizers_are_judged_each_at_its_own_step() -> None:
    def alternating(model: Any, pair: Any, batches: Sequence[Batch]) -> None:
        add_up(model, batches)
        for optimizer in pair:
            clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-2)
            finish(optimizer)

    def build(params: Any) -> Any:
        weights = list(params)
        return [torch.optim.SGD(weights[:1], lr=0.1), torch.optim.Adam(weights[1:], lr=0.1)]

    assert audit(alternating, optimizer=build).exact


def test_an_optimizer_that_is_left_out_is_found() -> None:
    def window(model: Any, pair: Any, batches: Sequence[Batch]) -> None:
        add_up(model, batches)
        pair[0].step()
        model.zero_grad()

    def build(params: Any) -> Any:
        weights = list(params)
        return [torch.optim.SGD(weights[:1], lr=0.1), torch.optim.Adam(weights[1:], lr=0.1)]

    found = audit(window, optimizer=build)
    assert (found.exact, found.cause) == (False, "optimizer without a step")
    assert "Adam, number 2 of 2" in str(found)


def test_an_optimizer_that_is_none_of_torchs_is_audited() -> None:
    class Plain:
        def __init__(self, params: Any) -> None:
            self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": 0.1}]
            self.state: dict[Any, Any] = {}

        def step(self) -> None:
            raise AssertionError("nothing is stepped")

        def zero_grad(self) -> None:
            for weight in self.param_groups[0]["params"]:
                weight.grad = None

    def window(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        add_up(model, batches)
        finish(optimizer)

    assert audit(window, optimizer=Plain).exact


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_null_in_json(value: float) -> None:
    def window(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        add_up(model, batches)
        model.head.bias.grad.fill_(value)
        finish(optimizer)

    found = audit(window)
    assert (found.exact, found.cause) == (False, "gradient not finite")
    json.dumps(found.to_dict(), allow_nan=False)


class Rotation(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.read = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64)), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read: torch.Tensor = self.read((x.to(self.turn.dtype) @ self.turn).abs())
        return read


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_complex_weights_are_compared_in_both_parts(dtype: str, is_wrong: bool) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mean_square: torch.Tensor = model(batch).square().mean()
        return mean_square

    def window(model: Any, optimizer: Any, batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
        if is_wrong:
            model.turn.grad.imag.mul_(2)
        finish(optimizer)

    work = Workload(
        model=Rotation, batch=lambda n: torch.randn(n, 4), loss=loss, optimizer=torch.optim.SGD, window=window
    )
    found = audit_workload(work, dtype=dtype)
    assert (found.exact, found.worst_module) == ((False, "(model)") if is_wrong else (True, found.worst_module))


def test_weights_that_no_optimizer_has_may_keep_their_gradients() -> None:
    def window(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        add_up(model, batches)
        finish(optimizer)

    found = audit(window, optimizer=lambda params: torch.optim.SGD(list(params)[1:], lr=0.1))
    assert found.exact
    assert found.condition is None


def test_gradients_that_are_never_zeroed_are_a_condition_that_is_named() -> None:
    def never(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        add_up(model, batches)
        optimizer.step()

    found = audit(never)
    assert found.exact
    assert found.condition is not None
    assert found.condition.name == "gradients not zeroed"
    assert found.second_window is not None
    assert found.second_window[0] == pytest.approx(2.0)
    first, *others = str(found).splitlines()
    assert "FIRST window only; gradients not zeroed: right only if the code around `window` calls zero_grad()" in first
    assert any("the second, not zeroed" in line and "if zeroed" in line for line in others)
    assert "optimizer.zero_grad() in the window" in found.to_dict()["condition"]["remedy"]
    assert found.to_dict()["condition"]["name"] == "gradients not zeroed"
    assert any("not zeroed" in note for note in found.notes)

    def twice_as_long(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        add_up(model, [*batches, *batches])
        add_up(model, [*batches, *batches])
        optimizer.step()

    assert "if zeroed" not in str(audit(twice_as_long))


class TestARandomLoss:
    """Nothing is named where draws can explain the difference."""

    @staticmethod
    def noisy(model: nn.Module, batch: Batch) -> torch.Tensor:
        return mean(model, batch) * (1 + 0.5 * torch.rand(()))

    @staticmethod
    def noisy_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
        return summed(model, batch) * (1 + 0.1 * torch.rand(()))

    @pytest.mark.parametrize("loss", [noisy, noisy_sum])
    def test_has_no_cause_and_says_what_to_fix_first(self, loss: Any) -> None:
        found = audit(None, loss=loss)
        assert (found.exact, found.cause, found.is_random) == (False, None, True)
        assert "fix that first" in (found.remedy or "")
        assert "cannot be judged, for the loss is random" in str(found).splitlines()[0]
        assert [split.cause for split in found.splits] == [None]

    def test_replayed_does_not_claim_the_big_batch(self) -> None:
        parts: dict[str, Any] = {"model": Tagger, "batch": samples, "optimizer": torch.optim.SGD, "units": len}
        summed_up = audit_workload(Workload(**parts, loss=self.noisy_sum), dropout="replayed")
        assert not summed_up.exact
        assert summed_up.cause is None
        assert "that of the big batch" not in str(summed_up).splitlines()[0]
        assert any("no mean over these units" in note for note in summed_up.notes)
        assert "replayed" not in (summed_up.remedy or "")


@pytest.mark.parametrize("kind", ["sum", "BatchNorm"])
def test_a_replay_says_what_it_compared_and_can_fail(kind: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = model(batch).square()
        return squares.sum() if kind == "sum" else squares.mean()

    middle = nn.BatchNorm1d(6) if kind == "BatchNorm" else nn.Dropout(0.2)
    work = Workload(
        model=nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 1)),
        batch=lambda n: torch.randn(n, 4),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    found = audit_workload(work, dropout="replayed")
    assert found.has_exact_gradient
    assert (found.exact, found.cause) == (False, "no mean over units")
    assert "which is NOT the big batch" in str(found).splitlines()[0]
    assert found.to_dict()["compared_with"] != "the big batch"
    assert audit_workload(work).cause == ("sum divided" if kind == "sum" else "BatchNorm")


def test_a_replay_names_the_cause_that_is_there_without_dropout() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mean_square: torch.Tensor = model(batch).square().mean()
        return mean_square

    def undivided(model: Any, optimizer: Any, batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            loss(model, batch).backward()
        finish(optimizer)

    def at_once(model: Any, optimizer: Any, batches: Sequence[torch.Tensor]) -> None:
        loss(model, torch.cat(list(batches))).backward()
        finish(optimizer)

    parts: dict[str, Any] = {"batch": lambda n: torch.randn(n, 4), "loss": loss, "optimizer": torch.optim.SGD}
    parts["model"] = lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 1))
    assert audit_workload(Workload(**parts, window=undivided), dropout="replayed").cause == "count ignored"
    found = audit_workload(Workload(**parts, window=at_once), dropout="replayed")
    assert (found.exact, found.cause) == (False, "random numbers drawn elsewhere")


def test_another_thread_clips_as_ever_while_an_audit_looks() -> None:
    import threading

    norms: queue.SimpleQueue[float] = queue.SimpleQueue()

    def clip() -> None:
        weight = nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        clip_grad_norm_([weight], 1e-2)
        norms.put(float(weight.grad.norm()))

    def window(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        add_up(model, batches)
        thread = threading.Thread(target=clip)
        thread.start()
        thread.join()
        finish(optimizer)

    found = audit(window)
    assert found.exact
    assert not any("clips" in note for note in found.notes)
    assert norms.get_nowait() == pytest.approx(1e-2, rel=1e-3)
