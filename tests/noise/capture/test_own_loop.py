"""NoiseScale in a loop of the user's own: hooks alone give the observations by hand."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchwright.noise.noise_scale import NoiseScale, NoiseScaleWarning
from tests.noise.regression import batches_of, expected, loss_of, make_model, seen_by
from tests.oracle.noise_by_hand import observe_by_hand

if TYPE_CHECKING:
    from collections.abc import Callable


def trained(
    sizes: list[int], *, steps: int = 3, divide: float = 1.0, clip: float | None = None, **options: Any
) -> NoiseScale:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=sizes[0], window=10**9, **options)
    for step in range(steps):
        for batch in batches_of(step, sizes):
            (loss_of(model, batch) / len(sizes) / divide).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return noise


@pytest.mark.parametrize("number", [2, 4, 8])
def test_a_plain_loop_gives_the_observations_by_hand(number: int) -> None:
    sizes = [4] * number
    # The first step is looked at example by example too, since nothing tells yet that there will be a second backward.
    for found, wanted in zip(seen_by(trained(sizes))[1:], expected(sizes)[1:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)


def test_the_first_step_is_looked_at_example_by_example() -> None:
    assert seen_by(trained([4] * 2))[0] == pytest.approx(expected([1] * 8)[0], rel=1e-11)


def test_without_accumulation_every_step_is_looked_at_example_by_example() -> None:
    for found, wanted in zip(seen_by(trained([6])), expected([1] * 6), strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)


def test_clipping_does_not_change_the_answer() -> None:
    noise = trained([4] * 2, steps=2, clip=1e-9)
    model = make_model()
    # At that clip the weights stand still.
    wanted = observe_by_hand(model, loss_of, batches_of(1, [4, 4]), [4, 4])
    assert seen_by(noise)[1] == pytest.approx(wanted, rel=1e-6)


def test_how_the_loss_is_scaled_does_not_change_the_ratio() -> None:
    ratios = []
    for clip_free in (1.0, 128.0):
        seen = seen_by(trained([4] * 4, steps=1, divide=clip_free))
        ratios.append(seen[0][0] / seen[0][1])
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-9)


def test_a_scaler_that_skips_a_step_is_counted() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=4, scaler=scaler)
    for step in range(4):
        for batch in batches_of(step, [4] * 2):
            loss = loss_of(model, batch) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert noise.observations == 3
    assert noise.skipped == {"the gradients were thrown away without a step": 1}


def test_micro_batches_of_another_size_are_left_out_and_said() -> None:
    noise = trained([4, 3])
    assert noise.critical_batch is None
    assert [reason[:32] for reason in noise.skipped] == ["micro-batches of other sizes tha"]


def test_a_shorter_window_is_left_out_and_the_next_is_not() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=4)
    for step, number in enumerate([4, 4, 2, 4, 4]):
        for batch in batches_of(step, [4] * number):
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert noise.observations == 4
    assert noise.skipped == {"the window was shorter than the one before": 1}


def test_validation_between_steps_does_not_disturb() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=4)
    for step in range(3):
        for batch in batches_of(step, [4] * 2):
            loss_of(model, batch).backward()
            with torch.no_grad():
                loss_of(model, batch[:3])
        optimizer.step()
        optimizer.zero_grad()
    assert noise.observations == 3


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return x.sum(1, keepdim=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_right_or_refused(reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=4)
    for step in range(2):
        for batch in batches_of(step, [4] * 2):
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if reentrant:
        assert noise.observations == 0
        assert sum(noise.skipped.values()) == 2
    else:
        twin = copy.deepcopy(model)
        wanted = observe_by_hand(twin, loss_of, batches_of(1, [4] * 2), [4, 4])
        # The loop does not divide its loss, so its step is twice the mean.
        assert seen_by(noise)[1] == pytest.approx([4 * each for each in wanted], rel=1e-11)


def test_batch_normalization_in_one_micro_batch_per_step_is_refused_with_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(NoiseScaleWarning, match="ties the samples"):
        noise = NoiseScale(model, optimizer=optimizer, micro_batch=4)

    def two_steps() -> None:
        for _ in range(2):
            model(torch.randn(4, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(NoiseScaleWarning, match="accumulate two or more micro-batches"):
        two_steps()
    assert noise.critical_batch is None
    assert noise.skipped == {"one micro-batch only: there is nothing to compare": 2}


def test_hooks_go_when_it_is_closed_or_let_go() -> None:
    for let_go in (lambda noise: noise.close(), lambda noise: None):
        _check_hooks(let_go)


def _check_hooks(let_go: Callable[[NoiseScale], None]) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=4)
    loss_of(model, batches_of(0, [4])[0]).backward()
    optimizer.step()
    let_go(noise)
    del noise
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert torch.autograd.backward.__code__.co_filename.endswith("autograd/__init__.py")


def looped(body: Callable[[Any, Any, int], None], *, steps: int = 3, **options: Any) -> NoiseScale:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=4, **options)
    for step in range(steps):
        body(model, optimizer, step)
    return noise


def accumulate(model: Any, step: int, number: int = 2) -> None:
    for batch in batches_of(step, [4] * number):
        loss_of(model, batch).backward()


def test_gradients_that_are_never_zeroed_are_noticed() -> None:
    def body(model: Any, optimizer: Any, step: int) -> None:
        accumulate(model, step)
        optimizer.step()

    noise = looped(body)
    assert noise.observations == 1
    assert [reason[:32] for reason in noise.skipped] == ["what the backward passes added i"]


def test_gradients_that_were_zeroed_in_place_within_a_window_are_noticed() -> None:
    def body(model: Any, optimizer: Any, step: int) -> None:
        accumulate(model, step)
        optimizer.zero_grad(set_to_none=False)
        accumulate(model, step + 10)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    noise = looped(body)
    assert noise.observations == 0
    assert [reason[:32] for reason in noise.skipped] == ["what the backward passes added i"]


def test_gradients_that_are_only_looked_at_are_noticed() -> None:
    def body(model: Any, optimizer: Any, step: int) -> None:
        accumulate(model, step)
        torch.autograd.grad(loss_of(model, batches_of(7, [4])[0]), list(model.parameters()))
        accumulate(model, step + 10)
        optimizer.step()
        optimizer.zero_grad()

    assert looped(body).observations == 0


def test_a_loss_scale_is_taken_out_whatever_it_is() -> None:
    found = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)

        def body(model: Any, optimizer: Any, step: int, scaler: Any = scaler) -> None:
            for batch in batches_of(step, [4] * 2):
                scaler.scale(loss_of(model, batch) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        found.append(seen_by(looped(body, scaler=scaler)))
    for plain, scaled in zip(*found, strict=True):
        assert scaled == pytest.approx(plain, rel=1e-9)


def test_a_model_can_be_saved_and_copied_meanwhile() -> None:
    model = make_model()
    noise = NoiseScale(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), micro_batch=4)
    pickle.loads(pickle.dumps(model))
    twin = copy.deepcopy(model)
    loss_of(twin, batches_of(0, [3])[0]).backward()
    assert noise.skipped == {}


def test_a_closure_whose_backward_is_within_the_step_belongs_to_its_window() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=4, window=10**9)
    for step in range(3):
        first, last = batches_of(step, [4, 4])
        (loss_of(model, first) / 2).backward()

        def closure(last: Any = last) -> torch.Tensor:
            loss = loss_of(model, last) / 2
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
    for found, wanted in zip(seen_by(noise)[1:], seen_by(trained([4, 4]))[1:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)


def test_inputs_without_tensors_are_counted_by_their_list() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 3)

        def forward(self, words: list[str]) -> torch.Tensor:
            out: torch.Tensor = self.table(torch.tensor([len(word) for word in words])).sum(1)
            return out

    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=3, window=10**9)
    for step in range(6):
        for words in (["a", "bb", "ccc"], ["dddd", "ee", "f" * (step + 1)]):
            (model(words).pow(2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen_by(noise)) >= 5
