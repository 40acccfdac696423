"""Gradients of bf16 weights, added up in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from tests.accumulate.tagging import count_tokens, make_batches, make_tagger, token_loss
from tests.oracle.big_batch import relative_error

BF16 = torch.bfloat16
MICRO_BATCHES = 64


def accumulated(*, precise: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what an optimizer gets after 64 micro-batches in bf16, and the same gradients added up in fp64."""
    model = make_tagger(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    got: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: got.extend(w.grad.clone() for w in model.parameters() if w.grad is not None)
    )
    accumulator = Accumulator(model, optimizer, MICRO_BATCHES, precise=precise)
    exact = [torch.zeros_like(weight, dtype=torch.float64) for weight in model.parameters()]
    batches = make_batches([2] * MICRO_BATCHES, BF16)
    num_tokens = sum(map(count_tokens, batches))
    for batch in accumulator.micro_batches(batches, count_tokens):
        loss = token_loss(model, batch)
        alone = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for total, gradient in zip(exact, alone, strict=True):
            total += gradient.double() * (count_tokens(batch) / num_tokens)
        accumulator.backward(loss)
    return got, exact


def test_sixty_four_micro_batches_in_bf16_add_up_to_a_thousandth_and_better() -> None:
    narrow = relative_error(*accumulated(precise=False))
    wide = relative_error(*accumulated(precise=True))
    assert wide <= 1e-3
    assert wide <= narrow / 10


def test_an_optimizer_that_needs_narrow_gradients_gets_them_rounded_once() -> None:
    model = make_tagger(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    kinds: set[torch.dtype] = set()
    optimizer.register_step_pre_hook(
        lambda *_: kinds.update(w.grad.dtype for w in model.parameters() if w.grad is not None)
    )
    accumulator = Accumulator(model, optimizer, 2, precise=True)
    first, second = make_batches([2] * 2, BF16)
    accumulator.backward(token_loss(model, first))
    assert {weight.grad.dtype for weight in model.parameters() if weight.grad is not None} == {torch.float32}
    accumulator.backward(token_loss(model, second))
    assert kinds == {BF16}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_any_optimizer_trains_and_the_weights_stay_narrow(kind: type[torch.optim.Optimizer]) -> None:
    model = make_tagger(BF16)
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    accumulator = Accumulator(model, optimizer, 2, precise=True, clip_norm=1.0)
    for _ in range(2):
        for batch in accumulator.micro_batches(make_batches([2] * 4, BF16)):
            accumulator.backward(token_loss(model, batch))
    assert accumulator.number == 4
    assert {weight.dtype for weight in model.parameters()} == {BF16}
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_wide_weights_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).to(BF16))
    optimizer = torch.optim.SGD(model.parameters())
    accumulator = Accumulator(model, optimizer, 2, precise=True)
    assert [weight.grad_dtype for weight in model.parameters()] == [torch.float32] * 4
    del accumulator
    assert [weight.grad_dtype for weight in model.parameters()] == [torch.float32] * 2 + [BF16] * 2
    assert len(optimizer._optimizer_step_post_hooks) == 0
