"""Weights that are frozen, unfrozen, added or swapped: each window follows what trains when it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.errors import InvalidInputError
from batchwright.noise.noise_scale import NoiseScale
from tests.accumulate.tagging import Tagger, Watched, count_tokens, make_batches, make_tagger, token_loss
from tests.oracle.big_batch import big_batch_gradient, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = [2, 3, 1]
CLIP = 0.05


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


def unfreeze(module: nn.Module) -> None:
    module.requires_grad_(True)


def window(accumulator: Accumulator, *, reads: bool) -> Any:
    """Run one window, through micro_batches or as a plain loop."""
    batches = make_batches(SIZES)
    if reads:
        for batch in accumulator.micro_batches(batches, count_tokens):
            step = accumulator.backward(token_loss(accumulator.model, batch))
    else:
        for batch in batches:
            step = accumulator.backward(token_loss(accumulator.model, batch), weight=count_tokens(batch))
    assert step is not None
    return step


def clipped_reference(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of the big batch over the weights that train now, clipped."""
    reference = big_batch_gradient(model, make_batches(SIZES), token_loss)
    norm = sum(gradient.square().sum().item() for gradient in reference) ** 0.5
    return [gradient * min(1.0, CLIP / (norm + 1e-6)) for gradient in reference]


def add_a_group(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    unfreeze(module)
    optimizer.add_param_group({"params": list(module.parameters())})


def swap_the_head(model: Tagger, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(5)
    model.outer = nn.Linear(8, 3, dtype=torch.float64)
    optimizer.param_groups[0]["params"] = list(model.parameters())


CHANGES: dict[str, tuple[Callable[[Tagger], Any], Callable[[Tagger, Any], Any]]] = {
    "unfrozen": (lambda model: freeze(model.inner), lambda model, optimizer: unfreeze(model.inner)),
    "frozen": (lambda model: None, lambda model, optimizer: freeze(model.inner)),
    "head swapped": (lambda model: None, swap_the_head),
    "one frozen, another unfrozen": (
        lambda model: freeze(model.inner),
        lambda model, optimizer: [weight.requires_grad_(not weight.requires_grad) for weight in model.parameters()],
    ),
}


@pytest.mark.parametrize("reads", [True, False], ids=["micro_batches", "plain loop"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_windows_takes_effect_in_the_next(change: str, *, reads: bool) -> None:
    before, then = CHANGES[change]
    model = make_tagger()
    before(model)
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, len(SIZES), clip_norm=CLIP)
    window(accumulator, reads=reads)
    then(model, optimizer)
    for _ in range(3):
        reference = clipped_reference(model)
        window(accumulator, reads=reads)
        assert relative_error(optimizer.seen[-1], reference) <= 1e-12
        assert all(weight.grad is None for weight in model.parameters())


def test_weights_added_to_the_optimizer_are_zeroed_and_clipped_with_the_others() -> None:
    model = make_tagger()
    freeze(model.inner)
    optimizer = Watched(model.outer)
    accumulator = Accumulator(model, optimizer, len(SIZES), clip_norm=CLIP)
    window(accumulator, reads=True)
    add_a_group(optimizer, model.inner)
    for _ in range(3):
        inner, outer = clipped_reference(model)[:2], clipped_reference(model)[2:]
        window(accumulator, reads=True)
        assert relative_error(optimizer.seen[-1], [*outer, *inner]) <= 1e-12


def test_the_loop_itself_may_unfreeze_between_two_windows_of_one_epoch() -> None:
    model = make_tagger()
    freeze(model.inner)
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, len(SIZES), clip_norm=CLIP)
    references = []
    for batch in accumulator.micro_batches(make_batches(SIZES) * 3, count_tokens):
        if accumulator.backward(token_loss(model, batch)):
            unfreeze(model.inner)
            references.append(clipped_reference(model))
    for gradient, reference in zip(optimizer.seen[1:], references, strict=False):
        assert relative_error(gradient, reference) <= 1e-12


def test_a_gradient_that_a_frozen_weight_still_has_is_not_stepped_with() -> None:
    model = make_tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, len(SIZES))
    token_loss(model, make_batches([4])[0]).backward()  # somebody's own backward, after which the layer is frozen
    freeze(model.inner)
    before = model.inner.weight.detach().clone()
    window(accumulator, reads=True)
    assert torch.equal(model.inner.weight, before)


MIDDLE: dict[str, tuple[Callable[[Tagger], Any], Callable[[Tagger, Any], Any], str]] = {
    "frozen": (lambda model: None, lambda model, _: freeze(model.inner), r"frozen: inner\.weight, inner\.bias"),
    "unfrozen": (lambda model: freeze(model.inner), lambda model, _: unfreeze(model.inner), r"unfrozen: inner\.weight"),
    "swapped": (lambda model: None, swap_the_head, r"swapped: outer\.weight"),
    "added": (
        lambda model: None,
        lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "added to the optimizer: a weight outside the model",
    ),
}


@pytest.mark.parametrize("change", MIDDLE)
def test_a_change_in_the_middle_of_a_window_is_an_error_that_names_the_weights(change: str) -> None:
    before, then, message = MIDDLE[change]
    model = make_tagger()
    before(model)
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3)
    batches = make_batches(SIZES)
    accumulator.backward(token_loss(model, batches[0]), weight=count_tokens(batches[0]))
    then(model, optimizer)
    loss = token_loss(model, batches[1])
    with pytest.raises(InvalidInputError, match=message):
        accumulator.backward(loss)
    with pytest.raises(InvalidInputError, match=message):  # the end of the window drops it, and says so again
        accumulator.flush()
    assert optimizer.seen == []
    reference = big_batch_gradient(model, batches, token_loss)
    window(accumulator, reads=False)
    assert relative_error(optimizer.seen[-1][: len(reference)], reference) <= 1e-12


def test_a_layer_that_is_swapped_in_the_middle_of_a_window_behind_the_optimizers_back() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    accumulator.backward(token_loss(model, make_batches([2])[0]))
    model.outer = nn.Linear(8, 3, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match=r"swapped: outer\.weight, outer\.bias"):
        accumulator.backward(token_loss(model, make_batches([2])[0]))


def test_everything_frozen_is_an_error_when_the_next_window_begins() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 3)
    window(accumulator, reads=False)
    loss = token_loss(model, make_batches([2])[0])
    freeze(model)
    with pytest.raises(InvalidInputError, match="no weight that requires a gradient"):
        accumulator.backward(loss)


def test_wide_gradients_follow_what_trains() -> None:
    batches = make_batches([1] * 24, torch.bfloat16)

    def gradients(model: Tagger, accumulator: Accumulator) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        handle = accumulator.optimizer.register_step_pre_hook(
            lambda *_: found.extend(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)
        )
        for batch in accumulator.micro_batches(batches, count_tokens):
            accumulator.backward(token_loss(model, batch))
        handle.remove()
        return found

    def precise(model: Tagger) -> Accumulator:
        return Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), 24, precise=True)

    late, early = make_tagger(torch.bfloat16), make_tagger(torch.bfloat16)
    freeze(late.inner)
    accumulator = precise(late)
    assert len(gradients(late, accumulator)) == 2
    unfreeze(late.inner)
    mine = gradients(late, accumulator)
    assert {gradient.dtype for gradient in mine} == {torch.float32}
    assert all(map(torch.equal, mine, gradients(early, precise(early))))
    freeze(late.inner)
    gradients(late, accumulator)
    assert late.inner.weight.grad_dtype == torch.bfloat16  # as it was found


@pytest.mark.parametrize("reads", [True, False], ids=["micro_batches", "plain loop"])
def test_the_noise_scale_is_measured_anew_on_the_weights_that_train_now(*, reads: bool) -> None:
    model = make_tagger()
    freeze(model.inner)
    accumulator = Accumulator(model, Watched(model, lr=0.0), len(SIZES))
    noise = NoiseScale(accumulator)
    for _ in range(4):
        window(accumulator, reads=reads)
    unfreeze(model.inner)
    for _ in range(4):
        window(accumulator, reads=reads)
    fresh = make_tagger()
    twin = Accumulator(fresh, Watched(fresh, lr=0.0), len(SIZES))
    other = NoiseScale(twin)
    for _ in range(4):
        window(twin, reads=reads)
    assert any("measured anew" in note for note in noise.notes)
    assert noise.critical_batch is not None
    assert other.critical_batch is not None
    assert noise.critical_batch.value == pytest.approx(other.critical_batch.value, rel=1e-9)
