"""What is wrong is refused at the call, and gradients stay bit for bit as they were."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.weights import BatchNormWarning
from batchwright.errors import InvalidInputError
from tests.accumulate.tagging import Tagger, Watched, count_tokens, make_batches, make_tagger, token_loss

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = float("nan")

BAD_LOSSES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda loss: loss.reshape(1).repeat(3), r"backward takes a scalar loss; received a tensor of shape \(3,\)"),
    (lambda loss: loss.detach(), "the loss has no gradient: nothing that requires one went into it"),
    (lambda loss: loss.item(), "backward takes a loss, a scalar tensor; received"),
    (lambda loss: None, "backward takes a loss, a scalar tensor; received None"),
    (lambda loss: loss * NAN, "the loss is nan; gradients were left as they were"),
    (lambda loss: loss * float("inf"), "the loss is inf; gradients were left as they were"),
    (lambda loss: [loss, loss * NAN], "the loss is nan; gradients were left as they were"),
]
BAD_WEIGHTS: list[tuple[Any, str]] = [
    (-1, "a weight must be 0 or more, the units that the loss is a mean over; received -1.0"),
    (NAN, "a weight must be 0 or more, the units that the loss is a mean over; received nan"),
    (float("inf"), "a weight must be 0 or more, the units that the loss is a mean over; received inf"),
    ("many", "a weight is a number; received 'many'"),
    (torch.ones(2), "a weight is a number; received"),
]


def half_full() -> tuple[Tagger, Watched, Accumulator, list[torch.Tensor]]:
    """Return an accumulator in the middle of a window, and what it has added up."""
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3)
    accumulator.backward(token_loss(model, make_batches([2])[0]), weight=7)
    return model, optimizer, accumulator, gradients(model)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def goes_on(model: Tagger, accumulator: Accumulator) -> bool:
    """Whether the window still takes the two micro-batches that it lacks, and no more."""
    first, second = make_batches([1, 2])
    return (
        accumulator.backward(token_loss(model, first), weight=1) is None
        and accumulator.backward(token_loss(model, second), weight=1) is not None
    )


@pytest.mark.parametrize(("spoil", "message"), BAD_LOSSES, ids=[message[:30] for _, message in BAD_LOSSES])
def test_a_loss_that_cannot_be_used(spoil: Callable[[Any], Any], message: str) -> None:
    model, _, accumulator, before = half_full()
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        accumulator.backward(spoil(token_loss(model, make_batches([2])[0])))
    assert are_equal(gradients(model), before)
    assert goes_on(model, accumulator)


@pytest.mark.parametrize(("weight", "message"), BAD_WEIGHTS, ids=[str(weight)[:6] for weight, _ in BAD_WEIGHTS])
def test_a_weight_that_cannot_be_used(weight: Any, message: str) -> None:
    model, _, accumulator, before = half_full()
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        accumulator.backward(token_loss(model, make_batches([2])[0]), weight=weight)
    assert are_equal(gradients(model), before)
    assert goes_on(model, accumulator)


def test_a_weight_that_a_function_counted_wrong() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    with pytest.raises(InvalidInputError, match=r"^a weight must be 0 or more"):
        next(iter(accumulator.micro_batches(make_batches([1]), lambda batch: -3)))
    assert gradients(model) == []


def test_a_body_that_left_one_out_without_saying_so() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3)
    batches = accumulator.micro_batches(make_batches([2] * 3), count_tokens)
    accumulator.backward(token_loss(model, next(batches)))
    before = gradients(model)
    next(batches)
    with pytest.raises(InvalidInputError, match=r"^a micro-batch went by without backward\(loss\), run\(batch, ...\)"):
        next(batches)
    assert are_equal(gradients(model), before)
    assert optimizer.seen == []


def test_a_body_that_left_out_the_very_last_one() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 1)
    with pytest.raises(InvalidInputError, match=r"^a micro-batch went by without backward"):
        list(accumulator.micro_batches(make_batches([2])))


@pytest.mark.parametrize("second", ["backward", "skip", "run"])
def test_a_second_call_for_one_micro_batch(second: str) -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    batches = accumulator.micro_batches(make_batches([2] * 2), count_tokens)
    batch = next(batches)
    accumulator.backward(token_loss(model, batch))
    before = gradients(model)
    calls: dict[str, Callable[[], object]] = {
        "backward": lambda: accumulator.backward(token_loss(model, batch)),
        "run": lambda: accumulator.run(batch, token_loss),
        "skip": accumulator.skip,
    }
    with pytest.raises(InvalidInputError, match=r"^this micro-batch is done already: one backward, run or skip each"):
        calls[second]()
    assert are_equal(gradients(model), before)
    assert accumulator.backward(token_loss(model, next(batches))) is not None


def test_flush_inside_micro_batches() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    next(batches := accumulator.micro_batches(make_batches([2] * 2)))
    with pytest.raises(InvalidInputError, match=r"^inside micro_batches the last window steps by itself"):
        accumulator.flush()
    batches.close()  # type: ignore[attr-defined]


def test_a_new_epoch_while_a_window_is_open() -> None:
    _, optimizer, accumulator, _ = half_full()
    with pytest.raises(InvalidInputError, match=r"^a window is open: 2 micro-batches are to come"):
        next(iter(accumulator.micro_batches(make_batches([1]))))
    assert accumulator.flush() is not None
    assert len(optimizer.seen) == 1


@pytest.mark.parametrize("how", ["zero_grad", "another optimizer"])
def test_gradients_that_somebody_threw_away(how: str) -> None:
    model, optimizer, accumulator, _ = half_full()
    if how == "another optimizer":
        torch.optim.Adam(model.parameters()).step()
    optimizer.zero_grad()
    with pytest.raises(InvalidInputError, match=r"^the gradients of 1 micro-batches are gone: somebody zeroed them"):
        accumulator.backward(token_loss(model, make_batches([2])[0]))
    assert gradients(model) == []


def test_another_optimizer_in_the_middle_of_a_window() -> None:
    model, _, accumulator, before = half_full()
    with pytest.raises(InvalidInputError, match=r"^a window is open: 2 micro-batches are to come"):
        accumulator.optimizer = torch.optim.Adam(model.parameters())
    assert are_equal(gradients(model), before)
    assert goes_on(model, accumulator)


def test_another_optimizer_at_a_boundary_steps_from_then_on() -> None:
    model, first, accumulator, _ = half_full()
    assert goes_on(model, accumulator)
    second = Watched(model)
    accumulator.optimizer = second
    assert accumulator.optimizer is second
    accumulator.accumulation = 1
    step = accumulator.backward(token_loss(model, make_batches([2])[0]))
    assert step is not None
    assert step.skipped is None
    assert (len(first.seen), len(second.seen)) == (1, 1)


def test_an_optimizer_of_another_model() -> None:
    model = make_tagger()
    with pytest.raises(InvalidInputError, match=r"^Watched holds none of the model's weights"):
        Accumulator(model, Watched(make_tagger()), 2)


def test_weights_that_were_replaced_after_the_optimizer_was_made() -> None:
    model, _, accumulator, _ = half_full()
    for layer in (model.inner, model.outer):
        layer.weight, layer.bias = nn.Parameter(layer.weight.data), nn.Parameter(layer.bias.data)
    loss = token_loss(model, make_batches([2])[0])
    with pytest.raises(InvalidInputError, match=r"^Watched holds none of the model's weights"):
        accumulator.backward(loss)
    assert gradients(model) == []


def test_a_model_with_nothing_to_train() -> None:
    model = make_tagger().requires_grad_(False)
    with pytest.raises(InvalidInputError, match=r"^the model has no weight that requires a gradient"):
        Accumulator(model, Watched(model), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "clip_norm must be above 0; received 0"),
        ({"clip_norm": NAN}, "clip_norm must be above 0; received nan"),
        ({"clip_norm": "1"}, "clip_norm must be above 0; received '1'"),
        ({"on_oom": "shrink"}, 'on_oom is "raise" or "split"; received \'shrink\''),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = make_tagger()
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        Accumulator(model, Watched(model), 2, **options)


def test_no_optimizer() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^an accumulator needs an optimizer, or a list of them; received none"
    ):
        Accumulator(make_tagger(), [], 2)


def test_batch_normalization_is_explained() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.SyncBatchNorm(3))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(BatchNormWarning, match=r"^1, 3: batch normalization takes its statistics from each micro-batch"):
        Accumulator(model, optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accumulator(model, optimizer, 1)
        model[1].eval(), model[3].eval()
        Accumulator(model, optimizer, 2)
