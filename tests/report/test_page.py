"""The page of a run: whole by itself, escaped, marked, and good with any part of the run missing."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.report.page.markup import MARKS
from batchwright.report.page.page import draw_page

HERE = Path(__file__).parent
SECTIONS = ("workload", "estimate", "fit", "throughput", "audit", "noise", "plan", "recommendation")
HEADINGS = [
    "What a step holds in memory",
    "What fits",
    "How fast it runs",
    "How large a batch pays",
    "Which batch gets there soonest",
    "Every way to split it",
    "What would change the answer",
    "Is accumulation right?",
    "What to paste",
    "What this rests on",
]
VOID = {"meta", "link", "wbr"}


def sample(name: str = "sample_run") -> dict[str, Any]:
    run: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    return run


class Reader(HTMLParser):
    """Reads a page as a browser would, and fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def test_the_answer_comes_first_with_every_number_marked() -> None:
    page = Reader(draw_page(sample()))
    answer = page.text.split("What a step holds in memory")[0]
    assert "Train with an effective batch of 80: micro-batches of 10, 8 of them per step on one device" in answer
    for told in ("10micro-batchmeasured", "8accumulationformula", "1devicesgiven", "80effective batchmeasured"):
        assert told in answer
    assert "4.35e-4 [4.2e-4, 4.5e-4] formula" in answer
    assert "812 [640, 1,105] measured" in answer


def test_sections_come_in_the_order_a_person_asks() -> None:
    assert Reader(draw_page(sample())).headings == HEADINGS


def test_the_page_is_whole_by_itself_and_small() -> None:
    drawn = draw_page(sample())
    assert len(drawn.encode()) < 500 * 1024
    for tag, attributes in Reader(drawn).tags:
        assert not {"src", "srcset", "action", "background"} & attributes.keys(), (tag, attributes)
        assert attributes.get("href", "data:,") == "data:,"
    assert "url(" not in drawn
    assert "@import" not in drawn
    assert "default-src 'none'" in drawn.replace("&#x27;", "'")


def test_only_our_own_script_may_run() -> None:
    import base64
    import hashlib

    drawn = draw_page(sample())
    scripts = re.findall(r"<script>(.*?)</script>", drawn, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src &#x27;sha256-{digest}&#x27;" in drawn


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", '" onload="alert(1)', "</svg><img src=x>", "'><b>", "&lt;"]
)
def test_text_of_a_run_stays_text_wherever_it_stands(evil: str) -> None:
    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {f"{key}": replaced(each) for key, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return evil if isinstance(value, str) and value not in (*MARKS, "fits", "out_of_memory") else value

    run = replaced(sample())
    run["estimate"]["parts"][evil] = 2**24
    run["recommendation"]["configs"] = {evil: evil}
    run["command"] = evil
    harmless, page = Reader(draw_page(sample())), Reader(draw_page(run))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert evil in "".join(page.words)


def test_a_section_that_was_skipped_says_why_in_its_place() -> None:
    page = Reader(draw_page(sample("skipped_run")))
    assert page.headings == HEADINGS
    assert "What fits Not in this run: asked for with --skip fit." in page.text.replace("fitsNot", "fits Not")
    assert "How fast it runsNot in this run: a simulated card has no clock and trains nothing." in page.text
    assert "This run was not finished." in page.text
    assert "No batch was recommended." in page.text


@pytest.mark.parametrize(
    "kept", [set(kept) for size in (0, 1, 2, 7) for kept in itertools.combinations(SECTIONS, size)]
)
def test_any_subset_of_sections_makes_a_page(kept: set[str]) -> None:
    run = sample()
    for name in SECTIONS:
        if name not in kept:
            run[name] = {"skipped": f"no {name} today"}
    page = Reader(draw_page(run))
    assert page.headings == HEADINGS
    for name in set(SECTIONS) - kept - {"workload"}:
        assert f"no {name} today" in page.text


def paths(value: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [so_far, *(path for key, each in inner for path in paths(each, (*so_far, key)))]


SAMPLE = sample()
# What the page reads; the rest of a run would only thin out the changes that matter.
PATHS = [path for path in paths(SAMPLE) if path and path[1:2] not in (("modules",), ("verdict",), ("by_group",))]


@settings(max_examples=150)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(PATHS),
            st.sampled_from(
                [None, 0, -1, 10**400, float("nan"), float("inf"), True, "", "x" * 300, "\ud800\x00", [], {}, 1e-300]
            ),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_a_file_holds_there_is_a_page(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    run = copy.deepcopy(SAMPLE)
    for path, value in changes:
        place: Any = run
        # An earlier change may have taken away what this one is about.
        with contextlib.suppress(LookupError, TypeError):
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
    page = draw_page(run)
    assert Reader(page).headings == HEADINGS
    page.encode()
    drawn = page.split("<style>")[0] + page.split("</style>")[1].split("<script>")[0]
    assert not re.search(r'="[^"]*\b(nan|inf)\b', drawn)


def test_every_null_at_once() -> None:
    def emptied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: emptied(each) for key, each in value.items()}
        return [emptied(each) for each in value] if isinstance(value, list) else None

    page = Reader(draw_page(emptied(sample())))
    assert page.headings == HEADINGS
    assert "None" not in page.text


def test_an_upper_end_that_is_not_resolved_is_said_and_never_printed_as_a_number() -> None:
    run = sample()
    run["recommendation"]["critical_batch"].update(value=2951.0, low=1327.0, high=None, resolved=False)
    text = Reader(draw_page(run)).text
    assert "at least 1,327 measured" in text
    assert "2,951 [" not in text


def test_a_micro_batch_that_did_not_run_is_not_called_measured() -> None:
    run = sample()
    run["fit"]["certified"] = False
    page = Reader(draw_page(run)).text
    assert "10micro-batchpredicted" in page
    assert "not certified: no step of that size ran" in page


def test_numbers_are_those_of_the_file() -> None:
    run = sample()
    text = Reader(draw_page(run)).text
    for row in run["plan"]["table"]:
        assert f"{row['forwards_per_epoch']:,}" in text
    for config in run["recommendation"]["configs"].values():
        assert re.sub(r"\s+", " ", config) in text
    assert "0.93\N{MULTIPLICATION SIGN}" in text
    assert "16 November 2026, 15:41 UTC" in text


def test_of_a_traceback_the_page_says_the_last_line() -> None:
    run = sample()
    run["fit"] = {"skipped": "failed: Traceback (most recent call last):\n  File 'train.py'\nValueError: no such size"}
    text = Reader(draw_page(run)).text
    assert "Not in this run: failed: ValueError: no such size." in text
    assert "Traceback" not in text


def test_a_name_does_not_turn_the_words_after_it_around() -> None:
    run = sample()
    run["workload"]["name"] = "tiny\u202e"
    assert "\u202e" not in draw_page(run)


@pytest.mark.parametrize(
    ("audit", "words"),
    [
        ({"exact": False, "gradient_exact": True, "cause": "clipping per micro-batch"}, "but the loop is not right"),
        ({"exact": False, "gradient_exact": False, "random": True}, "cannot be judged"),
        ({"exact": True, "compared_with": "its micro-batches, averaged"}, "that of its micro-batches, averaged"),
        ({"exact": False}, "is not that of the big batch"),
    ],
)
def test_the_verdict_of_an_audit_says_what_was_compared(audit: dict[str, object], words: str) -> None:
    assert words in draw_page({"audit": audit})


def test_the_batches_that_were_raced_stand_beside_the_curve_and_the_lead_says_until_where() -> None:
    run = sample()
    middle = run["recommendation"]["effective_batch"]
    ratio = {"value": 1.31, "low": 1.1, "high": 1.56}
    run["race"] = {"winner": middle, "middle": middle, "rivals": [{"batch": 2 * middle, "time_ratio": ratio}]}
    run["recommendation"]["horizon"] = {"words": "until 64,000 samples"}
    text = Reader(draw_page(run)).text
    assert f"raced, batch {2 * middle}" in text
    assert "raced against the one in the middle" in text
    assert "reaches the loss soonest (until 64,000 samples)" in text
    assert "raced, batch" not in Reader(draw_page(sample())).text
