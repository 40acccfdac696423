"""The hand-written loop that everybody knows, with its four lines replaced by one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from batchwright.accumulate.accumulator import Accumulator
from tests.accumulate.tagging import Watched, count_tokens, make_batches, make_tagger, sample_loss, token_loss
from tests.oracle.big_batch import big_batch_gradient, relative_error

if TYPE_CHECKING:
    from batchwright.accumulate.windows import Step

SPLITS = [[2] * 4, [4] * 2, [1] * 8, [3, 3, 2], [1, 7]]


def test_micro_batches_of_one_size_need_no_weight() -> None:
    ours, theirs = make_tagger(), make_tagger()
    batches = make_batches([2] * 8)

    gradient_accumulation_steps = 4
    optimizer = Watched(theirs)
    optimizer.zero_grad()
    for step, batch in enumerate(batches):
        loss = sample_loss(theirs, batch)
        loss = loss / gradient_accumulation_steps
        loss.backward()
        if (step + 1) % gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()

    accumulator = Accumulator(ours, Watched(ours), gradient_accumulation_steps)
    for batch in batches:
        accumulator.backward(sample_loss(ours, batch))

    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)
    assert accumulator.number == 2


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("sizes", SPLITS, ids=lambda sizes: "+".join(map(str, sizes)))
def test_with_weights_the_gradient_equals_the_big_batch(sizes: list[int], dtype: torch.dtype, bound: float) -> None:
    model = make_tagger(dtype)
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, len(sizes))
    batches = make_batches(sizes, dtype)
    reference = big_batch_gradient(model, batches, token_loss)
    steps = [accumulator.backward(token_loss(model, b), weight=count_tokens(b), samples=len(b[0])) for b in batches]
    assert steps[:-1] == [None] * (len(sizes) - 1)
    assert relative_error(optimizer.seen[0], reference) <= bound
    assert steps[-1] is not None
    assert (steps[-1].samples, steps[-1].units) == (8, sum(map(count_tokens, batches)))


def test_flush_steps_with_the_tail() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 4)
    batches = make_batches([2, 3, 1])
    reference = big_batch_gradient(model, batches, token_loss)
    for batch in batches:
        assert accumulator.backward(token_loss(model, batch), weight=count_tokens(batch)) is None
    step = accumulator.flush()
    assert step is not None
    assert step.micro_batches == 3
    assert relative_error(optimizer.seen[0], reference) <= 1e-12
    assert accumulator.flush() is None
    assert len(optimizer.seen) == 1


def test_a_first_micro_batch_of_weight_zero_and_one_that_is_skipped() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 4)
    batches = make_batches([2, 3, 1, 2], empty=[0])
    reference = big_batch_gradient(model, [batches[1], batches[3]], token_loss)
    accumulator.backward(token_loss(model, batches[0]), weight=0)
    accumulator.backward(token_loss(model, batches[1]), weight=count_tokens(batches[1]))
    accumulator.skip()
    step = accumulator.backward(token_loss(model, batches[3]), weight=count_tokens(batches[3]))
    assert step is not None
    assert step.micro_batches == 2
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


def test_a_window_of_which_everything_is_skipped_makes_no_update() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 2)
    assert accumulator.skip() is None
    step = accumulator.skip()
    assert step is not None
    assert step.skipped == "the window holds no units: every weight is 0"
    assert optimizer.seen == []


def test_run_is_forward_and_backward_in_one() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3)
    batches = make_batches([3, 1, 4])
    reference = big_batch_gradient(model, batches, token_loss)
    steps: list[Step | None] = [accumulator.run(batch, token_loss, weight=count_tokens) for batch in batches]
    assert steps[-1] is not None
    assert steps[-1].samples == 8
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


def test_run_takes_a_function_of_the_batch_alone_inside_micro_batches() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3)
    batches = make_batches([3, 1, 4])
    reference = big_batch_gradient(model, batches, token_loss)
    for batch in accumulator.micro_batches(batches, count_tokens):
        accumulator.run(batch, lambda micro: token_loss(model, micro))
    assert relative_error(optimizer.seen[0], reference) <= 1e-12
