"""`tune`: stages in order, each apart, kept whatever happens, and taken up again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.tuning import tune as module
from batchwright.tuning.run_file import SECTIONS, Measured, is_done
from batchwright.tuning.tune import TuneRequest, tune
from tests.fitting import targets
from tests.tuning.runs import loss, quick
from tests.tuning.runs import loss as mean_square

SHORT: dict[str, Any] = {"limit": 64, "steps": 40}


@pytest.fixture(scope="module")
def whole() -> Any:
    return tune(quick(), **SHORT)


class TestAWholeRun:
    def test_every_section_holds_its_answer(self, whole: Any) -> None:
        assert [name for name in SECTIONS if not is_done(whole.run[name])] == []
        assert whole.finished
        assert whole.run["branches"] == {"skipped": "not asked for"}

    def test_sections_that_are_commands_equal_their_own_json(self, whole: Any) -> None:
        keys = {
            "fit": bw.fit(quick(), limit=8).to_dict(),
            "estimate": bw.estimate(quick(), micro_batch=8).to_dict(),
            "audit": bw.audit(quick()).to_dict(),
            "plan": bw.plan(8, micro_batch=4).to_dict(),
        }
        for name, own in keys.items():
            assert whole.run[name].keys() == own.keys(), name

    def test_the_answer_is_that_of_the_recommendation(self, whole: Any) -> None:
        assert whole.micro_batch == whole.run["recommendation"]["micro_batch"] <= 64
        assert whole.micro_batch * whole.accumulation == whole.effective_batch
        with pytest.raises(AttributeError):
            whole.nothing_of_the_kind  # noqa: B018

    def test_it_is_plain_json(self, whole: Any) -> None:
        assert json.loads(json.dumps(whole.to_dict(), allow_nan=False)) == whole.to_dict()

    def test_it_shows_itself(self, whole: Any) -> None:
        assert "effective batch" in whole._repr_html_()
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(whole)
        assert "recommended" in console.export_text()


def test_a_stage_that_fails_does_not_take_the_rest_with_it() -> None:
    def breaks_after_a_while(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 2:  # the audit's micro-batch
            raise ZeroDivisionError("two")
        return loss(model, batch)

    tuned = tune(quick(loss=breaks_after_a_while), **SHORT, skip=("estimate",))
    assert tuned.run["audit"]["skipped"] == "failed: ZeroDivisionError: two"
    assert is_done(tuned.run["noise"])
    assert is_done(tuned.run["recommendation"])


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"

    def interrupted(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(module._RUNS, "noise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(quick(), **SHORT, file=file)
    kept = json.loads(file.read_text())
    assert is_done(kept["throughput"])
    assert kept["noise"] == {"skipped": "interrupted"}
    assert not kept["finished"]
    tuned = tune(quick(), **SHORT, file=file, resume=True)
    assert tuned.run["throughput"] == kept["throughput"]
    assert tuned.finished
    assert is_done(tuned.run["noise"])
    assert json.loads(file.read_text()) == tuned.run


def test_a_run_of_another_question_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    everything = ("fit", "estimate", "throughput", "audit", "noise")
    tune(quick(), file=file, skip=everything)
    with pytest.raises(InvalidInputError, match="asked something else: memory"):
        tune(quick(), memory="1GiB", file=file, resume=True, skip=everything)
    with pytest.raises(InvalidInputError, match="no run to resume"):
        tune(quick(), file=tmp_path / "other.json", resume=True)


def test_a_disk_that_is_full_is_told_and_the_answer_given(tmp_path: Path) -> None:
    lines: list[str] = []
    tuned = tune(
        quick(), **SHORT, skip=("estimate", "audit", "noise"), file=tmp_path / "no" / "x.json", progress=lines.append
    )
    assert any("cannot be written" in line for line in lines)
    assert tuned.micro_batch


def test_on_a_card_memory_and_time_are_predicted_and_the_noise_is_measured_on_the_cpu() -> None:
    tuned = tune(quick(), on="a100-40gb", limit=64, devices=4)
    assert tuned.run["fit"]["source"] == tuned.run["throughput"]["source"] == "predicted"
    assert tuned.run["noise"]["on"] == "cpu"
    assert "simulated" in tuned.run["audit"]["skipped"]
    assert "simulated" in tuned.run["rate"]["skipped"]
    assert tuned.devices == 4
    assert tuned.source == "predicted"


def test_a_workload_that_raises_at_once_says_so_in_every_section() -> None:
    def broken(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    tuned = tune(quick(loss=broken), **SHORT)
    assert "shapes do not match" in tuned.run["noise"]["skipped"]
    assert "skipped" in tuned.run["recommendation"]


def test_a_stage_that_does_not_exist_cannot_be_skipped() -> None:
    with pytest.raises(InvalidInputError, match="no stage 'nosie'"):
        tune(quick(), skip=("nosie",))


def test_stages_that_train_stay_within_what_fits() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return mean_square(model, batch)

    tuned = bw.tune(quick(loss=loss), limit=32, steps=40, branch_batches=(8, 16), skip=("estimate",))
    assert tuned.run["fit"]["micro_batch"] == 4
    for stage in ("throughput", "audit", "noise", "branches"):
        assert "skipped" not in tuned.run[stage] or isinstance(tuned.run[stage]["skipped"], dict), tuned.run[stage]
    assert tuned.micro_batch <= 4


def test_where_nothing_fits_nothing_is_recommended() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    run = bw.tune(quick(loss=loss), limit=8, steps=20, skip=("estimate",)).run
    assert run["fit"]["nothing_fits"]
    assert run["noise"] == {"skipped": "nothing fits"}
    assert run["recommendation"]["skipped"].startswith("nothing fits")


def test_another_workload_is_not_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit": 8, "steps": 20, "skip": ("estimate", "audit"), "file": tmp_path / "run.json"}
    bw.tune(quick(), **options)
    with pytest.raises(InvalidInputError, match="num_parameters"):
        bw.tune(quick(model=lambda: nn.Linear(8, 1, bias=False)), resume=True, **options)


def test_an_interrupt_in_a_child_ends_the_run_and_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tune(f"{Path(targets.__file__)}:interrupted", memory="64MiB", limit=4, file=tmp_path / "run.json")
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["fit"] == {"skipped": "interrupted"}


@pytest.mark.filterwarnings("ignore:.*Lazy modules")
def test_a_lazy_model_has_every_answer_but_the_trace() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))

    run = tune(quick(model=lazy), limit=8, steps=10).run
    assert run["workload"]["num_parameters"] is None
    assert [name for name in SECTIONS if not is_done(run[name]) and name != "branches"] == ["estimate"]
    assert "the model has lazy parameters" in run["estimate"]["skipped"]


def test_branches_from_several_places_of_a_run_are_carried_on_and_averaged() -> None:
    request: dict[str, Any] = {"limit": 32, "steps": 40, "branch_batches": (8, 16), "skip": ("estimate", "audit")}
    tuned = bw.tune(quick(), branch_steps=(0, 30), **request)
    first, *later = Measured.read(tuned.run).branches.estimates  # type: ignore[union-attr]  # they were trained
    assert [place["first_step"] for place in tuned.run["branches"]["later"]] == [30]
    assert (first.begin, later[0].begin) == (0, 240)
    assert "branches" in tuned.run["recommendation"]["critical_batch_from"]
    typed = TuneRequest(branch_batches=(8, 16), branch_steps=(30, 0)).command("train.py:workload")
    assert typed == "batchwright tune train.py:workload --branches 8,16@0,30"
