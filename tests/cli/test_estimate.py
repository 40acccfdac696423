"""`batchwright estimate` as a person types it, the wrong things too."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

import batchwright as bw
from batchwright.targets import load_workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Run

FILE = """
import torch
from torch import nn

import batchwright as bw


def loss(model, batch):
    return model(batch).pow(2).mean()


def workload(**changes):
    fields = {
        "model": lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)),
        "batch": lambda n, copies=1: torch.randn(n, copies, 256),
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params),
    }
    return bw.Workload(**{**fields, **changes})


def reads_values():
    return workload(loss=lambda model, batch: model(batch).mean() * model(batch).sum().item())


def wrong_width():
    return workload(batch=lambda n: torch.randn(n, 255))


def raises():
    raise ConnectionError("the hub cannot be reached")


def vector():
    return workload(loss=lambda model, batch: model(batch))


def ignores_n():
    return workload(batch=lambda n: torch.randn(3, 256))


def over_nothing():
    return workload(model=lambda: nn.Linear(256, 16).requires_grad_(False))
"""

# The keys that the issue lists, and those we add.
AGREED = ["schema", "micro_batch", "on", "peak_bytes", "upper_bytes", "parts", "grows_with_batch", "peak_at", "largest"]
ADDED = [
    "name",
    "phases",
    "notes",
    "limit_bytes",
    "max_micro_batch",
    "max_limited_by",
    "what_if",
    "fits",
    "context",
    "time",
]
PARTS = ["weights", "gradients", "optimizer", "activations", "temporaries", "inputs", "workspaces", "slack", "context"]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "train_here.py"
    path.write_text(FILE)
    search, modules = list(sys.path), set(sys.modules)
    yield path
    sys.path[:] = search
    for name in set(sys.modules) - modules:
        if "train_here" in name or "batchwright_target" in name:
            del sys.modules[name]


def test_the_answer_goes_to_stdout_and_the_talk_to_stderr(run: Run, file: Path) -> None:
    ran = run("estimate", f"{file}:workload", "--micro-batch", "512")
    assert ran.code == 0
    assert ran.out.startswith(f"{file}:workload: peak 5.13 MiB at micro-batch 512, predicted for cpu, at most ")
    assert ran.err.splitlines() == [
        f"loading {file}:workload",
        "tracing micro-batch 512",
        "tracing micro-batch 1,024",
    ]


def test_the_text_has_the_parts_what_grows_the_moment_the_phases_and_the_owners(run: Run, file: Path) -> None:
    out = run("estimate", f"{file}:workload", "--micro-batch", "512").out
    assert re.search(r"^activations +1 MiB +\d+% +\+2 KiB$", out, re.M)
    assert re.search(r"^optimizer +1.07 MiB +\d+% +fixed$", out, re.M)
    assert re.search(r"^weights +546 KiB +\d+% +fixed$", out, re.M)
    assert "the peak comes in backward in " in out
    for phase in ("build", "batch", "forward", "backward", "optimizer"):
        assert re.search(rf"^  {phase} +█", out, re.M), phase
    assert "largest owners at the peak:" in out
    assert "what each change would save" not in out


def test_what_if_adds_a_line_for_each_change(run: Run, file: Path) -> None:
    out = run("estimate", f"{file}:workload", "--micro-batch", "64", "--what-if").out
    for change in ("bf16 autocast", "activation checkpointing", "8-bit optimizer", "ZeRO-3 over 8 devices"):
        assert re.search(rf"^  {re.escape(change)} +\S", out, re.M), change


def test_json_is_the_estimate_as_data(run: Run, file: Path) -> None:
    target = f"{file}:workload"
    ran = run("estimate", target, "--micro-batch", "8", "--shape", "copies=2", "--accumulation", "2", "--json")
    data = json.loads(ran.out)
    assert data == bw.estimate(load_workload(target), micro_batch=8, shape={"copies": 2}, accumulation=2).to_dict()


def test_json_has_the_keys_agreed_and_null_where_a_host_has_nothing(run: Run, file: Path) -> None:
    data = json.loads(run("estimate", f"{file}:workload", "--micro-batch", "8", "--json").out)
    assert set(data) == {*AGREED, "source", *ADDED}
    assert (data["schema"], data["micro_batch"], data["on"], data["source"]) == (1, 8, "cpu", "predicted")
    for kind in ("peak_bytes", "upper_bytes"):
        assert list(data[kind]) == ["allocated", "reserved", "device"]
        assert (data[kind]["reserved"], data[kind]["device"]) == (None, None)
    for kind in ("parts", "grows_with_batch"):
        assert list(data[kind]) == PARTS
        assert [part for part, value in data[kind].items() if value is None] == ["slack", "context"]
    assert set(data["peak_at"]) == {"phase", "module", "operator"}
    assert set(data["largest"][0]) == {"num_bytes", "count", "part", "module", "operator", "phase"}
    assert (data["max_micro_batch"], data["limit_bytes"], data["what_if"]) == (None, None, [])


def test_max_gives_the_largest_micro_batch_within_the_memory(run: Run, file: Path) -> None:
    ran = run("estimate", f"{file}:workload", "--max", "--memory", "6MiB", "--json")
    data = json.loads(ran.out)
    assert data["max_micro_batch"] == data["micro_batch"] > 512
    assert data["peak_bytes"]["allocated"] <= data["limit_bytes"] == 6 * 2**20
    assert f"tracing micro-batch {data['micro_batch'] + 1:,}" in ran.err, "the next one was traced as well"


def test_max_says_so_in_text(run: Run, file: Path) -> None:
    out = run("estimate", f"{file}:workload", "--max", "--memory", "6MiB").out
    assert out.splitlines()[0].endswith("; the largest within 6 MiB")


def test_nothing_fits_is_a_clean_no(run: Run, file: Path) -> None:
    ran = run("estimate", f"{file}:workload", "--max", "--memory", "1MiB")
    assert (ran.code, ran.out) == (1, "")
    assert "Error: micro-batch 1 does not fit into 1 MiB.\n  needed 3.13 MiB: optimizer 1.07 MiB" in ran.err
    assert "weights 546 KiB, gradients 546 KiB\n" in ran.err


def test_what_cannot_be_traced_is_a_clean_no_with_the_line(run: Run, file: Path) -> None:
    ran = run("estimate", f"{file}:reads_values")
    assert (ran.code, ran.out) == (1, "")
    number = FILE.splitlines().index(
        "    return workload(loss=lambda model, batch: model(batch).mean() * model(batch).sum().item())"
    )
    assert f"  at {file}:{number + 1}: " in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--max"], "--max and --memory go together."),
        (["--memory", "16GiB"], "--max and --memory go together."),
        (["--max", "--memory", "lots"], "memory must be an amount such as 24GiB, 24GB or 24g; received 'lots'."),
        (["--max", "--memory", "1GiB", "--micro-batch", "4"], "--max finds the micro-batch, so --micro-batch is left"),
        (["--micro-batch", "0"], "--micro-batch must be a whole number"),
        (["--micro-batch", "many"], "received 'many'."),
        (["--accumulation", "0"], "--accumulation must be a whole number"),
        (["--shape", "copies"], "--shape is written name=value, such as seq_len=512; received 'copies'."),
        (["--shape", "=3"], "--shape is written name=value"),
        (["--shape", "copies=long"], "--shape copies must be a whole number"),
        (["--shape", "copies=²"], "--shape copies must be a whole number"),
        (["--shape", "depth=3"], "cannot be called with depth; besides the number of samples it takes copies."),
        (["--on", "moon"], "no device and no card is called 'moon'; this machine has: cpu"),
        (["--routing", "worst"], 'try: in Python: bw.estimate(workload, routing="worst")'),
        (["--clip-norm", "1"], "try: in Python: bw.estimate(workload, clip_norm=1.0)"),
        (["--seq-len", "128"], "try: batchwright recommend NAME --memory 24GiB"),
        (["--wibble"], "No such option"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(run: Run, file: Path, args: list[str], said: str) -> None:
    ran = run("estimate", f"{file}:workload", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("vector", "loss= must return a scalar tensor; received one of shape (1, 1, 16)."),
        ("ignores_n", "the batch ignores its size: asked for 1 sample, received tensors of 3."),
        ("over_nothing", "the optimizer has no parameters"),
        ("nothing", "has no function 'nothing'; it has: "),
        ("loss", "cannot be called without arguments: missing a required argument: 'model'."),
    ],
)
def test_a_workload_that_cannot_be_right_is_said_with_exit_code_2(
    run: Run, file: Path, function: str, said: str
) -> None:
    ran = run("estimate", f"{file}:{function}")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py:workload", "no file at 'nowhere.py'."),
        ("nowhere.py", "try: nowhere.py:workload"),
        ("no_such_module:workload", "no module 'no_such_module'"),
        ("llama-3-9b", "no model is named 'llama-3-9b' in the catalogue.\n  try: llama-3-8b"),
    ],
)
def test_a_target_that_leads_nowhere_is_said_with_exit_code_2(run: Run, target: str, said: str) -> None:
    ran = run("estimate", target)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


class TestTheUsersOwnErrors:
    def test_a_mistake_in_the_step_is_the_users_traceback_and_exit_code_3(self, run: Run, file: Path) -> None:
        ran = run("estimate", f"{file}:wrong_width")
        assert (ran.code, ran.out) == (3, "")
        talk, _, shown = ran.err.partition("Traceback (most recent call last):\n")
        assert talk.splitlines()[-1] == "tracing micro-batch 1"
        assert shown.startswith(f'  File "{file}", line ')
        assert "return model(batch).pow(2).mean()" in shown.splitlines()[1]
        assert shown.splitlines()[-1].startswith("RuntimeError: a and b must have same reduction dim")
        assert "failed while attempting to run meta" not in ran.err

    def test_an_error_of_the_network_is_theirs_too(self, run: Run, file: Path) -> None:
        ran = run("estimate", f"{file}:raises")
        assert ran.code == 3
        assert "ConnectionError: the hub cannot be reached" in ran.err
        assert "cannot write the answer" not in ran.err

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("def (", "SyntaxError: invalid syntax"),
            ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
            ("open('/no/such/file')", "FileNotFoundError"),
            ("1 / 0", "ZeroDivisionError"),
        ],
    )
    def test_a_file_that_does_not_load_shows_its_line(self, run: Run, file: Path, source: str, said: str) -> None:
        file.write_text(source)
        ran = run("estimate", f"{file}:workload")
        assert (ran.code, ran.out) == (3, "")
        assert said in ran.err
        assert f'File "{file}", line 1' in ran.err
        assert "importlib" not in ran.err


class TestNamedModels:
    def test_a_formula_answers_at_once(self, run: Run) -> None:
        ran = run("estimate", "llama-3-8b", "--micro-batch", "1")
        assert ran.code == 0
        assert "`batchwright recommend llama-3-8b --memory 24GiB` takes other settings" in ran.err
        assert ran.out.startswith("llama-3-8b: peak ")
        longer = str(bw.estimate_named("llama-3-8b", micro_batch=1, seq_len=4096))
        assert longer.startswith("llama-3-8b: peak 75.4 GiB at micro-batch 1, by formula")

    def test_json_has_the_same_keys_as_a_trace(self, run: Run, file: Path) -> None:
        named = json.loads(run("estimate", "gpt2", "--json").out)
        traced = json.loads(run("estimate", f"{file}:workload", "--json").out)
        assert list(named) == list(traced)
        assert (named["source"], named["on"]) == ("formula", "formula")

    def test_every_setting_of_its_own_changes_the_answer(self) -> None:
        def peak(micro_batch: int = 8, seq_len: int = 1024, **settings: Any) -> int:
            return bw.estimate_named("llama-3-8b", micro_batch=micro_batch, seq_len=seq_len, **settings).peak

        plain = peak()
        assert peak(16) > plain
        assert peak(seq_len=2048) > plain
        assert peak(precision="fp32") > plain
        assert peak(optimizer="sgd") < plain
        assert peak(checkpointing=True) < plain
        assert peak(zero=3, devices=8) < plain
        assert peak(tuning="qlora") < plain

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"zero": 4, "devices": 8}, "ZeRO stage must be 0, 1, 2 or 3; received 4."),
            ({"seq_len": 100_000}, "llama-3-8b takes sequences of up to 8,192 tokens; received 100,000."),
            ({"precision": "fp8"}, "fp8"),
        ],
    )
    def test_a_setting_that_there_is_not_is_refused(self, settings: dict[str, Any], said: str) -> None:
        with pytest.raises(bw.BatchwrightError) as refused:
            bw.estimate_named("llama-3-8b", **{"micro_batch": 1, "seq_len": 1024, **settings})
        assert said in str(refused.value)

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--what-if"], "--what-if cannot be used with a model by name, such as 'llama-3-8b'."),
            (["--max", "--memory", "16GiB"], "--max, --memory cannot be used with a model"),
            (["--shape", "seq_len=3"], "--shape cannot be used with a model"),
            (["--devices", "8"], "--devices cannot be used with a model"),
            (["--zero", "3"], "bw.estimate_named(NAME, ...)"),
        ],
    )
    def test_what_it_cannot_be_asked_is_refused(self, run: Run, args: list[str], said: str) -> None:
        ran = run("estimate", "llama-3-8b", *args)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err


def test_a_budget_needs_a_unit(run: Run) -> None:
    ran = run("recommend", "7b", "--memory", "24")
    assert ran.code == 2
    assert "such as 24GiB, 24GB or 24g; received '24'" in ran.err


def test_user_code_that_exits_is_said_to_have_done_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text("def workload():\n    raise SystemExit(7)\n")
    ran = run("estimate", f"{tmp_path / 'quits.py'}:workload")
    assert ran.code == 3
    assert "called sys.exit(7)" in ran.err
