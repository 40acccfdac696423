"""The gradient at the end of a window is that of the big batch, for every split of a loader."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.errors import InvalidInputError
from tests.accumulate.tagging import Watched, count_tokens, make_batches, make_tagger, sample_loss, token_loss
from tests.oracle.big_batch import big_batch_gradient, joined, relative_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.accumulate.windows import Step

SPLITS = [[2] * 4, [4] * 2, [1] * 8, [8], [3, 3, 2], [1, 7]]
BOUNDS = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


def train(
    sizes: Sequence[int],
    accumulation: Any,
    *,
    dtype: torch.dtype = torch.float64,
    weight: Any = count_tokens,
    loss: Any = token_loss,
    empty: Sequence[int] = (),
) -> tuple[list[Step], list[float]]:
    """Train for an epoch; return the steps, and the error of each, in gradient or loss, to the big batch."""
    model = make_tagger(dtype)
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, accumulation)
    batches = make_batches(sizes, dtype, empty=empty)
    steps: list[Step] = []
    errors: list[float] = []
    window: list[Any] = []
    reference: list[torch.Tensor] = []
    for batch in accumulator.micro_batches(batches, weight=weight):
        window.append(batch)
        if any(count_tokens(b) for b in window):
            reference = big_batch_gradient(model, window, loss)
            big_loss = loss(model, joined(window)).item()
        step = accumulator.backward(loss(model, batch))
        if step is None:
            continue
        steps.append(step)
        if step.skipped is None:
            errors.append(max(relative_error(optimizer.seen[-1], reference), abs(step.loss / big_loss - 1)))
        window = []
    assert sum(step.micro_batches for step in steps) == len(sizes)
    return steps, errors


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=["fp64", "fp32"])
@pytest.mark.parametrize("sizes", SPLITS, ids=lambda sizes: "+".join(map(str, sizes)))
def test_the_gradient_of_a_window_equals_the_big_batch(sizes: list[int], dtype: torch.dtype, bound: float) -> None:
    steps, errors = train(sizes, len(sizes), dtype=dtype)
    assert len(steps) == 1
    assert max(errors) <= bound
    assert steps[0].samples == 8


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS, ids=["fp64", "fp32"])
@pytest.mark.parametrize(("sizes", "accumulation"), [([2] * 5, 4), ([3, 3, 2, 3, 1], 3), ([1] * 9, 4), ([2], 4)])
def test_the_last_and_incomplete_window_too(
    sizes: list[int], accumulation: int, dtype: torch.dtype, bound: float
) -> None:
    steps, errors = train(sizes, accumulation, dtype=dtype)
    assert len(errors) == len(steps) == math.ceil(len(sizes) / accumulation)
    assert steps[-1].micro_batches == (len(sizes) - 1) % accumulation + 1
    assert max(errors) <= bound


def test_without_a_weight_samples_count() -> None:
    steps, errors = train([3, 1, 4], 3, weight=None, loss=sample_loss)
    assert max(errors) <= 1e-12
    assert steps[0].units == steps[0].samples == 8


def test_the_mean_of_means_would_fail_here() -> None:
    _, errors = train([3, 1, 4], 3, weight=lambda batch: 1)
    assert min(errors) > 0.05


def test_a_micro_batch_without_tokens_counts_nothing() -> None:
    # The mean over none is not a number; it must not reach the gradient.
    steps, errors = train([2, 2, 2, 2], 4, empty=[0, 3])
    assert max(errors) <= 1e-12
    assert steps[0].micro_batches == 4


def test_a_window_without_tokens_makes_no_update_and_says_why() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accumulator = Accumulator(model, optimizer, 2, scheduler=schedule)
    before = [weight.detach().clone() for weight in model.parameters()]
    batches = make_batches([2, 2, 2], empty=[0, 1, 2])
    steps = [accumulator.backward(token_loss(model, b)) for b in accumulator.micro_batches(batches, count_tokens)]
    assert [step and step.skipped for step in steps] == [
        None,
        "the window holds no units: every weight is 0",
        "the window holds no units: every weight is 0",
    ]
    assert optimizer.seen == []
    assert schedule.last_epoch == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert steps[-1] is not None
    assert math.isnan(steps[-1].loss)
    assert steps[-1].to_dict()["loss"] is None


def test_a_weight_in_the_body_overrides_the_one_that_was_read() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3)
    batches = make_batches([2, 3, 1])
    reference = big_batch_gradient(model, batches, token_loss)
    for batch in accumulator.micro_batches(batches):
        accumulator.backward(token_loss(model, batch), weight=count_tokens(batch))
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


@pytest.mark.parametrize("left_out", ["skip", "weight=0"])
def test_what_the_body_leaves_out_is_left_out_of_the_mean(left_out: str) -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 4)
    batches = make_batches([2, 3, 1, 2])
    reference = big_batch_gradient(model, [batches[0], batches[3]], token_loss)
    step = None
    for index, batch in enumerate(accumulator.micro_batches(batches, count_tokens)):
        if index in (0, 3):
            step = accumulator.backward(token_loss(model, batch))
        elif left_out == "skip":
            accumulator.skip()
        else:
            accumulator.backward(token_loss(model, batch), weight=0)
    assert step is not None
    assert (step.micro_batches, step.samples) == (2, 4)
    assert step.units == count_tokens(batches[0]) + count_tokens(batches[3])
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=7), st.integers(1, 5), st.sets(st.integers(0, 6)))
def test_any_split_any_accumulation_any_empty_micro_batches(
    sizes: list[int], accumulation: int, empty: set[int]
) -> None:
    _, errors = train(sizes, accumulation, empty=sorted(empty))
    assert max(errors, default=0.0) <= 1e-12


def test_the_loader_is_read_one_window_ahead_and_no_further() -> None:
    read: list[int] = []

    def loader() -> Any:
        for index, batch in enumerate(make_batches([1] * 6)):
            read.append(index)
            yield batch

    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    seen = []
    for batch in accumulator.micro_batches(loader(), count_tokens):
        seen.append(len(read))
        accumulator.backward(token_loss(model, batch))
    assert seen == [2, 2, 4, 4, 6, 6]


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def test_a_data_loader_with_workers() -> None:
    model = torch.nn.Linear(3, 1, dtype=torch.float32)
    optimizer = Watched(model, lr=0.0)
    accumulator = Accumulator(model, optimizer, 2)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
    steps = [accumulator.backward(model(batch).square().mean()) for batch in accumulator.micro_batches(loader)]
    assert [step.samples for step in steps if step] == [4, 4, 2]
    whole = torch.stack([Squares()[index] for index in range(4, 8)])
    reference = big_batch_gradient(model, [whole], lambda m, batch: m(batch).square().mean())
    assert relative_error(optimizer.seen[1], reference) <= 1e-6


def test_what_the_loader_raises_comes_after_the_windows_before_it() -> None:
    def loader() -> Any:
        yield from make_batches([1] * 3)
        raise OSError("the disk is gone")

    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    batches = accumulator.micro_batches(loader(), count_tokens)
    steps = [accumulator.backward(token_loss(model, next(batches))) for _ in range(2)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert [step and step.number for step in steps] == [None, 1]
    assert all(weight.grad is None for weight in model.parameters())
    # And it can go on.
    again = [accumulator.backward(token_loss(model, b)) for b in accumulator.micro_batches(make_batches([1] * 2))]
    assert again[-1] is not None
    assert again[-1].number == 2


def test_the_loop_of_the_front_page() -> None:
    model = torch.nn.Linear(3, 1)
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters()), accumulation=2, clip_norm=1.0)
    printed = []
    for micro in accumulator.micro_batches([torch.ones(2, 3), torch.ones(1, 3)], weight=len):
        step = accumulator.backward(model(micro).mean())
        if step and step.number % 100 == 1:
            printed.append(str(step))
    assert len(printed) == 1
    assert "3 samples" in printed[0]


def class_weighted() -> tuple[nn.Linear, list[dict[str, torch.Tensor]], Any]:
    torch.manual_seed(0)
    x, y = torch.randn(24, 6, dtype=torch.float64), torch.randint(0, 5, (24,))
    shared = torch.ones(5, dtype=torch.float64)
    batches = [{"class_weights": shared, "x": x[part], "y": y[part]} for part in torch.arange(24).split(7)]

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], weight=batch["class_weights"])

    return nn.Linear(6, 5, dtype=torch.float64), batches, loss


def test_a_batch_that_begins_with_what_all_samples_share_is_not_counted_by_it() -> None:
    model, batches, loss = class_weighted()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, len(batches))
    with pytest.raises(InvalidInputError, match="its parts begin with 5 and 7"):
        next(accumulator.micro_batches(batches))
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("x", "y")}
    reference = torch.autograd.grad(
        loss(model, {**whole, "class_weights": torch.ones(5).double()}), [*model.parameters()]
    )
    for batch in accumulator.micro_batches(batches, weight=lambda batch: len(batch["y"])):
        accumulator.backward(loss(model, batch))
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


def test_the_batch_size_of_a_loader_tells_the_samples_where_the_batch_does_not() -> None:
    model, batches, loss = class_weighted()
    rows = [(x, y) for batch in batches for x, y in zip(batch["x"], batch["y"], strict=True)]

    def collate(samples: Any) -> dict[str, torch.Tensor]:
        x, y = zip(*samples, strict=True)
        return {"class_weights": torch.ones(5).double(), "x": torch.stack(x), "y": torch.stack(y)}

    loader: Any = torch.utils.data.DataLoader(rows, batch_size=7, collate_fn=collate)  # type: ignore[arg-type]
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 4)
    reference = torch.autograd.grad(loss(model, collate(rows)), [*model.parameters()])
    for batch in accumulator.micro_batches(loader):
        step = accumulator.backward(loss(model, batch))
    assert step is not None
    assert step.samples == 24
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


def test_a_batch_of_which_nothing_tells_the_samples_is_asked_about() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    with pytest.raises(InvalidInputError, match=r"nothing tells how many samples(\n|.)*weight=1 where all"):
        next(accumulator.micro_batches([object(), object()]))
    assert next(accumulator.micro_batches([1, 2], weight=1)) == 1
