"""A fit as a person sees it: the answer first, every probe, and nothing said twice."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import batchwright as bw
from batchwright.device.outcome import Outcome
from batchwright.fitting.fit_result import Fit, MemoryLine, NextSize, Restored
from batchwright.report.display import render_plain
from batchwright.report.text.fit_text import fit_remarks, summarize_fit
from batchwright.units import PeakBytes

MIB = 2**20


def ran(size: int, step_seconds: float = 0.5, **told: Any) -> Outcome:
    return Outcome(size, {}, "fits", PeakBytes(device=(100 + 20 * size) * MIB), 1.0, step_seconds, **told)


def full(size: int, **told: Any) -> Outcome:
    return Outcome(size, {}, "out_of_memory", None, 0.2, rule="cpu-allocator", **told)


def made(**changes: Any) -> Fit:
    fields: dict[str, Any] = {
        "name": "train.py:workload",
        "on": "cpu",
        "micro_batch": 43,
        "limit": 2**20,
        "limit_bytes": 1024 * MIB,
        "trials": (ran(30, 0.3), ran(43), full(44)),
        "next_size": NextSize(44, "out_of_memory", "micro-batch 44 ran out of memory: cpu-allocator"),
        "reason": "micro-batch 44 ran out of memory",
        "line": MemoryLine(100 * MIB, 20 * MIB, "predicted"),
        "restored": Restored(("weights", "random state"), ("files",)),
    }
    return Fit(**{**fields, **changes})


def table() -> Fit:
    rows = (
        made(shape={"crops": 2}, micro_batch=45, trials=(ran(45),), next_size=NextSize(46, None, "not tried: the end")),
        made(shape={"crops": 12}),
    )
    return replace(rows[1], shapes=rows)


def test_the_answer_is_the_first_line_and_says_what_the_next_size_did() -> None:
    assert summarize_fit(made()) == (
        "train.py:workload: micro-batch 43 fits on cpu: peak 960 MiB of 1 GiB, headroom 64 MiB; "
        "micro-batch 44 ran out of memory"
    )


def test_a_next_size_that_was_not_tried_says_why() -> None:
    fit = made(next_size=NextSize(44, None, "not tried: the limit is 43"))
    assert summarize_fit(fit).endswith("; micro-batch 44 was not tried: the limit is 43")


def test_a_next_size_that_an_earlier_run_tried_is_said_to_be_that() -> None:
    fit = made(trials=(ran(43),))
    assert summarize_fit(fit).endswith("; micro-batch 44 ran out of memory in an earlier run")
    assert "  44 out of memory in an earlier run" in render_plain(
        replace(fit, shape={"a": 1}, shapes=(replace(fit, shape={"a": 1}),))
    )


def test_where_the_peak_or_the_budget_is_not_known_none_is_made_up() -> None:
    unknown = replace(ran(43), peak_bytes=None)
    assert "micro-batch 43 fits on cpu within 1 GiB; " in summarize_fit(made(trials=(unknown,)))
    assert "micro-batch 43 fits on mps: peak 960 MiB; " in summarize_fit(made(on="mps", limit_bytes=None))


def test_every_probe_is_a_row_in_the_order_they_ran() -> None:
    lines = render_plain(made()).splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("─"))
    assert lines[2 : rule + 4] == [
        "                                     seconds  samples",
        "micro-batch  outcome           peak    /step       /s",
        "─────────────────────────────────────────────────────",
        "         30  fits           700 MiB      0.3      100",
        "         43  fits           960 MiB      0.5       86",
        "         44  out of memory        -        -        -",
    ]


def test_remarks_say_speed_memory_and_what_was_restored() -> None:
    assert list(fit_remarks(made())) == [
        "speed: 100 samples/s at micro-batch 30 already, 86 at 43.",
        "memory: 100 MiB fixed + 20 MiB per sample near the answer (slope predicted).",
        "restored: weights, random state.",
        "not restored: files.",
    ]


def test_the_largest_that_is_also_the_fastest_is_not_remarked_on() -> None:
    assert not any(line.startswith("speed") for line in fit_remarks(made(trials=(ran(30, 5.0), ran(43)))))
    assert not any(line.startswith("speed") for line in fit_remarks(made(trials=(ran(42, 0.1), ran(43)))))


def test_doubts_compilations_and_notes_are_said_once() -> None:
    trials = (ran(43, num_compilations=2), full(60, doubt="may be a crash"), full(44, doubt="may be a crash"))
    remarks = list(fit_remarks(made(trials=trials, notes=("counted",), evaluation=made(notes=("counted",)))))
    assert remarks.count("doubt: may be a crash.") == 1
    assert remarks.count("note: counted.") == 1
    assert "torch.compile: compiled 2 times; its seconds are not counted." in remarks


def test_a_size_too_small_for_the_step_is_called_that() -> None:
    alone = Outcome(1, {}, "failed", None, 0.1, is_too_small=True)
    assert re.search(r"^ +1  too small +- +- +-$", render_plain(made(trials=(alone, ran(43), full(44)))), re.M)


def test_the_plan_and_the_evaluation_size_follow_the_answer() -> None:
    evaluation = made(micro_batch=60, trials=(ran(60),), limit_bytes=None, next_size=None, reason="the limit is 60")
    fit = made(plan=bw.plan(256, micro_batch=43), evaluation=evaluation)
    text = render_plain(fit)
    assert "\nplan: micro-batch 43 x accumulation 6 x devices 1 = effective batch 258 (2 more than the 256" in text
    assert "\nevaluation: micro-batch 60 fits on cpu: peak 1.27 GiB; the limit is 60.\n" in text


class TestShapes:
    def test_the_first_line_speaks_for_the_smallest(self) -> None:
        assert summarize_fit(table()) == (
            "train.py:workload: micro-batch 43 at crops=12 is the smallest of 2 shapes on cpu within 1 GiB"
        )

    def test_each_shape_is_a_row(self) -> None:
        assert render_plain(table()).splitlines()[2:6] == [
            "crops  micro-batch       peak  headroom  probes  next size",
            "──────────────────────────────────────────────────────────────────────",
            "    2           45  1,000 MiB    24 MiB       1  46 not tried: the end",
            "   12           43    960 MiB    64 MiB       3  44 out of memory",
        ]

    def test_a_shape_at_which_nothing_fits_is_said(self) -> None:
        rows = (*table().shapes, made(shape={"crops": 99}, micro_batch=None, trials=(full(1),), line=None))
        fit = replace(table(), shapes=rows)
        assert summarize_fit(fit).endswith("is the smallest of 2 shapes on cpu within 1 GiB; nothing fits at crops=99")
        assert re.search(r"^ +99 +- +- +- +1  micro-batch 44 ran out of memory$", render_plain(fit), re.M)

    def test_plans_and_evaluation_sizes_are_columns(self) -> None:
        plan = bw.plan(256, micro_batch=43)
        rows = tuple(replace(row, plan=plan) for row in table().shapes)
        text = render_plain(replace(table(), shapes=rows, plan=plan, evaluation=table()))
        assert re.search(r"^ +12 .* 43 x 6 x 1 = 258 +43 +3  44 out of memory$", text, re.M)
        assert "plan: " not in text


def test_one_shape_is_named_in_the_answer() -> None:
    assert summarize_fit(made(shape={"crops": 12})).startswith("train.py:workload at crops=12: micro-batch 43 fits")


def test_ranks_are_named_in_the_answer() -> None:
    assert "micro-batch 43 fits on cpu, 4 ranks: peak " in summarize_fit(made(ranks=4))


def test_the_answer_stands_out_on_a_terminal() -> None:
    from rich.console import Console

    console = Console(width=200, force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as capture:
        console.print(made())
    bold = [line for line in capture.get().splitlines() if line.startswith("\x1b[1m")]
    assert len(bold) == 2
    assert "43  fits" in bold[1]


def test_it_shows_itself_in_a_notebook() -> None:
    html = made()._repr_html_()
    assert "<td" in html
    assert "restored: weights" in html
    assert "crops" in table()._repr_html_()
