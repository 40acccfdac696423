"""Several terms of a loss, each the mean over something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.loss_terms import LossTerm
from batchwright.errors import InvalidInputError
from tests.accumulate.tagging import Watched, count_tokens, make_batches, make_tagger, sample_loss, token_loss
from tests.oracle.big_batch import big_batch_gradient, relative_error


def penalty(model: nn.Module) -> torch.Tensor:
    return torch.stack([weight.square().sum() for weight in model.parameters()]).sum()


def all_terms(model: nn.Module, batch: Any) -> torch.Tensor:
    return token_loss(model, batch) + 0.3 * sample_loss(model, batch) + 0.01 * penalty(model)


def as_terms(model: nn.Module, batch: Any) -> list[LossTerm]:
    return [
        LossTerm(token_loss(model, batch)),
        LossTerm(0.3 * sample_loss(model, batch), over="samples"),
        LossTerm(0.01 * penalty(model), over="window"),
    ]


@pytest.mark.parametrize("sizes", [[2] * 4, [1] * 8, [3, 3, 2], [1, 7]], ids=lambda sizes: "+".join(map(str, sizes)))
def test_each_term_has_the_mean_that_it_declares(sizes: list[int]) -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, len(sizes))
    batches = make_batches(sizes)
    reference = big_batch_gradient(model, batches, all_terms)
    steps = [accumulator.backward(as_terms(model, batch)) for batch in accumulator.micro_batches(batches, count_tokens)]
    assert relative_error(optimizer.seen[0], reference) <= 1e-12
    assert steps[-1] is not None
    big = make_tagger()
    joined = (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))
    assert steps[-1].loss == pytest.approx(all_terms(big, joined).item(), rel=1e-12)


def test_one_weight_for_all_terms_would_fail_here() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 2)
    batches = make_batches([1, 7])
    reference = big_batch_gradient(model, batches, all_terms)
    for batch in accumulator.micro_batches(batches):
        accumulator.backward(all_terms(model, batch))
    assert relative_error(optimizer.seen[0], reference) > 1e-3


def test_a_micro_batch_without_tokens_still_has_samples_and_a_penalty() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3)
    batches = make_batches([2, 3, 1], empty=[1])
    reference = big_batch_gradient(model, batches, all_terms)
    for batch in accumulator.micro_batches(batches, count_tokens):
        accumulator.backward(as_terms(model, batch))
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


def test_the_share_of_a_window_term_does_not_grow_with_accumulation() -> None:
    norms = []
    for accumulation in (1, 2, 8):
        model = make_tagger()
        accumulator = Accumulator(model, Watched(model), accumulation, clip_norm=1e9)
        steps = [
            accumulator.backward([LossTerm(penalty(model), over="window")])
            for _ in accumulator.micro_batches(make_batches([1] * accumulation))
        ]
        assert steps[-1] is not None
        norms.append(steps[-1].gradient_norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-12)


def test_in_a_plain_loop_terms_over_samples_need_their_number() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    batch = make_batches([2])[0]
    with pytest.raises(InvalidInputError, match="a term of the loss is a mean over samples, and nothing says how many"):
        accumulator.backward([LossTerm(sample_loss(model, batch), over="samples")])
    assert all(weight.grad is None for weight in model.parameters())
    assert accumulator.backward([LossTerm(sample_loss(model, batch), over="samples")], samples=2) is None


def test_a_plain_loop_whose_terms_cannot_all_be_right_says_so_and_drops_the_window() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 2)
    first, second = make_batches([2, 5])
    accumulator.backward(as_terms(model, first), weight=count_tokens(first), samples=2)
    with pytest.raises(InvalidInputError, match="the terms of this loss are means over different things"):
        accumulator.backward(as_terms(model, second), weight=count_tokens(second), samples=5)
    assert optimizer.seen == []
    assert all(weight.grad is None for weight in model.parameters())


def test_a_term_is_over_something_known() -> None:
    with pytest.raises(InvalidInputError, match="a loss term is over units, samples, window; received 'tokens'"):
        LossTerm(torch.ones(()), over="tokens")  # type: ignore[arg-type]


def test_no_terms_are_no_loss() -> None:
    model = make_tagger()
    with pytest.raises(InvalidInputError, match="backward was given no loss: an empty list of terms"):
        Accumulator(model, Watched(model), 2).backward([])
