"""How fast cards are: every card of the catalogue has a sheet, sources are named, and guesses are marked."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from batchwright.catalogue.cards import all_cards
from batchwright.catalogue.speeds import CardSpeed, all_speeds, find_speed, speed_of

ROWS: list[dict[str, Any]] = json.loads(
    files("batchwright.catalogue").joinpath("speeds.json").read_text(encoding="utf-8")
)["speeds"]


def test_every_card_of_the_catalogue_has_one_sheet() -> None:
    named = [card for row in ROWS for card in row["cards"]]
    assert sorted(named) == sorted(card.name for card in all_cards())
    assert all(speed_of(card) is not None for card in all_cards())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_sheet_names_its_sources_and_is_plausible(row: dict[str, Any]) -> None:
    assert len(row["source"]) > 10
    assert len(row["checked"]) > 10
    assert row["sure"] in ("checked", "partly", "remembered")
    assert len(row["sustained_source"]) > 10
    assert row["tf32"] is None or row["fp32"] <= row["tf32"] <= row["fp16"], "dense figures, sums in fp32"
    assert 100 < row["memory_gb_s"] < 9000


@pytest.mark.parametrize("speed", all_speeds(), ids=lambda speed: speed.name)
def test_nothing_is_sustained_above_its_peak(speed: CardSpeed) -> None:
    assert set(speed.sustained) == set(speed.peaks)
    assert all(0.25 < rate / speed.peaks[kind] <= 1.0 for kind, rate in speed.sustained.items())
    assert 0.7 < speed.memory / speed.memory_peak < 0.95


def test_what_nobody_measured_is_a_guess() -> None:
    assert find_speed("a100-80gb-pcie").guesses == ()
    assert set(find_speed("rtx-4090-24gb").guesses) == {"fp32", "tf32", "fp16", "bf16", "fp8", "memory"}


def test_a_card_without_a_format_does_not_have_it() -> None:
    assert "bf16" not in find_speed("t4-16gb").peaks
    assert find_speed("gtx-1080-ti-11gb").peaks["fp16"] == find_speed("gtx-1080-ti-11gb").peaks["fp32"]
    assert "fp8" not in find_speed("a100-40gb-sxm").peaks
