"""A race by training, in counted time: who wins, what is clear, and that a batch is only replaced by a better one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.planning.critical_batch import Range
from batchwright.planning.time_to_loss import StepSeconds
from batchwright.planning.times import TimeModel
from batchwright.tuning.race import Race, Rival, _steps_shown, race
from batchwright.tuning.recommendation import advise_run
from batchwright.tuning.tune import TuneRequest, tune
from tests.tuning.runs import by_hand, quick


def raced(middle: int, times: TimeModel, *, steps: int = 60, **options: Any) -> Race:
    step = StepSeconds(times)
    return race(
        options.pop("workload", quick()),
        middle,
        step,
        seconds=steps * step.at(middle),
        reaches_horizon=True,
        factor_of=lambda batch: 1.0,
        whole=lambda size: max(round(size), 1),
        most=options.pop("most", 4096),
        largest=None,
        on="cpu",
        **options,
    )


def test_where_every_sample_costs_the_same_the_race_goes_down() -> None:
    # Without noise a step is as far whatever its batch: half the batch is there in half the time.
    workload = quick(loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean())
    found = raced(64, TimeModel(0.0, 0.001, 0.0), workload=workload)
    assert found.winner <= 16
    assert list(found.factors)[:4] == [64, 32, 128, 16]
    behind = found.rivals[-1]
    assert behind.position == "behind"
    assert behind.time_ratio.low > 1


def test_where_the_batch_costs_nothing_the_race_goes_up_as_far_as_it_may() -> None:
    workload = quick(
        loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    )
    found = raced(2, TimeModel(0.01, 0.0, 0.0), most=16, workload=workload, steps=100)
    assert found.winner >= 8
    assert list(found.factors)[:4] == [2, 1, 4, 8]


def test_a_race_that_nobody_wins_says_so() -> None:
    found = Race(
        64,
        1.0,
        64,
        (Rival(32, 1.0, Range(0.9, 0.5, 1.6)), Rival(128, 1.0, Range(2.0, 1.5, 2.5))),
        5,
        10.0,
        100,
        True,
        {64: 1.0},
    )
    assert not found.is_clear
    assert "nobody won the race around 64, which stays" in found.summary
    close = Race(64, 1.0, 64, (Rival(32, 1.0, Range(1.0, 0.97, 1.03)),), 3, 10.0, 100, True, {64: 1.0, 32: 1.0})
    assert close.is_clear
    assert "no batch was ahead of 64" in close.summary


def test_a_loss_that_is_no_number_has_no_race() -> None:
    workload = quick(loss=lambda model, batch: model(batch).sum() * math.nan)
    with pytest.raises(BatchwrightError, match="there is nothing to race"):
        raced(8, TimeModel(0.01, 0.001, 0.0), steps=2, workload=workload)


WON: dict[str, Any] = {
    "winner": 48,
    "factors": [{"batch": 96, "learning_rate_factor": 1.0}, {"batch": 48, "learning_rate_factor": 0.5}],
    # As many steps at half the batch: the critical batch is far below.
    "shown": [{"batch": 48, "other": 96, "log_ratio": 0.1, "error": 0.05, "growth": 1.0}],
    "reaches_horizon": True,
    "summary": "48 was ahead of 96 in a race: ...",
}


def advised(**sections: Any) -> Any:
    run = by_hand(**sections)
    advise_run(run, TuneRequest(race=True))
    return run["recommendation"]


def test_a_race_joins_the_model_by_how_sure_it_is() -> None:
    won, without = advised(race=WON), advised()
    noise = advised(race={**WON, "shown": [{**WON["shown"][0], "error": 5.0}]})
    assert won["effective_batch"] < without["effective_batch"]
    assert noise["best_effective_batch"] == pytest.approx(without["best_effective_batch"], rel=0.03)
    assert won["chance_within_5_percent"] > without["chance_within_5_percent"]
    assert "48 was ahead of 96 in a race" in won["reasons"][0]
    assert won["reasons"][1].startswith("with the race: ")


def test_a_race_that_ended_before_the_horizon_counts_for_the_way_there_and_tunes_no_rate() -> None:
    shown = [{**WON["shown"][0], "growth": 4.0}]
    short, won = advised(race={**WON, "shown": shown, "reaches_horizon": False}), advised(race=WON)
    assert short["effective_batch"] > won["effective_batch"]
    assert "ended before the horizon" in short["reasons"][0]
    assert short["learning_rate"]["source"] == "formula"


def test_the_rate_is_that_of_the_race_or_on_its_line() -> None:
    rate = advised(race=WON)["learning_rate"]
    assert rate["source"] == "measured"
    assert "in a race" in rate["rule"]
    assert 3e-4 / 2 <= rate["recommended"] <= 3e-4


def test_the_error_of_what_was_raced_falls_with_seeds_and_never_to_nothing() -> None:
    errors = [_steps_shown(64, 32, [-0.5] * number, (1.0, 0.0)).error for number in (2, 3, 5, 500)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.08
    assert errors[-1] == pytest.approx(0.12, rel=0.01)
    assert _steps_shown(64, 32, [-0.5] * 5, (3.0, 0.4)).error > errors[2]


def test_tune_races_where_asked_for_and_resumes_for_another_horizon(tmp_path: Path) -> None:
    file, skip = tmp_path / "run.json", ("estimate", "audit")
    # Without noise in the loss: so few steps would not show that it falls.
    falls = quick(loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean())
    run = tune(falls, limit=32, steps=20, skip=skip, race=True, samples=1280, file=file).run
    assert run["race"]["reaches_horizon"]
    assert run["recommendation"]["reasons"][0] == run["race"]["summary"]
    assert run["workload"]["command"] is None
    later = tune(falls, limit=32, steps=20, skip=skip, samples=128_000, file=file, resume=True).run
    assert later["race"]["skipped"] == "not asked for"
    assert later["noise"] == run["noise"]
    assert later["recommendation"]["horizon"]["samples"] == 128_000
    assert later["workload"]["horizon"]["samples"] == 128_000
    assert TuneRequest(race=True).command("train.py:workload").endswith("train.py:workload --race")


def test_a_batch_that_is_to_be_kept_is_not_raced() -> None:
    with pytest.raises(InvalidInputError, match="a race finds the effective batch"):
        TuneRequest(race=True, effective_batch=64)
