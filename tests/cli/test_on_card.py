"""`--on CARD` as a person types it: estimates and fits for a card that is not there."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest

import batchwright as bw
from batchwright.catalogue.cards import Card, context_of, find_card
from batchwright.memory import estimate as every_card
from batchwright.targets import load_workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Run

FILE = """
import torch
from torch import nn

import batchwright as bw


def workload(**changes):
    fields = {
        "model": lambda: nn.Linear(64, 64, bias=False).cuda(),
        "batch": lambda n, rows=1: torch.randn(n, rows * 8192, 64, device="cuda"),
        "loss": lambda model, batch: model(batch).pow(2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return bw.Workload(**{**fields, **changes})


def moved_in_the_step():
    def loss(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return model(batch.cuda()).float().pow(2).mean()

    return workload(batch=lambda n, rows=1: torch.randn(n, rows * 8192, 64), loss=loss)


def records_a_graph():
    return workload(loss=lambda model, batch: torch.cuda.CUDAGraph())


def raises():
    def loss(model, batch):
        raise LookupError("mine")

    return workload(loss=loss)
"""
MIB = 2**20


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "train_on_card.py"
    path.write_text(FILE)
    search, modules = list(sys.path), set(sys.modules)
    yield f"{path}:moved_in_the_step"
    sys.path[:] = search
    for name in set(sys.modules) - modules:
        if "train_on_card" in name or "batchwright_target" in name:
            del sys.modules[name]


def room(mib: int, card: str = "t4-16gb") -> str:
    return f"{(context_of(find_card(card)).typical_bytes >> 20) + 1 + mib}MiB"


class TestEstimate:
    def test_the_answer_has_the_card_and_says_that_it_fits(self, run: Run, target: str) -> None:
        ran = run("estimate", target, "--micro-batch", "4", "--on", "a100-40gb")
        assert ran.code == 0, ran.err
        first = ran.out.splitlines()[0]
        assert first.startswith(f"{target}: ")
        assert "a100-40gb" in first
        for part in ("slack", "context", "workspaces"):
            assert re.search(rf"^{part} +\d", ran.out, re.M), part
        assert "tracing micro-batch 4" in ran.err

    def test_json_has_three_peaks_and_no_part_is_null(self, run: Run, target: str) -> None:
        data = json.loads(run("estimate", target, "--micro-batch", "4", "--on", "a100-40gb", "--json").out)
        assert (data["schema"], data["on"], data["fits"], data["source"]) == (1, "a100-40gb", True, "predicted")
        peak = data["peak_bytes"]
        assert 0 < peak["allocated"] <= peak["reserved"] <= peak["device"] == sum(data["parts"].values())
        assert data["limit_bytes"] == find_card("a100-40gb").total_bytes

    def test_one_that_does_not_fit_is_answered_with_exit_code_1(self, run: Run, target: str) -> None:
        ran = run("estimate", target, "--micro-batch", "64", "--on", "t4-16gb", "--memory", room(64), "--json")
        assert ran.code == 1
        assert json.loads(ran.out)["fits"] is False

    def test_max_finds_the_largest_on_the_card(self, run: Run, target: str) -> None:
        ran = run("estimate", target, "--on", "t4-16gb", "--memory", room(96), "--max", "--json")
        data = json.loads(ran.out)
        assert ran.code == 0
        assert data["fits"] is True
        assert data["max_micro_batch"] == data["micro_batch"] > 1
        assert f"tracing micro-batch {data['micro_batch'] + 1:,}" in ran.err

    def test_max_where_nothing_fits_is_a_clean_no(self, run: Run, target: str) -> None:
        ran = run("estimate", target, "--on", "t4-16gb", "--memory", room(20), "--max")
        assert (ran.code, ran.out) == (1, "")
        assert "Error: micro-batch 1 does not fit on NVIDIA Tesla T4" in ran.err
        assert "Traceback" not in ran.err

    def test_settings_of_the_allocator_change_the_answer(self, target: str) -> None:
        plain, expandable = (
            bw.estimate(load_workload(target), micro_batch=3, on="a100-40gb", allocator=settings).peak_bytes.reserved
            for settings in (None, "expandable_segments:True")
        )
        assert plain != expandable

    def test_what_if_is_traced_on_the_card(self, run: Run, target: str) -> None:
        ran = run("estimate", target, "--micro-batch", "4", "--on", "a100-40gb", "--what-if", "--json")
        told = {saving["change"]: saving["peak_bytes"] for saving in json.loads(ran.out)["what_if"]}
        assert told["bf16 autocast"] is not None

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--on", "a100-50gb"], "no device and no card is called 'a100-50gb'; this machine has: cpu"),
            (["--on", "a100"], "a100-40gb or a100-80gb"),
            (["--on", "cuda"], "cuda is a device of this machine, and an estimate runs nothing on it."),
            (["--on", "a100-40gb", "--max", "--micro-batch", "4"], "--max finds the micro-batch"),
            (["--on", "a100-40gb", "--memory", "lots"], "such as 24GiB, 24GB or 24g; received 'lots'."),
            (["--allocator", "expandable_segments:True"], "in Python: bw.estimate(workload"),
            (["--on", "all", "--max"], "--on all cannot be combined with --max."),
            (["--on", "all", "--memory", "8GiB", "--what-if"], "--on all cannot be combined with --memory, --what-if."),
            (["--on", "cpu", "--devices", "2"], "ranks are simulated on cards only.\n  try: --on a100-40gb"),
        ],
    )
    def test_wrong_input_is_one_message_and_exit_code_2(
        self, run: Run, target: str, args: list[str], said: str
    ) -> None:
        ran = run("estimate", target, *args)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
        assert "Traceback" not in ran.err

    def test_a_model_by_name_is_not_asked_of_a_card(self, run: Run) -> None:
        ran = run("estimate", "gpt2", "--on", "a100-40gb")
        assert (ran.code, ran.out) == (2, "")
        assert "--on cannot be used with a model by name, such as 'gpt2'." in ran.err

    def test_a_graph_is_refused(self, run: Run, target: str) -> None:
        ran = run("estimate", target.replace("moved_in_the_step", "records_a_graph"), "--on", "a100-40gb")
        assert (ran.code, ran.out) == (1, "")
        assert "Error: the step records a CUDA graph" in ran.err

    def test_a_mistake_in_the_step_is_the_users_traceback(self, run: Run, target: str) -> None:
        ran = run("estimate", target.replace("moved_in_the_step", "raises"), "--on", "a100-40gb")
        assert (ran.code, ran.out) == (3, "")
        assert "LookupError: mine" in ran.err
        assert 'raise LookupError("mine")' in ran.err

    def test_a_batch_may_be_made_on_the_card(self, run: Run, target: str) -> None:
        ran = run("estimate", target.replace("moved_in_the_step", "workload"), "--on", "a100-40gb")
        assert ran.code == 0, ran.err


class TestOnAll:
    @pytest.fixture(autouse=True)
    def _three_cards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def three() -> tuple[Card, ...]:
            return tuple(find_card(name) for name in ("h100-80gb", "t4-16gb", "rtx-3070-8gb"))

        monkeypatch.setattr(every_card, "all_cards", three)

    def test_a_row_for_each(self, run: Run, target: str) -> None:
        ran = run("estimate", target, "--on", "all")
        assert ran.code == 0, ran.err
        for card in ("h100-80gb", "t4-16gb", "rtx-3070-8gb"):
            assert re.search(rf"^ *{card} ", ran.out, re.M), card

    def test_json(self, run: Run, target: str) -> None:
        data = json.loads(run("estimate", target, "--on", "all", "--micro-batch", "2", "--json").out)
        assert set(data) == {"schema", "name", "micro_batch", "rows", "source"}
        assert [row["card"] for row in data["rows"]] == ["rtx-3070-8gb", "t4-16gb", "h100-80gb"]
        assert all(row["fits"] for row in data["rows"])

    def test_where_no_card_takes_it_the_exit_code_is_1(self, run: Run, target: str) -> None:
        ran = run("estimate", target, "--on", "all", "--micro-batch", "1000000", "--json")
        assert ran.code == 1
        assert not any(row["fits"] for row in json.loads(ran.out)["rows"])


class TestFit:
    def test_it_finds_the_largest_and_says_that_nothing_ran(self, run: Run, target: str) -> None:
        ran = run("fit", target, "--on", "t4-16gb", "--memory", room(96), "--json")
        data = json.loads(ran.out)
        assert ran.code == 0
        assert (data["on"], data["source"], data["certified"]) == ("t4-16gb", "predicted", False)
        assert data["next_size"] == {**data["next_size"], "micro_batch": data["micro_batch"] + 1}
        assert data["next_size"]["outcome"] == "out_of_memory"
        assert data["where"] == "on a simulated card: traced, not run"

    def test_in_text_it_does_not_claim_to_have_run(self, run: Run, target: str) -> None:
        out = run("fit", target, "--on", "t4-16gb", "--memory", room(96), "--limit", "2").out
        assert "t4-16gb" in out
        assert "certified" not in out.replace("not certified", "")

    def test_a_table_of_shapes(self, run: Run, target: str) -> None:
        ran = run("fit", target, "--on", "t4-16gb", "--memory", room(96), "--shape", "rows=1,2", "--json")
        rows = json.loads(ran.out)["shapes"]
        assert [row["shape"]["rows"] for row in rows] == [1, 2]
        assert rows[0]["micro_batch"] > rows[1]["micro_batch"]

    def test_nothing_fits_is_exit_code_1(self, run: Run, target: str) -> None:
        ran = run("fit", target, "--on", "t4-16gb", "--memory", room(20))
        assert (ran.code, ran.out) == (1, "")
        assert "micro-batch 1 does not fit on t4-16gb" in ran.err

    def test_a_card_that_nobody_knows_is_exit_code_2(self, run: Run, target: str) -> None:
        ran = run("fit", target, "--on", "t5-16gb")
        assert (ran.code, ran.out) == (2, "")
        assert "no device and no card is called 't5-16gb'" in ran.err
