"""Stop in the middle of an epoch, and go on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchwright.accumulate.accumulator import Accumulator
from batchwright.errors import InvalidInputError
from tests.accumulate.tagging import count_tokens, make_batches, make_tagger, token_loss

SIZES = [2, 1, 3, 2, 1, 2, 3]


def make(accumulation: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Accumulator]:
    model = make_tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, Accumulator(model, optimizer, accumulation)


def train(accumulator: Accumulator, *, until: int | None = None) -> list[float]:
    """Train for an epoch, or until a step; return the losses of the steps."""
    losses = []
    for batch in accumulator.micro_batches(make_batches(SIZES), count_tokens):
        step = accumulator.backward(token_loss(accumulator.model, batch))
        if step:
            losses.append(step.loss)
            if step.number == until:
                break
    return losses


@pytest.mark.parametrize("accumulation", [2, [1, 2, 1, 3], lambda step: 1 + step % 2])
@pytest.mark.parametrize("saved_after", [1, 2, 5])
def test_a_resumed_run_goes_on_where_it_stood(accumulation: Any, saved_after: int) -> None:
    _, _, whole = make(accumulation)
    expected = train(whole) + train(whole)

    model, optimizer, first = make(accumulation)
    losses = train(first, until=saved_after)
    if saved_after > first.number:
        losses += train(first, until=saved_after)
    saved = (model.state_dict(), optimizer.state_dict(), first.state_dict())

    model, optimizer, second = make(accumulation)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    second.load_state_dict(saved[2])
    assert second.number == saved_after
    losses += train(second)
    if len(losses) < len(expected):
        losses += train(second)
    assert losses == expected


def test_the_state_is_that_of_the_last_finished_window() -> None:
    _, _, accumulator = make(2)
    states = []
    for batch in accumulator.micro_batches(make_batches(SIZES), count_tokens):
        accumulator.backward(token_loss(accumulator.model, batch))
        states.append(accumulator.state_dict())
    assert [state["micro_batches_done"] for state in states] == [0, 2, 2, 4, 4, 6, 7]
    assert [state["windows_done"] for state in states] == [0, 1, 1, 2, 2, 3, 4]
    # The epoch is over, so the next begins at its first micro-batch.
    assert accumulator.state_dict() == {"number": 4, "windows_done": 0, "micro_batches_done": 0}


def test_a_new_epoch_begins_at_its_beginning_even_if_the_one_before_was_left_early() -> None:
    _, _, accumulator = make(2)
    train(accumulator, until=1)
    assert len(train(accumulator)) == 4


def test_a_state_is_not_loaded_into_an_open_window() -> None:
    model, _, accumulator = make(2)
    accumulator.backward(token_loss(model, make_batches([1])[0]))
    with pytest.raises(InvalidInputError, match="a window is open: 1 micro-batches are to come"):
        accumulator.load_state_dict({"number": 3, "windows_done": 0, "micro_batches_done": 0})
    assert accumulator.number == 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "no state of an Accumulator"),
        ({"number": 3}, "no state of an Accumulator"),
        ({"number": 3, "windows_done": -1, "micro_batches_done": 0}, "windows_done must be a whole number"),
        ({"number": 3, "windows_done": 0, "micro_batches_done": "2"}, "micro_batches_done must be a whole number"),
        ({"number": 3, "windows_done": 4, "micro_batches_done": 8}, "4 windows of an epoch, and 3 in all"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(state: Any, message: str) -> None:
    _, _, accumulator = make(2)
    before = accumulator.state_dict()
    with pytest.raises(InvalidInputError, match=message):
        accumulator.load_state_dict(state)
    assert accumulator.state_dict() == before
