"""measure_critical_batch: the curve is fitted as it is, and short trainings give one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import batchwright as bw
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.branch_training import steps_to
from batchwright.noise.measure_critical_batch import Branch, fit_branches
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.report.display import render_plain


def workload(**changes: Any) -> bw.Workload:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 6, generator=generator)
    labels = inputs.sum(1, keepdim=True) + torch.randn(400, 1, generator=generator)
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(6, 1),
        "data": list(zip(inputs, labels, strict=True)),
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    }
    return bw.Workload(**{**parts, **changes})


@pytest.mark.parametrize(
    ("returned", "lines"),
    [
        (lambda loss: loss[None].expand(3), r"scalar tensor; received one of shape \(3,\)"),
        (lambda loss: None, "received NoneType"),
        (lambda loss: loss.item(), "received float"),
        (lambda loss: {"loss": loss}, "received dict"),
        (lambda loss: loss.detach(), "does not require a gradient"),
        (lambda loss: loss * 1j, "received a complex number"),
        (lambda loss: loss * float("nan"), "the held-out loss of batch 8 is no number"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_answered(returned: Any, lines: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return returned((model(batch[0]) - batch[1]).pow(2).mean())

    with pytest.raises(BatchwrightError, match=lines):
        bw.measure_critical_batch(workload(loss=loss), batches=(8, 16), steps=2, seeds=1)


@pytest.mark.filterwarnings("ignore:.*batch normalization")
def test_single_samples_for_batch_normalization_name_the_split() -> None:
    normalized = workload(model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
    with pytest.raises(InvalidInputError, match=r"^batch 4, as 1x4, has micro-batches that are too small for batch"):
        bw.measure_critical_batch(normalized, batches=(4, 8), steps=2, seeds=1)


@given(critical=st.floats(1, 1e4), steps=st.floats(10, 1e4))
def test_an_exact_curve_gives_its_own_numbers(critical: float, steps: float) -> None:
    branches = [Branch(b, 1.0, (steps * (1 + critical / b),) * 5) for b in (8, 64, 512)]
    measured = fit_branches(branches, target=1.0, noise_scale=None)
    assert measured is not None
    assert measured.critical_batch.value == pytest.approx(critical, rel=1e-6)
    assert measured.min_steps == pytest.approx(steps, rel=1e-6)


def test_perfect_scaling_has_no_critical_batch_in_range() -> None:
    measured = fit_branches([Branch(b, 1.0, (1000.0 / b, 999.0 / b)) for b in (8, 16)], target=1.0, noise_scale=None)
    assert measured is not None
    assert measured.critical_batch.value > 1e3


def test_a_branch_that_did_not_get_there_is_named() -> None:
    branches = [Branch(8, 1.0, (90.0, 91.0)), Branch(16, 1.0, (60.0, 61.0)), Branch(32, 1.0, (40.0, None))]
    measured = fit_branches(branches, target=1.0, noise_scale=None)
    assert measured is not None
    assert measured.notes[0].startswith("batch 32 did not reach")
    assert "not reached" in render_plain(measured)


def test_steps_are_read_off_the_best_loss_so_far() -> None:
    assert steps_to(1.0, [(0, 2.0), (10, 1.5), (20, 0.5)]) == pytest.approx(15.0)
    assert steps_to(0.1, [(0, 2.0), (10, 1.5)]) is None


def test_short_trainings_give_a_curve_beside_the_noise_scale() -> None:
    measured = bw.measure_critical_batch(workload(), batches=(4, 32), steps=20, seeds=1, warm_up=2)
    assert [branch.batch for branch in measured.branches] == [4, 32]
    means = [branch.mean_steps for branch in measured.branches]
    assert all(mean is not None for mean in means)
    assert means == sorted(means, reverse=True)  # type: ignore[type-var]
    assert measured.ratio is not None
    assert math.isfinite(measured.ratio)
    data = json.loads(json.dumps(measured.to_dict()))
    assert data["schema"] == 1
    assert "times the noise scale" in render_plain(measured)
    assert "<table>" in measured._repr_html_()


def test_a_branch_is_trained_once() -> None:
    lines: list[str] = []
    bw.measure_critical_batch(workload(), batches=(4, 32), steps=20, seeds=2, progress=lines.append)
    branches = [line.split(" to a loss")[0] for line in lines]
    # A smallest batch that missed the mean of the seeds' losses goes on to it.
    assert len(branches) - len(set(branches)) <= 1


def test_a_live_model_comes_back_as_it_was() -> None:
    model = nn.Linear(6, 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    bw.measure_critical_batch(workload(model=model), batches=(4, 16), steps=5, seeds=1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="two batches or more"):
        bw.measure_critical_batch(workload(), batches=(4,))
    with pytest.raises(InvalidInputError, match="only infers"):
        bw.measure_critical_batch(workload(optimizer=None), batches=(4, 8), steps=3, seeds=1)
    with pytest.raises(InvalidInputError, match="names 1 batch that"):
        bw.measure_critical_batch(workload(), batches=(4, 8), learning_rates={16: 0.1})
    with pytest.raises(InvalidInputError, match="learning rate must be"):
        bw.measure_critical_batch(workload(), batches=(4, 8), learning_rates={8: -1.0})
    with pytest.raises(BatchwrightError, match="fewer than two batches reached"):
        bw.measure_critical_batch(workload(), batches=(4, 8), steps=5, seeds=1, learning_rates={8: 1e-12})


def test_a_branch_that_diverges_is_left_out_and_named() -> None:
    measured = bw.measure_critical_batch(
        workload(), batches=(4, 8, 16), steps=8, seeds=1, learning_rates={16: 1e6}, evaluate_samples=20
    )
    assert measured.branches[-1].mean_steps is None
    assert "batch 16 did not reach" in measured.notes[0]


def test_the_rate_is_tuned_so_that_the_noise_scale_does_not_decide_the_answer() -> None:
    """At a rate far too small every batch gains by the rate alone; the answer must not be the rule's own."""

    def tiny_rate(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=1e-4)

    measured = bw.measure_critical_batch(workload(optimizer=tiny_rate), batches=(4, 16), steps=10, seeds=1)
    assert measured.branches[0].learning_rate_factor >= 16


def test_a_noise_scale_is_calibrated_by_the_ratio() -> None:
    branches = [Branch(b, 1.0, (100 * (1 + 50 / b),) * 5) for b in (8, 64, 512)]
    here = CriticalBatch(25.0, 20.0, 30.0, unit="samples", observations=50)
    measured = fit_branches(branches, target=1.0, noise_scale=here)
    assert measured is not None
    whole = measured.calibrated(CriticalBatch(100.0, 80.0, 120.0, unit="samples", observations=400))
    assert (whole.value, whole.low, whole.high) == pytest.approx((200, 160, 240))


@pytest.mark.parametrize("makes_batches", [False, True])
def test_later_branches_begin_as_if_what_is_before_were_trained_each_time(
    makes_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> list[Branch]:
        generator = torch.Generator().manual_seed(5)
        changes: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02)}
        if makes_batches:

            def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
                inputs = torch.randn(number, 6, generator=generator)
                return inputs, inputs.sum(1, keepdim=True) + torch.randn(number, 1)

            changes |= {"batch": batch, "data": None}
        dropping = workload(model=lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(6, 1)), **changes)
        return list(bw.measure_critical_batch(dropping, batches=(4, 16), steps=12, seeds=2, warm_up=8).branches)

    kept = measure()
    monkeypatch.setattr("batchwright.noise.branch_training._LEAST_FREE", math.inf)
    assert measure() == kept
