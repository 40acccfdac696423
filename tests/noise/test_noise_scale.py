"""NoiseScale on an Accumulator: every observation equals the one by hand, and nothing is silently a number."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.cached_loss import CachedLoss
from batchwright.accumulate.micro_batches import LossTerm
from batchwright.errors import InvalidInputError
from batchwright.noise.noise_scale import NoiseScale, NoiseScaleWarning
from tests.noise.regression import DTYPES, STEPS, WIDTH, batches_of, expected, loss_of, make_model, seen_by
from tests.oracle.noise_by_hand import observe_by_hand

TOLERANCE = {"float64": 1e-11, "float32": 1e-5}


def trained(
    sizes: list[int],
    dtype: str = "float64",
    *,
    steps: int = STEPS,
    model: Any = None,
    noise: Any = None,
    **options: Any,
) -> tuple[NoiseScale, Accumulator]:
    model = make_model(dtype) if model is None else model
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), len(sizes), **options)
    measured = NoiseScale(accumulator, **{"window": 10**9, **(noise or {})})
    for step in range(steps):
        for batch in accumulator.micro_batches(batches_of(step, sizes, dtype)):
            accumulator.backward(loss_of(model, batch))
    return measured, accumulator


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[4, 4], [4] * 4, [2] * 8, [1] * 6, [3, 1, 2, 4], [1, 7]])
def test_accumulation_gives_the_observations_by_hand(sizes: list[int], dtype: str) -> None:
    noise, _ = trained(sizes, dtype)
    for found, wanted in zip(seen_by(noise), expected(sizes, dtype), strict=True):
        assert found == pytest.approx(wanted, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("options", [{"clip_norm": 1e-3}, {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}])
def test_clipping_and_loss_scale_do_not_change_the_answer(options: dict[str, Any]) -> None:
    noise, _ = trained([4] * 4, steps=1, **options)
    assert seen_by(noise)[0] == pytest.approx(expected([4] * 4)[0], rel=1e-9)


def test_a_plain_loop_with_weights_counts_in_units() -> None:
    model, weights = make_model(), [30.0, 10.0, 20.0]
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 3)
    noise = NoiseScale(accumulator, unit="tokens")
    parts = batches_of(0, [3, 1, 2])
    twin = copy.deepcopy(model)
    for batch, weight in zip(parts, weights, strict=True):
        accumulator.backward(loss_of(model, batch), weight=weight, samples=len(batch))
    assert seen_by(noise)[0] == pytest.approx(observe_by_hand(twin, loss_of, parts, weights), rel=1e-11)
    found = noise.critical_batch
    assert found is not None
    assert found.unit == "tokens"
    assert found.samples_per_unit == pytest.approx(0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_micro_batch_is_looked_at_example_by_example(dtype: str) -> None:
    noise, accumulator = trained([6], dtype)
    assert accumulator.number == STEPS
    for found, wanted in zip(seen_by(noise), expected([1] * 6, dtype), strict=True):
        assert found == pytest.approx(wanted, rel=TOLERANCE[dtype])
    assert noise.critical_batch is not None
    assert not noise.notes


class Shifted(nn.Module):
    """A weight that no known module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.net(x) + self.shift
        return shifted


def test_an_unknown_module_has_the_batch_cut_in_two_and_it_is_said() -> None:
    model = Shifted()
    wanted = observe_by_hand(copy.deepcopy(model), loss_of, batches_of(0, [5])[0].split([3, 2]), [3, 2])
    with pytest.warns(NoiseScaleWarning, match=r"Shifted|shift"):
        noise, accumulator = trained([5], model=model, steps=1)
    assert seen_by(noise)[0] == pytest.approx(wanted, rel=1e-11)
    assert accumulator.number == 1


def test_cutting_does_not_change_training_nor_the_place_in_an_epoch() -> None:
    models = (Shifted(), Shifted())
    plain, watched = (Accumulator(m, torch.optim.SGD(m.parameters(), lr=0.05), 1) for m in models)
    with pytest.warns(NoiseScaleWarning):
        NoiseScale(watched, every=2)
    for accumulator in (plain, watched):
        for batch in accumulator.micro_batches(batches_of(0, [4, 5, 3])):
            accumulator.backward(loss_of(accumulator.model, batch))
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12)


def test_training_is_not_changed_bit_for_bit() -> None:
    weights = []
    for is_watched in (False, True):
        model = make_model("float32")
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 3, clip_norm=0.5)
        if is_watched:
            NoiseScale(accumulator)
        for batch in accumulator.micro_batches(batches_of(0, [3, 1, 2, 4, 4, 4], "float32")):
            accumulator.backward(loss_of(model, batch))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_every_looks_at_one_step_in_so_many() -> None:
    noise, _ = trained([4] * 2, steps=7, noise={"every": 3})
    assert [one["step"] for one in noise.state_dict()["track"]["kept"]] == [1, 4, 7]


def test_values_by_group_add_up() -> None:
    model = make_model()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "name": "first"},
        {"params": model[2].parameters()},
    ]
    accumulator = Accumulator(model, torch.optim.SGD(groups, lr=0.05), 4)
    noise = NoiseScale(accumulator)
    for batch in accumulator.micro_batches(batches_of(0, [4] * 8)):
        accumulator.backward(loss_of(model, batch))
    found = noise.by_group
    assert list(found) == ["first", "group 1"]
    assert noise.critical_batch is not None
    assert sum(each.trace for each in found.values()) == pytest.approx(noise.critical_batch.trace)
    assert sum(each.signal for each in found.values()) == pytest.approx(noise.critical_batch.signal)


def test_a_run_that_was_stopped_and_resumed_gives_the_same_answer() -> None:
    whole, _ = trained([4] * 4, steps=8, noise={"window": 64.0})
    first, _ = trained([4] * 4, steps=8, noise={"window": 64.0})
    state = json.loads(json.dumps(first.state_dict()))
    model = make_model()
    second = NoiseScale(Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 4))
    second.load_state_dict(state)
    assert second.critical_batch == whole.critical_batch
    assert second.history == whole.history
    assert len(state["track"]["kept"]) == 4


def test_gradients_that_are_not_numbers_are_skipped_and_counted() -> None:
    model = make_model()
    accumulator = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.05), 2, scaler=torch.amp.GradScaler("cpu", init_scale=8.0)
    )
    noise = NoiseScale(accumulator)
    batches = batches_of(0, [4] * 4)
    batches[1][0, 0] = math.inf
    for batch in accumulator.micro_batches(batches):
        accumulator.backward(loss_of(model, batch))
    assert noise.observations == 1
    assert noise.skipped == {"a gradient that is infinite or not a number": 1}


def test_a_zero_gradient_is_infinite_and_not_resolved() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    noise = NoiseScale(accumulator)
    for batch in accumulator.micro_batches(batches_of(0, [4] * 20)):
        accumulator.backward(0.0 * loss_of(model, batch))
    found = noise.critical_batch
    assert found is not None
    assert math.isinf(found.value)
    assert not found.resolved
    assert found.to_dict()["value"] is None


def test_few_observations_have_no_interval() -> None:
    noise, _ = trained([4] * 4, steps=2)
    found = noise.critical_batch
    assert found is not None
    assert (found.low, found.resolved, found.observations) == (0.0, False, 2)


def test_nothing_measured_is_none() -> None:
    model = make_model()
    noise = NoiseScale(Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2))
    assert noise.critical_batch is None
    assert noise.history == []


def test_one_micro_batch_in_a_plain_loop_of_an_unknown_module_is_skipped_and_said() -> None:
    model = Shifted()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 1)
    with pytest.warns(NoiseScaleWarning, match="cannot be told apart"):
        noise = NoiseScale(accumulator)
    accumulator.backward(loss_of(model, batches_of(0, [4])[0]))
    assert noise.critical_batch is None
    assert noise.skipped == {"one micro-batch only: there is nothing to compare": 1}


def test_weights_that_are_frozen_mid_run_begin_a_new_window() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    noise = NoiseScale(accumulator)
    for batch in accumulator.micro_batches(batches_of(0, [4] * 4)):
        accumulator.backward(loss_of(model, batch))
    model[0].requires_grad_(False)
    twin = copy.deepcopy(model)
    for batch in accumulator.micro_batches(batches_of(1, [4] * 4)):
        accumulator.backward(loss_of(model, batch))
    # The window that was already prepared may still have the weights of before; the next has not.
    seen = seen_by(noise)
    wanted = observe_by_hand(twin, loss_of, batches_of(1, [4] * 4)[:2], [4, 4])
    assert seen[0] == pytest.approx(wanted, rel=1e-11)
    assert len(seen) == 2
    assert "measured anew" in noise.notes[0]


def test_weights_that_are_added_mid_run_are_measured_too() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05)
    model[0].requires_grad_(False)
    accumulator = Accumulator(model, optimizer, 2)
    noise = NoiseScale(accumulator)
    for batch in accumulator.micro_batches(batches_of(0, [4] * 2)):
        accumulator.backward(loss_of(model, batch))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    accumulator.optimizer = optimizer
    twin = copy.deepcopy(model)
    for batch in accumulator.micro_batches(batches_of(1, [4] * 2)):
        accumulator.backward(loss_of(model, batch))
    wanted = observe_by_hand(twin, loss_of, batches_of(1, [4] * 2), [4, 4])
    assert seen_by(noise)[0] == pytest.approx(wanted, rel=1e-11)
    assert list(noise.by_group) == ["group 0", "group 1"]


def test_a_loss_scale_that_changes_within_a_window_is_skipped() -> None:
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2, scaler=scaler)
    noise = NoiseScale(accumulator)
    for number, batch in enumerate(accumulator.micro_batches(batches_of(0, [4] * 2))):
        accumulator.backward(loss_of(model, batch))
        if number == 0:
            scaler._scale.mul_(2)  # type: ignore[union-attr]
    assert noise.skipped == {"the loss scale changed between micro-batches": 1}


def test_terms_with_different_shares_are_skipped_and_said() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    noise = NoiseScale(accumulator)
    for batch in accumulator.micro_batches(batches_of(0, [3, 1])):
        terms = [LossTerm(loss_of(model, batch)), LossTerm(next(model.parameters()).square().mean(), over="window")]
        accumulator.backward(terms)
    assert [reason.partition(":")[0] for reason in noise.skipped] == ["a loss whose terms have different shares"]


def test_gradients_in_pieces_are_skipped_and_said() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    noise = NoiseScale(accumulator)
    cached = CachedLoss(encode=lambda m, b: m(b), loss=lambda e: e.square().mean(), micro_batch=2)
    for batch in accumulator.micro_batches(batches_of(0, [4, 4])):
        accumulator.backward(cached(model, batch))
    assert [reason[:28] for reason in noise.skipped] == ["a gradient came in several p"]


def test_batch_normalization_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.warns(UserWarning, match="batch normalization"):
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    with pytest.warns(NoiseScaleWarning, match="ties the samples"):
        NoiseScale(accumulator)


def test_hooks_go_with_the_measurement() -> None:
    noise, accumulator = trained([6], steps=2)
    noise.close()
    before = noise.critical_batch
    model = accumulator.model
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())
    accumulator.backward(loss_of(model, batches_of(0, [4])[0]))
    assert noise.critical_batch == before


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model, accumulator: NoiseScale(accumulator, every=0), "every must be a whole number"),
        (lambda model, accumulator: NoiseScale(accumulator, window=-1), "window must be above 0"),
        (lambda model, accumulator: NoiseScale(accumulator, micro_batch=3), "knows its optimizer"),
        (lambda model, accumulator: NoiseScale(model), "needs the optimizer that steps"),
        (lambda model, accumulator: NoiseScale(3), "takes an Accumulator, or a model"),
    ],
)
def test_wrong_calls_say_what_was_asked(call: Any, told: str) -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    with pytest.raises(InvalidInputError, match=told):
        call(model, accumulator)


def test_a_population_is_counted_in_samples_also_where_units_are_tokens() -> None:
    found = {}
    for weight in (1, 16):
        model = make_model()
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
        noise = NoiseScale(accumulator, population=40)
        for batch in batches_of(0, [4, 4]):
            accumulator.backward(loss_of(model, batch), weight=weight * len(batch), samples=len(batch))
        found[weight] = noise.critical_batch
    one, many = found[1], found[16]
    assert one is not None
    assert many is not None
    assert many.signal == pytest.approx(one.signal, rel=1e-9)
    assert many.trace == pytest.approx(16 * one.trace, rel=1e-9)


def test_a_plain_loop_that_tells_no_sizes_counts_micro_batches_and_says_so() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    noise = NoiseScale(accumulator)
    for batch in batches_of(0, [4] * 4):
        accumulator.backward(loss_of(model, batch))
    with pytest.warns(NoiseScaleWarning, match="counted in micro-batches"):
        found = noise.critical_batch
    assert found is not None
    assert found.unit == "micro-batches"


def test_weights_in_no_optimizer_are_left_out_and_noted() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model[2].parameters(), lr=0.05), 2)
    noise = NoiseScale(accumulator)
    twin = copy.deepcopy(model)
    twin[0].requires_grad_(False)
    for batch in accumulator.micro_batches(batches_of(0, [4] * 2)):
        accumulator.backward(loss_of(model, batch))
    wanted = observe_by_hand(twin, loss_of, batches_of(0, [4] * 2), [4, 4])
    assert seen_by(noise)[0] == pytest.approx(wanted, rel=1e-11)
    assert noise.notes == ["2 weights get gradients but are in no optimizer, and are left out"]


def test_one_at_a_time() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    first = NoiseScale(accumulator)
    with pytest.raises(InvalidInputError, match="watched already"):
        NoiseScale(accumulator)
    first.close()
    second = NoiseScale(accumulator)
    first.close()
    for batch in accumulator.micro_batches(batches_of(0, [4] * 2)):
        accumulator.backward(loss_of(model, batch))
    assert (first.observations, second.observations) == (0, 1)


def test_batch_normalization_is_never_cut() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 1)
    with pytest.warns(NoiseScaleWarning, match="no measurement without accumulation|ties the samples"):
        noise = NoiseScale(accumulator)
    for batch in accumulator.micro_batches(batches_of(0, [4] * 3)):
        step = accumulator.backward(loss_of(model, batch))
        assert step is not None
        assert step.micro_batches == 1
    assert noise.critical_batch is None


def test_steps_are_those_of_the_accumulator_also_when_begun_mid_run_or_resumed() -> None:
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    for batch in accumulator.micro_batches(batches_of(0, [4] * 6)):
        accumulator.backward(loss_of(model, batch))
    noise = NoiseScale(accumulator, every=2)
    for batch in accumulator.micro_batches(batches_of(1, [4] * 6)):
        accumulator.backward(loss_of(model, batch))
    assert [one["step"] for one in noise.state_dict()["track"]["kept"]] == [4, 6]
    assert noise.state_dict()["steps"] == 3
