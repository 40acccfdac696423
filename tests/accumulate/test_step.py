"""What a step tells, and when it looks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.accumulate.accumulator import Accumulator
from tests.accumulate.tagging import Watched, count_tokens, make_batches, make_tagger, token_loss

if TYPE_CHECKING:
    from batchwright.accumulate.windows import Step


class Looks(TorchDispatchMode):
    """Counts operators, and how often the host asks one for a value: on a GPU each such would wait for it."""

    num = num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += func is torch.ops.aten._local_scalar_dense.default
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


def one_step(clip_norm: float | None = None) -> Step:
    model = make_tagger()
    accumulator = Accumulator(model, Watched(model), 3, clip_norm=clip_norm)
    batches = make_batches([2, 3, 1])
    steps = [accumulator.backward(token_loss(model, b)) for b in accumulator.micro_batches(batches, count_tokens)]
    assert steps[-1] is not None
    return steps[-1]


def test_what_it_tells() -> None:
    step = one_step(clip_norm=1.0)
    units = sum(map(count_tokens, make_batches([2, 3, 1])))
    assert step.to_dict() == {
        "number": 1,
        "loss": step.loss,
        "samples": 6,
        "units": units,
        "micro_batches": 3,
        "gradient_norm": step.gradient_norm,
        "skipped": None,
        "splits": 0,
    }
    assert str(step) == (
        f"step 1, loss {step.loss:.4f}, 6 samples, {units} units, 3 micro-batches, "
        f"gradient norm {step.gradient_norm:.3g}"
    )


def test_nothing_is_read_before_somebody_asks() -> None:
    step = one_step(clip_norm=1.0)
    with Looks() as looks:  # type: ignore[no-untyped-call]
        repr(step)
        assert (step.number, step.samples, step.micro_batches, step.skipped) == (1, 6, 3, None)
        assert looks.num_operators == 0
        assert isinstance(step.loss, float)
        after_loss = looks.num_operators
        assert after_loss > 0
        assert isinstance(step.gradient_norm, float)
        assert looks.num_operators > after_loss


def test_the_end_of_a_window_does_not_make_the_host_wait() -> None:
    model = make_tagger()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, clip_norm=1.0)
    losses = [token_loss(model, batch) for batch in make_batches([2, 3])]
    looks_of_backward = []
    for loss in losses:
        with Looks() as looks:  # type: ignore[no-untyped-call]
            accumulator.backward(loss)
        looks_of_backward.append(looks.num)
    # One each: on the CPU, and only there, a loss is looked at to refuse one that is not a number.
    assert looks_of_backward == [1, 1]


def test_the_norm_is_measured_only_where_it_is_used() -> None:
    step = one_step()
    assert step.gradient_norm is None
    assert "gradient norm" not in str(step)


def test_a_step_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        one_step().number = 3  # type: ignore[misc]
