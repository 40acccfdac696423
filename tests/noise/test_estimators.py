"""The pure estimators: unbiased on problems whose answer is known, by any split, and the interval covers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.noise.capture.weight_hooks import square
from batchwright.noise.interval import LEAST_OBSERVATIONS, fieller, student_t
from batchwright.noise.noise_scale import estimate
from batchwright.noise.observations import Squares, Track

DIMENSIONS = 20


def observed(rng: np.random.Generator, mean: np.ndarray, sizes: list[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """T and |G|^2 of steps of a Gaussian gradient of variance 1 in each direction."""
    traces, signals = [], []
    for _ in range(steps):
        parts = [mean + rng.normal(size=DIMENSIONS) / math.sqrt(n) for n in sizes]
        total = sum(sizes)
        whole = np.stack([(n / total) * g for n, g in zip(sizes, parts, strict=True)]).sum(0)
        seen = Squares.of([float(g @ g) for g in parts], sizes).observe(float(whole @ whole))
        assert seen is not None
        traces.append(seen.trace)
        signals.append(seen.signal)
    return np.array(traces), np.array(signals)


@pytest.mark.parametrize("sizes", [[4] * 4, [16, 16], [1] * 8, [2, 5, 9, 16]])
def test_trace_and_signal_are_unbiased_for_any_split(sizes: list[int]) -> None:
    mean = np.full(DIMENSIONS, 0.3)
    traces, signals = observed(np.random.default_rng(0), mean, sizes, 3000)
    for seen, true in ((traces, DIMENSIONS), (signals, float(mean @ mean))):
        assert abs(seen.mean() - true) < 4 * seen.std() / math.sqrt(len(seen))


@given(
    rows=st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=2, max_size=6),
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_it_is_the_spread_around_the_mean(rows: list[list[float]], sizes: list[int]) -> None:
    parts, n = np.array(rows), np.array(sizes[: len(rows)], float)
    mean = (n[:, None] * parts).sum(0) / n.sum()
    spread = float((n * ((parts - mean) ** 2).sum(1)).sum()) / (len(rows) - 1)
    seen = Squares.of([float(g @ g) for g in parts], list(n)).observe(float(mean @ mean))
    assert seen is not None
    assert seen.trace == pytest.approx(spread, abs=1e-9, rel=1e-9)
    assert seen.signal == pytest.approx(float(mean @ mean) - spread / n.sum(), abs=1e-9, rel=1e-9)


def test_ranks_and_micro_batches_pool_in_any_order() -> None:
    first, second = Squares.of([3.0, 4.0], [2, 5]), Squares.of([1.0], [4])
    assert first + second == Squares.of([3.0, 4.0, 1.0], [2, 5, 4])


def test_drawing_without_replacement_is_corrected_for() -> None:
    rng = np.random.default_rng(0)
    population = rng.normal(size=(40, 5)) + 0.2
    true_signal = float((population.mean(0) ** 2).sum())
    true_trace = float(population.var(0, ddof=1).sum())
    signals, traces = [], []
    for _ in range(4000):
        parts = population[rng.permutation(40)[:20]].reshape(4, 5, 5).mean(1)
        whole = parts.mean(0)
        seen = Squares.of([float(g @ g) for g in parts], [5] * 4).observe(float(whole @ whole), population=40)
        assert seen is not None
        signals.append(seen.signal)
        traces.append(seen.trace)
    for found, true in ((signals, true_signal), (traces, true_trace)):
        assert abs(np.mean(found) - true) < 4 * np.std(found) / math.sqrt(len(found))


@pytest.mark.parametrize(("ratio", "least_resolved"), [(1, 1.0), (3, 1.0), (17, 0.2), (80, 0.0)])
def test_the_interval_covers_the_truth_95_times_in_100(ratio: float, least_resolved: float) -> None:
    rng, batch, parts, repeats, steps = np.random.default_rng(3), 32, 4, 600, 100
    truth = ratio * batch
    mean = np.zeros(DIMENSIONS)
    mean[0] = math.sqrt(DIMENSIONS / truth)
    noise = rng.normal(size=(repeats, steps, parts, DIMENSIONS)) / math.sqrt(batch // parts)
    gradients = mean + noise
    squares, of_mean = (gradients**2).sum(-1).mean(-1), (gradients.mean(2) ** 2).sum(-1)
    traces = batch / (parts - 1) * (squares - of_mean)
    found = [fieller(t, s, drifts=False) for t, s in zip(traces, of_mean - traces / batch, strict=True)]
    covered = np.mean([each is not None and each.low <= truth <= each.high for each in found])
    assert 0.92 <= covered <= 0.98
    assert np.mean([each is not None and each.resolved for each in found]) >= least_resolved


def drifting(
    rng: np.random.Generator, traces: np.ndarray, signals: np.ndarray, *, batch: int = 64, parts: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Observations of steps whose T and |G|^2 are those given, one after the other."""
    noise = (
        rng.normal(size=(len(traces), parts, DIMENSIONS)) * np.sqrt(traces * parts / DIMENSIONS / batch)[:, None, None]
    )
    noise[:, :, 0] += np.sqrt(signals)[:, None]
    squares, of_mean = (noise**2).sum(-1).mean(-1), (noise.mean(1) ** 2).sum(-1)
    found = batch / (parts - 1) * (squares - of_mean)
    return found, of_mean - found / batch


# Speeds and shapes: |G|^2 and T at the end, relative to the start. More of them are in benchmarks/noise_coverage.py.
@pytest.mark.parametrize(("signal", "trace"), [(1.0, 1.0), (1 / 2, 1.0), (1 / 5, 1.0), (3.0, 1.0), (1 / 2, 3.0)])
def test_value_and_interval_are_of_the_present_however_the_window_drifts(signal: float, trace: float) -> None:
    rng, steps, repeats = np.random.default_rng(5), 100, 30
    along = np.linspace(0, 1, steps)
    traces, signals = trace**along, 0.02 * signal**along
    truth = float(traces[-1] / signals[-1])
    found = [fieller(*drifting(rng, traces, signals)) for _ in range(repeats)]
    assert np.mean([each is not None and each.low <= truth <= each.high for each in found]) >= 0.85
    assert 0.85 <= np.median([each.value / truth for each in found if each is not None]) <= 1.15


def test_without_drift_the_interval_is_not_twice_as_wide_as_that_of_the_means() -> None:
    rng, widths = np.random.default_rng(6), []
    for _ in range(20):
        a, c = drifting(rng, np.ones(100), np.full(100, 0.02))
        now, still = fieller(a, c), fieller(a, c, drifts=False)
        assert now is not None
        assert still is not None
        widths.append((now.high - now.low) / (still.high - still.low))
    assert 1 <= np.median(widths) < 2


def test_a_ratio_that_stands_still_is_known_although_both_levels_fall() -> None:
    rng, fall = np.random.default_rng(7), np.geomspace(1, 1 / 8, 100)
    values = [fieller(*drifting(rng, fall, 0.02 * fall)) for _ in range(20)]
    assert 0.9 <= np.median([each.value for each in values if each is not None]) / 50 <= 1.1


def test_a_drift_of_both_does_not_widen_the_interval_of_means() -> None:
    rng = np.random.default_rng(0)
    noise_a, noise_c = rng.normal(size=200), 0.05 * rng.normal(size=200)
    drift = np.linspace(0.5, 1.5, 200)
    still = fieller(50 + noise_a, 1 + noise_c, drifts=False)
    moving = fieller(50 * drift + noise_a, drift + noise_c, drifts=False)
    assert still is not None
    assert moving is not None
    assert moving.high - moving.low < 1.2 * (still.high - still.low)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(-1e3, 1e3)), min_size=LEAST_OBSERVATIONS, max_size=30))
@settings(max_examples=60)
def test_an_interval_holds_its_value_and_never_a_number_that_is_none(pairs: list[tuple[float, float]]) -> None:
    found = fieller([a for a, _ in pairs], [c for _, c in pairs])
    assert found is not None
    assert 0 <= found.low <= found.high
    assert not math.isnan(found.value)
    if found.resolved:
        assert found.low <= found.value * (1 + 1e-9)
        assert found.value <= found.high * (1 + 1e-9)


def test_numbers_whose_squares_are_zero_stay_inside() -> None:
    found = fieller([0.0, 0.0, 0.0, 0.0, 7.5e-168], [0.0, 0.0, 1.0, 1.0, 1.0])
    assert found is not None
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("least", [5e-324, 1e-193, 1e-100])
def test_a_signal_next_to_nothing_is_not_told_from_zero(least: float) -> None:
    found = fieller([1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, least])
    assert found is not None
    assert not found.resolved


def test_equal_weights_are_no_weights() -> None:
    rng = np.random.default_rng(0)
    a, c = rng.normal(5, 1, 30), rng.normal(1, 0.2, 30)
    plain, weighted = fieller(a, c), fieller(a, c, np.full(30, 7.0))
    assert plain is not None
    assert weighted is not None
    assert (plain.low, plain.high) == pytest.approx((weighted.low, weighted.high))


def test_the_steps_that_are_still_needed_are_about_right() -> None:
    rng = np.random.default_rng(1)
    c = rng.normal(0.1, 1.0, 200)
    first = fieller(np.full(200, 5.0) + rng.normal(size=200), c)
    assert first is not None
    assert not first.resolved
    assert first.further_steps is not None
    # (1.96 + 0.84)^2 * (1/0.1)^2 = 784 in truth; this draw knows its mean to within its own error.
    assert 100 < first.further_steps < 20_000


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 10, 66, 1000])
def test_quantiles_of_student_are_those_of_the_tables(freedom: int) -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 66: 1.997, 1000: 1.962}
    assert student_t(0.975, freedom) == pytest.approx(table[freedom], rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1024,), (1025,), (700, 900), (4, 3, 7, 7)])
def test_squares_are_exact_where_plain_sums_are_not(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4).to(dtype)
    exact = float((tensor.double() ** 2).sum())
    assert float(square(tensor)) == pytest.approx(exact, rel=3e-7)
    if tensor.dim() == 2:
        assert float(square(tensor.t())) == pytest.approx(exact, rel=3e-7)


def test_the_simple_call_of_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 30, generator=generator) + 1
    sizes = [1, 2, 3, 4, 5, 6]
    mean = (torch.tensor(sizes)[:, None] * rows).sum(0) / 21
    trace = float((torch.tensor(sizes) * ((rows - mean) ** 2).sum(1)).sum()) / 5
    wanted = trace / (float(mean @ mean) - trace / 21)
    assert estimate(list(rows), sizes) == pytest.approx(wanted, rel=1e-5)
    assert estimate([{"a": row[:10], "b": row[10:]} for row in rows], sizes) == pytest.approx(wanted, rel=1e-5)
    assert estimate([[row[:10], row[10:]] for row in rows], sizes) == pytest.approx(wanted, rel=1e-5)


def test_no_gradients_are_none_and_zero_gradients_infinite() -> None:
    assert estimate(None) is None
    assert estimate([]) is None
    assert estimate([torch.zeros(3), torch.zeros(3)]) == math.inf


def test_gradients_that_are_no_numbers_are_left_out_and_said() -> None:
    good = [torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])]
    with pytest.warns(UserWarning, match="1 of 3 gradients left out"):
        assert estimate([*good, torch.tensor([math.nan, 1.0])], 8) == estimate(good, 8)


@pytest.mark.parametrize(
    ("gradients", "sizes", "told"),
    [
        ([torch.ones(3)], 4, "two micro-batches or more; received 1"),
        ([torch.ones(3), torch.ones(4)], 4, "different sizes"),
        ([torch.ones(3), torch.ones(3)], [4], "2 gradients, but 1 sizes"),
        ([torch.ones(3), torch.ones(3)], -1, "0 samples or more"),
        (["text", "text"], 1, "a tensor, or a list or dict"),
    ],
)
def test_the_simple_call_refuses_what_tells_nothing(gradients: object, sizes: object, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        estimate(gradients, sizes)  # type: ignore[arg-type]


def test_the_window_is_counted_in_units_whatever_the_batch() -> None:
    track = Track(window=1000, unit="samples", names=["all"])
    for step, units in enumerate([100] * 20 + [500] * 4):
        seen = Squares(weighted=3.0 * units, units=units, parts=2).observe(1.0)
        assert seen is not None
        track.add([seen], step=step, samples=units)
    found = track.critical_batch()
    assert found is not None
    assert found.observations == 2
    # A quarter of a window is 250 units: every third step of 100, every step of 500.
    assert [point.step for point in track.history] == [2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
