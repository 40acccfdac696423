"""Several terms of a loss, each the mean over something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.micro_batches import LossTerm
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
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 1)
    term = LossTerm(model.inner.weight.sum(), over="tokens")
    with pytest.raises(InvalidInputError, match="a loss term is over units, samples, window; received 'tokens'"):
        accumulator.backward([term])
    with pytest.raises(InvalidInputError, match="a loss term is over"):
        LossTerm(model.inner.weight.sum(), over=3)  # type: ignore[arg-type]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(6, 5, dtype=torch.float64) for _ in range(2))


def two_masks() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Micro-batches of two labels each, masked apart; the first has none of the first kind."""
    torch.manual_seed(1)
    x, labels = torch.randn(24, 6, dtype=torch.float64), torch.randint(0, 5, (24,))
    first, second = labels.clone(), labels.clone()
    first[:10] = second[12:20] = -100
    return [(x[part], first[part], second[part]) for part in torch.arange(24).split(6)]


def head_losses(model: Any, batch: Any) -> list[torch.Tensor]:
    heads = ((model.first, batch[1]), (model.second, batch[2]))
    return [nn.functional.cross_entropy(head(batch[0]), labels) for head, labels in heads]


COUNTS = {name: (lambda batch, at=at: int((batch[at] != -100).sum())) for name, at in (("first", 1), ("second", 2))}


@pytest.mark.parametrize("on_oom", ["raise", "split"])
def test_two_terms_with_masks_of_their_own_are_each_over_their_own_count(on_oom: str) -> None:
    model = TwoHeads()
    optimizer = Watched(model, lr=0.0)
    accumulator = Accumulator(model, optimizer, 4, on_oom=on_oom)
    reference = big_batch_gradient(
        model, two_masks(), lambda model, batch: torch.stack(head_losses(model, batch)).sum()
    )
    whole = sum(loss.item() for loss in head_losses(model, tuple(map(torch.cat, zip(*two_masks(), strict=True)))))

    def terms(model: TwoHeads, batch: Any) -> list[LossTerm]:
        if on_oom == "split" and len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return [LossTerm(loss, over=name) for loss, name in zip(head_losses(model, batch), COUNTS, strict=True)]

    for batch in accumulator.micro_batches(two_masks(), weight=COUNTS):
        step = accumulator.run(batch, terms)
    assert step is not None
    assert step.loss == pytest.approx(whole, rel=1e-6)
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


def test_with_counts_by_name_every_term_must_name_its_own() -> None:
    model = TwoHeads()
    accumulator = Accumulator(model, Watched(model), 4)
    for batch in accumulator.micro_batches(two_masks()[2:], weight=COUNTS):
        with pytest.raises(InvalidInputError, match="the weight counts first, second apart"):
            accumulator.backward(head_losses(model, batch)[0])
        with pytest.raises(InvalidInputError, match="over units, samples, window, first, second; received 'third'"):
            accumulator.backward([LossTerm(head_losses(model, batch)[0], over="third")])
        break
    other = Accumulator(model, Watched(model), 4)
    with pytest.raises(InvalidInputError, match="has names other than units, samples, window"):
        next(other.micro_batches(two_masks(), weight={"samples": len}))


def test_no_terms_are_no_loss() -> None:
    model = make_tagger()
    with pytest.raises(InvalidInputError, match="backward was given no loss: an empty list of terms"):
        Accumulator(model, Watched(model), 2).backward([])
