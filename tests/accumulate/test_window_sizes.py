"""How many micro-batches a window has: a number, a function of the step, a list, and a change at a boundary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchwright.accumulate.accumulator import Accumulator
from batchwright.errors import InvalidInputError
from tests.accumulate.tagging import Watched, count_tokens, make_batches, make_tagger, token_loss
from tests.oracle.big_batch import big_batch_gradient, relative_error


def windows_of(accumulator: Accumulator, num_micro_batches: int, *, change: Any = None) -> list[int]:
    """Return the micro-batches of each window of an epoch; `change(accumulator, step)` runs at each boundary."""
    found = []
    for batch in accumulator.micro_batches(make_batches([1] * num_micro_batches), count_tokens):
        step = accumulator.backward(token_loss(accumulator.model, batch))
        if step:
            found.append(step.micro_batches)
            if change:
                change(accumulator, step)
    return found


def make(accumulation: Any) -> Accumulator:
    model = make_tagger()
    return Accumulator(model, Watched(model), accumulation)


def test_a_function_is_asked_with_the_number_of_steps_done() -> None:
    accumulator = make(lambda step: 1 if step < 2 else 3)
    assert windows_of(accumulator, 9) == [1, 1, 3, 3, 1]
    # The count of steps goes on in the next epoch.
    assert windows_of(accumulator, 4) == [3, 1]


def test_a_list_names_the_windows_of_each_epoch() -> None:
    accumulator = make([1, 3, 2])
    assert windows_of(accumulator, 6) == [1, 3, 2]
    assert windows_of(accumulator, 6) == [1, 3, 2]
    assert windows_of(accumulator, 3) == [1, 2]


def test_a_list_that_is_too_short_is_an_error_after_its_last_window() -> None:
    accumulator = make([1, 2])
    with pytest.raises(InvalidInputError, match="accumulation names fewer micro-batches than the loader has"):
        windows_of(accumulator, 4)
    assert accumulator.number == 2


def test_a_plain_loop_goes_through_the_list_again_and_again() -> None:
    accumulator = make([1, 3])
    model = accumulator.model
    steps = [accumulator.backward(token_loss(model, batch)) for batch in make_batches([1] * 8)]
    assert [step.micro_batches for step in steps if step] == [1, 3, 1, 3]


def test_a_plain_loop_begins_the_list_anew_after_flush() -> None:
    accumulator = make([1, 3])
    model = accumulator.model
    batches = make_batches([1] * 5)
    assert [bool(accumulator.backward(token_loss(model, batch))) for batch in batches[:3]] == [True, False, False]
    assert accumulator.flush() is not None
    assert [bool(accumulator.backward(token_loss(model, batch))) for batch in batches[3:]] == [True, False]


def test_it_can_be_assigned_at_a_boundary_while_a_window_has_been_read_ahead() -> None:
    accumulator = make(2)

    def change(accumulator: Accumulator, step: Any) -> None:
        if step.number == 1:
            accumulator.accumulation = 3
        if step.number == 2:
            accumulator.accumulation = 1

    assert windows_of(accumulator, 8, change=change) == [2, 3, 1, 1, 1]
    assert accumulator.accumulation == 1


def test_every_window_is_exact_when_the_size_changes() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 2)
    window: list[Any] = []
    batches = make_batches([2, 1, 3, 2, 1, 2, 2, 3])
    for batch in accumulator.micro_batches(batches, count_tokens):
        window.append(batch)
        reference = big_batch_gradient(model, window, token_loss)
        step = accumulator.backward(token_loss(model, batch))
        if step:
            assert relative_error(optimizer.seen[-1], reference) <= 1e-12
            accumulator.accumulation = step.number + 2
            window = []
    assert accumulator.number == 3


def test_it_cannot_be_assigned_in_the_middle_of_a_window() -> None:
    accumulator = make(3)
    accumulator.backward(token_loss(accumulator.model, make_batches([1])[0]))
    with pytest.raises(InvalidInputError, match="a window is open: 2 micro-batches are to come"):
        accumulator.accumulation = 2
    assert accumulator.accumulation == 3


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "4", [2, 0]])
def test_a_size_is_a_whole_number_from_one(wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match="accumulation must be a whole number from 1"):
        make(wrong)


def test_a_function_that_raises_ends_the_epoch_after_the_step() -> None:
    def sizes(step: int) -> int:
        if step == 1:
            raise ValueError("no plan for step 1")
        return 2

    accumulator = make(sizes)
    before = [weight.detach().clone() for weight in accumulator.model.parameters()]
    with pytest.raises(ValueError, match="no plan for step 1"):
        windows_of(accumulator, 6)
    assert accumulator.number == 1
    assert not torch.equal(before[0], next(accumulator.model.parameters()))
