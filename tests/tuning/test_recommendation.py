"""The recommendation out of what a run has measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from batchwright.errors import InvalidInputError
from batchwright.planning.best_batch import best_batch
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.dialects import FRAMEWORKS
from batchwright.tuning.recommendation import advise_run
from batchwright.tuning.run_file import Measured
from batchwright.tuning.tune import TuneRequest
from tests.tuning.runs import CRITICAL, by_hand


def advised(run: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    run = run or by_hand()
    advise_run(run, TuneRequest(**options))
    advice: dict[str, Any] = run["recommendation"]
    return advice


def test_the_batch_is_the_one_that_reaches_the_loss_soonest_in_whole_micro_batches() -> None:
    advice = advised()
    times = Measured.read(by_hand()).times
    assert times is not None
    best = best_batch(CriticalBatch.from_dict(CRITICAL), times, micro_batch=16)
    assert advice["best_effective_batch"] == best.value
    assert advice["effective_batch"] == advice["micro_batch"] * advice["accumulation"]
    assert advice["range_within_5_percent"] == (best.range_within_5_percent and list(best.range_within_5_percent))
    assert advice["chance_within_5_percent"] == pytest.approx(best.chance, abs=0.2)
    assert advice["micro_batch"] <= 16
    assert (advice["source"], advice["critical_batch_from"]) == ("measured", "noise scale")


def test_a_batch_that_was_asked_for_is_kept_and_the_better_one_named() -> None:
    advice = advised(effective_batch=32)
    assert advice["effective_batch"] == 32
    assert any("would reach the loss soonest" in reason for reason in advice["reasons"])


def test_branches_and_the_noise_scale_are_taken_together_by_their_precision() -> None:
    twice = {**CRITICAL, "value": 800.0, "low": 700.0, "high": 900.0, "evidence": "branches"}
    advice = advised(by_hand(branches={"critical_batch": twice, "ratio": 2.0}))
    assert advice["critical_batch_from"] == "noise scale and branches"
    assert advised()["critical_batch"]["value"] < advice["critical_batch"]["value"] < 1.5 * 800.0
    assert advice["best_effective_batch"] > advised()["best_effective_batch"]
    both, alone = (CriticalBatch.from_dict(one["critical_batch"]).likely() for one in (advice, advised()))
    assert both.spread < alone.spread


def test_places_of_a_run_are_averaged_and_one_without_an_upper_end_is_named() -> None:
    def place(step: int, value: float | None, low: float) -> dict[str, Any]:
        critical = {**CRITICAL, "value": value, "low": low, "high": value and value * 1.1, "evidence": "branches"}
        return {"critical_batch": {**critical, "resolved": value is not None}, "ratio": None, "first_step": step}

    def critical_of(*places: dict[str, Any]) -> float:
        advice = advised(by_hand(branches={**places[0], "later": list(places[1:])}))
        return float(advice["critical_batch"]["value"])

    one, other = place(0, 400.0, 380.0), place(500, 1600.0, 1500.0)
    assert critical_of(one) < critical_of(one, other) == critical_of(other, one) < critical_of(other)
    endless = place(500, None, 3000.0)
    assert critical_of(one, endless) > critical_of(one)
    notes = advised(by_hand(branches={**one, "later": [endless]}))["notes"]
    assert "branches from 1 place of the run found no upper end: 3,000 or more" in notes


def test_groups_of_parameters_are_told_a_factor_with_its_interval() -> None:
    run = by_hand(rate={"batch": 128, "learning_rate_factor": 2.0, "is_lowest_tried": False, "is_highest_tried": False})
    run["rate"]["too_high_from"] = 3.0
    run["workload"]["learning_rate"] = None
    advice = advised(run, effective_batch=128)
    assert advice["learning_rate"] is None
    assert any(
        note.startswith("multiply the learning rate of every group of parameters by 1.") for note in advice["notes"]
    )


@pytest.mark.parametrize("noise_low", [300.0, 0.0])
def test_measure_critical_batch_without_an_upper_end_do_not_replace_a_noise_scale(noise_low: float) -> None:
    noise = {"critical_batch": {**CRITICAL, "low": noise_low}, "effective_batch": 64}
    unbounded = {**CRITICAL, "value": None, "low": 0.0, "high": None, "resolved": False}
    plain = advised(by_hand(noise=noise))
    advice = advised(by_hand(noise=noise, branches={"critical_batch": unbounded, "ratio": None}))
    assert advice["critical_batch_from"] == "noise scale"
    for key in ("effective_batch", "critical_batch", "source", "range_within_5_percent", "assumes"):
        assert advice[key] == plain[key]
    assert "branches found no upper end" in advice["notes"][0]


def course(*, loss: float | None = 1.0) -> list[dict[str, Any]]:
    """A run of 400 steps at 64 whose noise scale doubles from each quarter of it to its double."""
    each = {"observations": 20, "units": 1280.0, "samples": 1280.0, "trace": 20.0, "loss": loss}
    return [{**each, "step": step, "signal": 20.0 / (20 * step**0.5)} for step in range(20, 420, 20)]


def test_the_critical_batch_is_carried_on_to_the_horizon_and_the_answer_says_until_where() -> None:
    noise = {"critical_batch": CRITICAL, "effective_batch": 64, "course": course()}
    near, far = (advised(by_hand(noise=noise), samples=samples) for samples in (25_600, 25_600_000))
    assert near["horizon"]["times_trained"] == 1
    assert far["horizon"]["words"] == "as far as 25,600,000 samples go at 64 per step"
    assert far["critical_batch"]["value"] > 10 * near["critical_batch"]["value"]
    assert far["effective_batch"] > near["effective_batch"]
    assert any("25,600,000 samples go" in reason for reason in far["reasons"])
    once = advised(by_hand(noise=noise))["horizon"]
    assert "10 times what was trained, as no horizon was given" in once["words"]  # the data holds less


def test_a_horizon_that_was_passed_is_told() -> None:
    noise = {"critical_batch": CRITICAL, "effective_batch": 64, "course": course()}
    passed, ahead = (advised(by_hand(noise=noise), samples=samples)["notes"] for samples in (6_400, 64_000))
    told = "the horizon was passed while the noise was measured, after 100 steps"
    assert any(note.startswith(told) for note in passed)
    assert not any(note.startswith(told) for note in ahead)


def test_one_sentence_says_what_to_use_what_is_as_good_and_what_would_change_it() -> None:
    sure = {**CRITICAL, "low": 390.0, "high": 410.0, "evidence": "given"}
    known = advised(by_hand(noise={"critical_batch": sure, "effective_batch": 64}))
    first, last = known["range_within_5_percent"]
    start = f"use {known['effective_batch']} samples per step; {first} to {last} are as good; "
    assert known["in_short"].startswith(start)
    assert "twice the devices (" in known["in_short"]
    assert "with a chance of" in advised()["in_short"]
    assert "branches or a race" in advised()["in_short"]
    assert "no recommendation" in advised(by_hand(noise={"skipped": "as asked"}))["in_short"]


def test_what_branches_found_grows_with_the_noise_scale_to_the_horizon() -> None:
    noise = {"critical_batch": CRITICAL, "effective_batch": 64, "course": course()}
    found = {**CRITICAL, "value": 300.0, "low": 250.0, "high": 360.0, "evidence": "branches"}
    rows = [{"batch": 16, "learning_rate_factor": 1.0, "mean_steps": 400.0}]
    run = by_hand(noise=noise, branches={"critical_batch": found, "ratio": None, "branches": rows})
    near, far = (advised(run, samples=samples)["critical_batch"]["value"] for samples in (6_400, 640_000))
    assert far > 3 * near


@pytest.mark.parametrize("loss", [None, 1.0])
def test_a_horizon_that_cannot_be_used_is_left_out_with_the_reason(loss: float | None) -> None:
    noise = {"critical_batch": CRITICAL, "effective_batch": 64, "course": course(loss=loss)}
    advice = advised(by_hand(noise=noise), until_loss=0.5)
    reason = "the run showed none" if loss is None else "the loss does not fall towards 0.5: it was 1 at first and 1"
    assert any(
        f"the horizon that was asked for is left out: {'a loss' if loss is None else 'the'}" in n and reason in n
        for n in advice["notes"]
    )
    assert advice["range_within_5_percent"] is not None or advice["chance_within_5_percent"] is not None


def test_a_run_has_one_horizon() -> None:
    with pytest.raises(InvalidInputError, match="a run has one horizon; received samples and hours"):
        TuneRequest(samples=1000, hours=2.0)


def test_a_lower_bound_of_branches_rules_out_a_smaller_noise_scale() -> None:
    bounded = {**CRITICAL, "value": None, "low": 900.0, "high": None, "resolved": False}
    advice = advised(by_hand(branches={"critical_batch": bounded, "ratio": None}))
    assert (advice["critical_batch_from"], advice["critical_batch"]["low"]) == ("branches", 900.0)
    below = {**bounded, "low": 200.0}
    advice = advised(by_hand(branches={"critical_batch": below, "ratio": None}))
    assert (advice["critical_batch_from"], advice["critical_batch"]["value"]) == ("noise scale", CRITICAL["value"])


def test_without_a_critical_batch_nothing_is_made_up() -> None:
    advice = advised(by_hand(noise={"skipped": "as asked"}))
    assert advice["critical_batch"] is None
    assert advice["learning_rate"] is None
    assert advice["range_within_5_percent"] is None
    assert advice["source"] == "predicted"
    assert any("the critical batch was not measured" in text for text in advice["assumes"])


def test_with_nothing_known_there_is_no_recommendation() -> None:
    run = by_hand(fit={"skipped": "failed: no"}, throughput={"skipped": "as asked"})
    assert "neither what fits nor" in advised(run)["skipped"]
    assert run["plan"] == run["recommendation"]


def test_the_learning_rate_follows_from_the_batch_that_was_trained_at() -> None:
    rate = advised(effective_batch=64)["learning_rate"]
    assert rate["recommended"] == pytest.approx(3e-4)
    assert advised(effective_batch=256)["learning_rate"]["recommended"] > 3e-4


def test_twice_the_memory_holds_more_samples_and_twice_the_devices_are_sooner() -> None:
    memory, devices, checkpointing = advised()["changes"]
    assert devices["effective_batch"] > advised()["effective_batch"]
    # 2 GiB less 256 MiB, at 32 MiB a sample.
    assert "micro-batch 56 would fit" in memory["note"]
    assert memory["time_ratio"] < 1
    assert devices["time_ratio"] < 1
    assert checkpointing["note"] == "was not traced"


def test_checkpointing_holds_more_samples_and_takes_longer_for_each() -> None:
    estimate = {
        "micro_batch": 16,
        "peak_bytes": {"allocated": 768 * 2**20},
        "parts": {"weights": 2**26, "gradients": 2**26, "optimizer": 2**27},
        "what_if": [{"change": "activation checkpointing", "peak_bytes": 512 * 2**20}],
    }
    advice = advised(by_hand(estimate=estimate))["changes"][2]
    # 256 MiB are the model's own; of the 32 MiB per sample half is left: 768 / 16.
    assert "micro-batch 48 would fit: the peak at micro-batch 16 falls to 67 %" in advice["note"]
    kept = advised(by_hand(estimate=estimate), effective_batch=16)["changes"][2]
    assert kept["effective_batch"] == 16
    assert 1 < kept["time_ratio"] < 4 / 3


def test_a_remembered_fit_takes_its_slope_from_the_trace() -> None:
    fit = {"micro_batch": 16, "limit": 4096, "limit_bytes": 2**30, "line": None, "peak_bytes": {"device": 2**30}}
    estimate = {"grows_with_batch": {"activations": 2**25, "context": None}, "what_if": []}
    run = by_hand(fit=fit, estimate=estimate)
    # 512 MiB beside the samples.
    assert "micro-batch 48 would fit" in advised(run)["changes"][0]["note"]


def test_more_memory_changes_nothing_where_the_limit_is_another() -> None:
    fit = {"micro_batch": 16, "limit": 16, "limit_bytes": 2**30, "reason": "the limit is 16"}
    assert advised(by_hand(fit=fit))["changes"][0]["note"] == "would change nothing: the limit is 16"


def test_measure_critical_batch_tell_the_learning_rate_too() -> None:
    rows = [
        {"batch": size, "learning_rate_factor": factor, "mean_steps": 10.0}
        for size, factor in ((16, 1.0), (64, 2.0), (256, 4.0))
    ]
    branches = {"critical_batch": {**CRITICAL, "resolved": False}, "ratio": 2.0, "branches": rows}
    rate = advised(by_hand(branches=branches), effective_batch=128)["learning_rate"]
    by_rule = advised(effective_batch=128)["learning_rate"]["recommended"]
    assert rate["recommended"] == pytest.approx(math.sqrt(3e-4 * 2**1.5 * by_rule), rel=0.1)
    assert rate["low"] <= by_rule <= 3e-4 * 2**1.5 <= rate["high"]
    assert (rate["source"], rate["at_batch"]) == ("measured", None)
    assert "on their line" in rate["rule"]
    assert "outside" in advised(by_hand(branches=branches), effective_batch=1024)["learning_rate"]["rule"]
    config = advised(by_hand(branches=branches), effective_batch=128)["configs"]["transformers"]
    assert f"learning_rate={rate['recommended']:.3g}," in config


def test_the_curve_is_least_at_the_best_batch_and_has_a_band() -> None:
    advice = advised()
    rows = advice["time_to_target"]
    least = min(rows, key=lambda row: row["ratio"])
    assert least["effective_batch"] == advice["best_effective_batch"]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in rows)


def test_every_dialect_is_there_to_paste() -> None:
    advice = advised()
    assert set(advice["configs"]) == set(FRAMEWORKS)
    assert str(advice["micro_batch"]) in advice["configs"]["transformers"]
