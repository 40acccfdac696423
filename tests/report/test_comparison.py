"""Two runs on one page: each number as on its own page, what changed as a factor, what is the same named once."""

from __future__ import annotations

import copy
import re
from html import unescape
from typing import Any

import pytest

from batchwright.report.page.compare import compare_runs, draw_comparison
from tests.report.test_page import SECTIONS, sample


def changed_run() -> dict[str, Any]:
    run = copy.deepcopy(sample())
    run["fit"]["micro_batch"] *= 2
    run["noise"]["critical_batch"]["value"] *= 1.01
    run["audit"]["relative_error"] *= 1 + 1e-12
    return run


def part_of(page: str, name: str) -> str:
    match = re.search(rf'<section id="{name}".*?</section>', page, re.S)
    assert match, name
    return unescape(re.sub(r"<[^>]*>", " ", match[0]))


def test_a_change_is_a_factor_and_one_within_both_intervals_is_not() -> None:
    changes = {line.name: line.change for line in compare_runs(sample(), changed_run()) if not line.is_same}
    assert changes == {"largest micro-batch that fits": "x 2", "noise scale": "within the intervals"}


def test_what_is_written_the_same_is_named_once() -> None:
    page = draw_comparison(sample(), changed_run(), ("a.json", "b.json"))
    changed, same = part_of(page, "changed"), part_of(page, "same")
    assert "largest micro-batch that fits" in changed
    assert "largest micro-batch that fits" not in same
    assert "error of the accumulated gradient" in same
    assert "error of the accumulated gradient" not in changed


def test_a_run_beside_itself_has_no_change() -> None:
    page = draw_comparison(sample(), sample(), ("a.json", "a.json"))
    assert "Nothing that was measured or predicted differs." in part_of(page, "changed")


def test_a_stage_that_only_one_run_has_says_why_the_other_lacks_it() -> None:
    missing = part_of(draw_comparison(sample(), sample("skipped_run"), ("a.json", "b.json")), "missing")
    assert "is not in b.json: " in missing


@pytest.mark.parametrize("section", SECTIONS)
def test_any_section_may_be_missing_from_either(section: str) -> None:
    run = sample()
    del run[section]
    for pair in ((run, sample()), (sample(), run)):
        assert "</html>" in draw_comparison(*pair, ("a.json", "b.json"))


def test_names_and_texts_stay_text() -> None:
    evil = "<script>alert(1)</script>"
    run = sample()
    run["workload"]["name"] = run["fit"]["reason"] = evil
    page = draw_comparison(sample(), run, ("a.json", f"{evil}.json"))
    assert "<script>alert" not in page
    assert not re.search(r"""(src|href)="(?!data:|#)""", page), "it loads something"
