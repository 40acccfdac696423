"""tune on a card that is not there: its throughput is predicted, and with a critical batch the answer is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import InvalidInputError


def workload(**changes: Any) -> bw.Workload:
    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)),
        "batch": lambda n: torch.zeros(n, 256),
        "loss": lambda model, x: model(x).square().mean(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
    }
    return bw.Workload(**{**parts, **changes})


@pytest.fixture(scope="module")
def tuned() -> Any:
    return bw.tune(
        workload(),
        on="a100-40gb",
        devices=2,
        limit=512,
        critical_batch=4000,
        samples=10_000_000,
        price_per_hour=2.0,
        skip=("estimate",),
    )


def test_throughput_is_predicted_with_its_interval(tuned: Any) -> None:
    section = tuned.run["throughput"]
    assert (section["source"], section["devices"]) == ("predicted", 2)
    assert [row["micro_batch"] for row in section["rows"]] == sorted(row["micro_batch"] for row in section["rows"])
    assert all(row["low_seconds"] < row["seconds"] < row["high_seconds"] for row in section["rows"])
    assert all(row["pass_seconds"] <= row["seconds"] for row in section["rows"])
    assert "in nine of ten cases" in section["notes"][0]


def test_with_a_critical_batch_the_soonest_batch_and_the_devices_that_pay_follow(tuned: Any) -> None:
    advised = tuned.run["recommendation"]
    assert (advised["source"], advised["critical_batch_from"]) == ("predicted", "given")
    rows = advised["by_devices"]["rows"]
    assert [row["devices"] for row in rows] == [1, 2, 4, 8]
    assert rows[0]["time_over_one"] == 1.0
    assert advised["by_devices"]["worth"] in (1, 2, 4, 8)
    assert "time to the loss by devices" in str(tuned)


def test_hours_and_cost_have_intervals(tuned: Any) -> None:
    run = tuned.run["recommendation"]["run"]
    assert run["hours_interval"][0] < run["hours"] < run["hours_interval"][1]
    assert run["cost"] == pytest.approx(run["hours"] * 2 * 2.0)
    with pytest.raises(InvalidInputError, match="price_per_hour must be a number above 0"):
        bw.tune(workload(), on="a100-40gb", price_per_hour="cheap")  # type: ignore[arg-type]


def test_a_format_that_the_card_has_not_leaves_the_stage_out_and_says_why() -> None:
    half = workload(
        model=lambda: nn.Linear(256, 256).bfloat16(), batch=lambda n: torch.zeros(n, 256, dtype=torch.bfloat16)
    )
    run = bw.tune(half, on="t4-16gb", limit=64, skip=("estimate",)).run
    assert run["throughput"]["skipped"] == "no time is predicted: t4-16gb has no bf16 arithmetic for products"


def test_the_report_draws_it_as_predicted(tuned: Any) -> None:
    from batchwright.report.page.time_sections import draw_speed

    page = "".join(map(str, draw_speed(tuned.run["throughput"], tuned.run)))
    assert "whole steps (predicted)" in page
    assert "point predicted" in page
    assert "measured" not in page
    assert "Seconds of a step by micro-batch" in page


def test_the_report_draws_the_run_over_devices_and_leaves_the_section_out_where_none_were_compared(tuned: Any) -> None:
    from batchwright.report.page.page import draw_page

    page = draw_page(tuned.run)
    assert "How many devices pay" in page
    assert f"up to {tuned.run['recommendation']['by_devices']['worth']} pay" in page
    assert ">cost over one</th>" in page
    without = {**tuned.run, "recommendation": {**tuned.run["recommendation"], "by_devices": None}}
    assert "How many devices pay" not in draw_page(without)
    broken = {**tuned.run, "recommendation": {"by_devices": {"rows": [{"devices": "many"}, 3], "worth": None}}}
    assert "How many devices pay" not in draw_page(broken)
