"""The catalogue of cards: each figure has a source, each name is found, and the rule stays near its reports."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from batchwright.catalogue.cards import Card, _lazy_context, all_cards, context_of, cublas_workspace_bytes, find_card
from batchwright.errors import InvalidInputError

FACTS: dict[str, Any] = json.loads(files("batchwright.catalogue").joinpath("cards.json").read_text(encoding="utf-8"))
REPORTS: list[dict[str, Any]] = FACTS["context"]["reports"]
MIB = 1 << 20


def test_there_are_forty_cards_with_names_of_their_own() -> None:
    assert len({card.name for card in all_cards()}) == len(all_cards()) >= 40


@pytest.mark.parametrize("card", all_cards(), ids=lambda card: card.name)
def test_a_card_has_its_sources_and_a_memory_near_its_name(card: Card) -> None:
    assert len(card.total_source) > 20
    assert len(card.sms_source) > 10
    assert card.source_kind in {"exact", "mib", "hundredths", "sibling", "nominal"}
    assert card.name.endswith(f"-{card.nominal_gib}gb")
    assert 0.85 <= card.total_bytes / (card.nominal_gib << 30) <= 1.0
    # Drivers hand out whole pages: a figure in bytes that is none was copied wrongly.
    assert card.source_kind != "exact" or card.total_bytes % (4 << 10) == 0


@pytest.mark.parametrize("card", all_cards(), ids=lambda card: card.name)
def test_a_card_is_found_by_every_way_to_write_it(card: Card) -> None:
    for typed in (
        card.name,
        card.name.upper(),
        card.name.replace("-", " "),
        card.name.replace("-", "_"),
        *card.aliases,
    ):
        assert find_card(typed) is card
    assert card.product.startswith(("NVIDIA", "AMD"))


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla T4", "t4-16gb"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060-12gb"),
        ("NVIDIA RTX A6000", "a6000-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("rtx4090", "rtx-4090-24gb"),
        ("4070 ti super", "rtx-4070-ti-super-16gb"),
        ("a10g 24 GB", "a10g-24gb"),
        ("l4-24GiB", "l4-24gb"),
    ],
)
def test_the_names_that_drivers_and_people_write_are_found(typed: str, found: str) -> None:
    assert find_card(typed).name == found


@pytest.mark.parametrize(
    ("typed", "said"), [("a1000", "a100-40gb, a100-80gb"), ("rtx 3090ti", "rtx-3090-24gb"), ("zzz", "a100-80gb")]
)
def test_an_unknown_name_lists_the_nearest(typed: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match="no card is named") as caught:
        find_card(typed)
    assert said in caught.value.remedy


@pytest.mark.parametrize(
    ("family", "sizes"), [("a100", "a100-40gb or a100-80gb"), ("Tesla V100", "v100-16gb or v100-32gb")]
)
def test_a_family_of_several_sizes_says_which_there_are(family: str, sizes: str) -> None:
    with pytest.raises(InvalidInputError, match="comes in 2 sizes") as caught:
        find_card(family)
    assert caught.value.remedy == sizes


def test_every_report_of_a_context_says_how_and_where_and_why_it_is_left_out() -> None:
    for report in REPORTS:
        assert len(report["source"]) > 20
        assert report["how"]
        assert report["loading"] in {"lazy", "eager", "rocm"}
        if not report.get("used", True):
            assert report["note"]


@pytest.mark.parametrize("card", all_cards(), ids=lambda card: card.name)
def test_a_context_is_a_small_part_of_the_card_and_within_its_span(card: Card) -> None:
    context = context_of(card)
    assert 0 < context.low_bytes <= context.typical_bytes <= context.high_bytes < card.total_bytes / 10


def test_lazy_reports_of_catalogue_cards_lie_within_the_span_of_the_rule() -> None:
    cards = {card.num_sms: card for card in all_cards()}
    checked = 0
    for report in REPORTS:
        card = cards.get(report.get("num_sms", 0))
        if report["loading"] != "lazy" or not report.get("used", True) or card is None:
            continue
        if list(card.compute_capability) == report["compute_capability"]:
            context = context_of(card)
            assert context.low_bytes - MIB <= report["mib"] * MIB <= context.high_bytes + MIB
            checked += 1
    assert checked > 20


def test_resident_threads_foretell_a_report_better_than_the_generation_does() -> None:
    lazy = [report for report in REPORTS if report["loading"] == "lazy" and report.get("used", True)]
    by_threads, by_generation = [], []
    for left_out in lazy:
        others = [report for report in lazy if report is not left_out]
        capability = (left_out["compute_capability"][0], left_out["compute_capability"][1])
        card = replace(find_card("t4"), num_sms=left_out["num_sms"], compute_capability=capability)
        by_threads.append(abs(_lazy_context(card, others).typical_bytes / MIB - left_out["mib"]))
        alike = [report["mib"] for report in others if report["generation"] == left_out["generation"]]
        by_generation.append(abs(median(alike or [report["mib"] for report in others]) - left_out["mib"]))
    assert len(lazy) == 31
    assert round(mean(by_threads)) == 34
    assert round(mean(by_generation)) == 104


@pytest.mark.parametrize(
    ("name", "workspace"),
    [
        ("t4", 8519680),
        ("a100-80gb", 8519680),
        ("rtx-4090", 8519680),
        ("h200", 32 * MIB),
        ("b200", 32 * MIB),
        ("rtx-5090", 32 * MIB),
        ("mi250x", 32 * MIB),
        ("mi300x", 128 * MIB),
    ],
)
def test_the_workspace_of_cublas_is_that_of_torch_2_13(name: str, workspace: int) -> None:
    assert cublas_workspace_bytes(find_card(name)) == workspace


def test_the_page_of_cards_says_what_the_file_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cards.md").read_text(encoding="utf-8")
    for card in all_cards():
        context = context_of(card)
        span = f"{context.typical_bytes // MIB} ({context.low_bytes // MIB} to {context.high_bytes // MIB})"
        row = f"| `{card.name}` | {card.total_bytes / (1 << 30):.2f} | {card.source_kind} | {card.num_sms} | {span} |"
        assert row in page


def test_the_catalogue_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from batchwright.catalogue.cards import context_of, find_card; context_of(find_card('t4')); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
