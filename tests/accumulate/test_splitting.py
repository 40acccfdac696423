"""A micro-batch that runs out of memory is cut in two and run again, and nothing of it shows in the result."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.device.host import can_limit
from batchwright.errors import InvalidInputError
from tests.accumulate.tagging import Batch, Tagger, Watched, count_tokens, make_batches, make_tagger, token_loss
from tests.oracle.big_batch import big_batch_gradient, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FITS = 2
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB."


class FullInBackward(torch.autograd.Function):
    """Passes a tensor on, and has no memory for the gradient of more than so many samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        if len(gradient) > FITS:
            raise torch.OutOfMemoryError(FULL)
        return gradient


def full_in_forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    if len(batch[0]) > FITS:
        raise torch.OutOfMemoryError(FULL)
    return token_loss(model, batch)


def full_in_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    assert isinstance(model, Tagger)
    x, tags = batch
    # The outer layer has its gradient by the time the inner one fails.
    hidden = FullInBackward.apply(model.inner(x))  # type: ignore[no-untyped-call]
    scores = model.outer(torch.tanh(hidden))
    return nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


@pytest.mark.parametrize("loss_fn", [full_in_forward, full_in_backward])
@pytest.mark.parametrize("loop", ["plain", "micro_batches"])
def test_the_gradient_is_that_of_the_whole(loss_fn: Callable[..., torch.Tensor], loop: str) -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 3, on_oom="split", clip_norm=1e9)
    batches = make_batches([2, 5, 3])
    reference = big_batch_gradient(model, batches, token_loss)
    if loop == "plain":
        steps = [accumulator.run(batch, loss_fn, weight=count_tokens) for batch in batches]
    else:
        steps = [accumulator.run(batch, loss_fn) for batch in accumulator.micro_batches(batches, count_tokens)]
    assert relative_error(optimizer.seen[0], reference) <= 1e-12
    step = steps[-1]
    assert step is not None
    # 5 = (2 + 1) + 2 and 3 = 2 + 1.
    assert (step.splits, step.samples, step.micro_batches) == (3, 10, 3)
    assert step.units == sum(map(count_tokens, batches))


def test_without_a_weight_pieces_count_by_their_samples() -> None:
    model = make_tagger()
    optimizer = Watched(model)
    accumulator = Accumulator(model, optimizer, 1, on_oom="split")

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        if len(batch[0]) > FITS:
            raise torch.OutOfMemoryError(FULL)
        result: torch.Tensor = model(batch[0]).square().mean()
        return result

    batches = make_batches([5])
    reference = big_batch_gradient(model, batches, lambda m, batch: m(batch[0]).square().mean())
    accumulator.run(batches[0], loss_fn)
    assert relative_error(optimizer.seen[0], reference) <= 1e-12


def test_random_numbers_begin_anew_for_the_pieces() -> None:
    def noisy(limit: int) -> Callable[[nn.Module, Batch], torch.Tensor]:
        def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
            x, tags = batch
            x = x * torch.rand(len(x), 1, 1, dtype=x.dtype)
            if len(x) > limit:
                raise torch.OutOfMemoryError(FULL)
            return token_loss(model, (x, tags))

        return loss_fn

    seen = []
    for limit in (8, 2):
        model = make_tagger()
        optimizer = Watched(model)
        torch.manual_seed(3)
        Accumulator(model, optimizer, 1, on_oom="split").run(make_batches([4])[0], noisy(limit), weight=count_tokens)
        seen.append(optimizer.seen[0])
    assert relative_error(seen[1], seen[0]) <= 1e-12


def test_in_a_scaled_and_in_a_precise_window_too() -> None:
    model = make_tagger(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    accumulator = Accumulator(model, optimizer, 2, on_oom="split", precise=True, scaler=scaler)
    steps = [accumulator.run(b, full_in_backward, count_tokens) for b in make_batches([3, 4], torch.bfloat16)]
    assert steps[-1] is not None
    assert (steps[-1].splits, steps[-1].skipped) == (2, None)


@pytest.mark.parametrize("loss_fn", [full_in_forward, full_in_backward])
def test_one_sample_that_does_not_fit_is_an_error_and_gradients_stay(
    loss_fn: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 3, on_oom="split")
    accumulator.run(make_batches([2])[0], loss_fn, weight=count_tokens)
    before = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    monkeypatch.setitem(globals(), "FITS", 0)
    with pytest.raises(torch.OutOfMemoryError):
        accumulator.run(make_batches([4])[0], loss_fn, weight=count_tokens)
    after = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_any_other_error_is_the_users_and_gradients_stay() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 3, on_oom="split")
    accumulator.run(make_batches([2])[0], token_loss, weight=count_tokens)
    before = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    def buggy(model: nn.Module, batch: Batch) -> torch.Tensor:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        accumulator.run(make_batches([4])[0], buggy, weight=count_tokens)
    after = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_by_default_running_out_of_memory_is_raised() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2)
    with pytest.raises(torch.OutOfMemoryError):
        accumulator.run(make_batches([4])[0], full_in_forward)


def test_a_number_cannot_weigh_the_pieces() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 2, on_oom="split")
    with pytest.raises(InvalidInputError, match=r'^with on_oom="split" a weight is a function of the batch'):
        accumulator.run(make_batches([4])[0], token_loss, weight=12)


TRAINING = """
import json, sys, torch
from torch import nn
from batchwright.accumulate.accumulator import Accumulator
from batchwright.device.host import give_back, limited_to, read_memory

torch.set_num_threads(1)
WIDTH, MIB = 128, 2**20


def train(room_bytes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.ReLU(), nn.Linear(8 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulator = Accumulator(model, optimizer, 2, on_oom="split")
    lengths = [16, 16, 16, 4096, 16, 16]
    def loss_fn(model, batch):
        return (model(batch) - batch).square().mean()
    def epoch():
        batches = [torch.randn(4, length, WIDTH) for length in lengths]
        steps = [accumulator.run(b, loss_fn) for b in accumulator.micro_batches(batches, lambda b: b.numel())]
        return [step for step in steps if step]
    give_back()
    if room_bytes is None:
        return epoch()
    with limited_to(read_memory().data + room_bytes):
        return epoch()


free, limited = train(None), train(180 * MIB)
print(json.dumps([[(s.loss, s.samples, s.splits) for s in run] for run in (free, limited)]))
"""


@pytest.mark.skipif(not can_limit(), reason="needs a limit on memory that the kernel keeps")
def test_a_run_under_a_byte_budget_survives_one_long_batch_with_the_same_losses(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    free, limited = json.loads(done.stdout)
    assert [splits for _, _, splits in free] == [0, 0, 0]
    assert [splits > 0 for _, _, splits in limited] == [False, True, False]
    assert [samples for _, samples, _ in limited] == [8, 8, 8]
    assert [loss for loss, _, _ in limited] == pytest.approx([loss for loss, _, _ in free], rel=1e-6)


def test_a_failed_forward_does_not_move_running_statistics() -> None:
    class Normed(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + len(x)  # replaced, not changed in place
            x = self.norm(x)
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            result: torch.Tensor = self.out(x).mean()
            return result

    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model, twin = Normed(), Normed()
    with pytest.warns(UserWarning, match="batch normalization"):
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), 2, on_oom="split")
    for batch in accumulator.micro_batches([x[:4], x[4:]]):
        step = accumulator.run(batch, lambda model, batch: model(batch))
    assert step is not None
    assert step.splits == 2
    for piece in x.split(2):
        twin(piece)
    assert float(model.seen) == 8
    assert model.norm.num_batches_tracked == 4
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)


def test_a_batch_that_cannot_be_cut_says_so_when_it_does_not_fit() -> None:
    model = nn.Linear(4, 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, on_oom="split")

    def full(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with pytest.raises(InvalidInputError, match="its parts begin with 4 and 5"):
        accumulator.run({"weights": torch.ones(5), "x": torch.ones(4, 4)}, full, weight=lambda batch: 4)
