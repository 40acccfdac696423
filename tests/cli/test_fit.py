"""`batchwright fit` as a person types it, the wrong things too."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from batchwright.cli import main
from batchwright.device.outcome import Outcome
from batchwright.errors import StepFailedError
from batchwright.fitting.fit_result import Fit, NextSize
from batchwright.units import PeakBytes, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Run

MIB = 2**20

# 4 MiB a sample, and nothing to compute with them: what fits is decided by memory alone.
FILE = """
import torch
from torch import nn

import batchwright as bw


def workload(**changes):
    fields = {
        "model": lambda: nn.Linear(1024, 1),
        "batch": lambda n, copies=1: torch.zeros(n, 1024 * copies, 1024),
        "loss": lambda model, batch: model(batch[:, 0]).pow(2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return bw.Workload(**{**fields, **changes})


def buggy():
    return workload(loss=lambda model, batch: model(batch[:, 0, :1023]).mean())


def buggy_at_two_copies():
    return workload(loss=lambda model, batch: model(batch[:, 0, : 1024 if batch.shape[1] == 1024 else 1023]).mean())


def tells_its_limit():
    import os, resource

    def batch(n):
        with open(os.environ["TELL_LIMIT_TO"], "a") as told:
            print(resource.getrlimit(resource.RLIMIT_DATA)[0], file=told)
        return torch.zeros(n, 1024, 1024)

    return workload(batch=batch)


def ignores_n():
    return workload(batch=lambda n: torch.zeros(3, 1024))


def empty():
    return workload(batch=None, data=[])
"""

# The keys that the issue lists, and those we add.
AGREED = [
    *("schema", "source", "certified", "micro_batch", "fastest_micro_batch", "on", "peak_bytes", "limit_bytes"),
    *("headroom_bytes", "trials", "next_size", "reason", "restored", "shapes"),
]
ADDED = ["name", "limit", "line", "shape", "evaluation", "ranks", "where", "plan", "notes"]
OF_A_TRIAL = ["micro_batch", "outcome", "peak_bytes", "seconds"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "fit_here.py"
    path.write_text(FILE)
    search, modules = list(sys.path), set(sys.modules)
    yield path
    sys.path[:] = search
    for name in set(sys.modules) - modules:
        if "fit_here" in name or "batchwright_target" in name:
            del sys.modules[name]


class TestProbesForReal:
    def test_the_answer_goes_to_stdout_and_the_talk_to_stderr(self, run: Run, file: Path) -> None:
        ran = run("fit", f"{file}:workload", "--memory", "128MiB")
        assert ran.code == 0, ran.err
        first, *_ = ran.out.splitlines()
        answer = re.fullmatch(
            r".*fit_here\.py:workload: micro-batch (\d+) fits on cpu: "
            r"peak [\d.]+ MiB of 128 MiB, headroom [\d.]+ (?:Mi|Ki)B; micro-batch (\d+) ran out of memory",
            first,
        )
        assert answer is not None, first
        size, after = map(int, answer.groups())
        assert after == size + 1
        assert re.search(rf"^ +{size}  fits +[\d.]+ MiB +[\d.]+ +[\d,.]+$", ran.out, re.M)
        assert re.search(rf"^ +{after}  out of memory +- +- +-$", ran.out, re.M)
        assert "\nmemory: " in ran.out
        assert "\nstate: untouched (probes ran in subprocesses).\n" in ran.out
        talk = ran.err.splitlines()
        assert talk[0] == f"loading {file}:workload"
        assert f"trying micro-batch {size}" in talk
        assert f"micro-batch {after} ran out of memory" in talk
        assert talk[-1] == f"using micro-batch {size}"

    @pytest.mark.slow
    def test_json_is_all_of_stdout_and_a_job_runs_for_each_shape(self, file: Path) -> None:
        command = [sys.executable, "-m", "batchwright", "fit", f"{file}:workload", "--limit", "2"]
        options = ["--shape", "copies=1,2,3", "--shape-from", "2", "--accumulate-to", "8", "--devices", "2"]
        job = "echo job {micro_batch} {copies} ${{HOME:+home}}"
        done = subprocess.run([*command, *options, "--then", job, "--json"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        assert set(data) == {*AGREED, *ADDED}
        assert set(OF_A_TRIAL) <= set(data["trials"][0])
        assert (data["schema"], data["source"], data["certified"], data["micro_batch"]) == (1, "measured", True, 2)
        assert [row["shape"] for row in data["shapes"]] == [{"copies": 2}, {"copies": 3}]
        assert data["trials"][0]["accumulation"] == 2
        assert any("accumulated 2 micro-batches" in note for note in data["notes"])
        assert (data["plan"]["accumulation"], data["shapes"][0]["plan"]["devices"]) == (2, 2)
        talk = done.stderr.splitlines()
        assert talk[-6:-4] == ["using micro-batch 2 for copies=2", "using micro-batch 2 for copies=3"]
        assert [line for line in talk if line.startswith("job ")] == ["job 2 2 home", "job 2 3 home"]

    def test_nothing_fits_is_a_clean_no(self, run: Run, file: Path) -> None:
        ran = run("fit", f"{file}:workload", "--memory", "2MiB")
        assert (ran.code, ran.out) == (1, "")
        assert "Error: micro-batch 1 does not fit on cpu (2 MiB)." in ran.err
        assert "Traceback" not in ran.err

    def test_a_bug_in_the_step_is_the_users_traceback_and_exit_code_3(self, run: Run, file: Path) -> None:
        ran = run("fit", f"{file}:buggy", "--limit", "4")
        assert (ran.code, ran.out) == (3, "")
        assert "Traceback (most recent call last):" in ran.err
        assert f'File "{file}", line ' in ran.err
        assert ran.err.splitlines()[-1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
        assert "Error: Traceback" not in ran.err

    @pytest.mark.slow
    def test_a_bug_at_a_later_shape_tells_what_was_found_before_it(self, run: Run, file: Path) -> None:
        ran = run("fit", f"{file}:buggy_at_two_copies", "--start-at", "1", "--limit", "1", "--shape", "copies=1,2,3")
        assert (ran.code, ran.out) == (3, "")
        *_, error, note = ran.err.splitlines()
        assert error.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
        assert note == "found before that: micro-batch 1 fits at copies=1"
        assert "shape copies=3" not in ran.err, "it ends at once"

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a limit on private memory")
    def test_a_limit_of_the_shell_is_the_budget_of_the_probes_and_is_said(self, file: Path, tmp_path: Path) -> None:
        limit_kib = 1_200_000
        command = [sys.executable, "-m", "batchwright", "fit", f"{file}:tells_its_limit", "--json"]
        options = ["--start-at", "32", "--max-trials", "1"]
        shell = f"ulimit -S -d {limit_kib}; exec {shlex.join([*command, *options])}"
        done = subprocess.run(
            shell,
            shell=True,
            capture_output=True,
            text=True,
            env={**os.environ, "TELL_LIMIT_TO": str(tmp_path / "limits")},
        )
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        in_probes = [int(line) for line in (tmp_path / "limits").read_text().split()]
        assert 0 < min(in_probes) <= limit_kib * 1024
        assert data["micro_batch"] == 32
        assert 32 * 4 * MIB < data["peak_bytes"]["device"] <= data["limit_bytes"] < limit_kib * 1024
        said = "the memory of this process is limited (ulimit -d), which leaves "
        assert data["notes"] == [f"{said}{format_bytes(data['limit_bytes'])}"]

    def test_a_damaged_answer_of_an_earlier_run_is_ignored_and_said(
        self, run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A key that is known beforehand spares the run that would write the file.
        key = "0" * 64
        monkeypatch.setattr("batchwright.fitting.cache.AnswerBook.find_key", lambda *_, **__: key)
        answer = tmp_path / "cache" / "fits" / f"{key}.json"
        answer.parent.mkdir(parents=True)
        answer.write_text('{"schema": 1, "key": "0000')
        ran = run("fit", f"{file}:workload", "--start-at", "1", "--limit", "1")
        assert ran.code == 0, ran.err
        assert "micro-batch 1 fits on cpu" in ran.out.splitlines()[0]
        said = " ".join(ran.out.split())
        assert "note: a remembered answer was ignored: the file is damaged (" in said
        assert str(answer) in ran.out.replace("\n", "")
        assert json.loads(answer.read_text())["micro_batch"] == 1, "it is whole again"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--limit", "0"], "--limit must be a whole number from 1"),
        (["--limit", "1e3"], "--limit must be a whole number from 1 to 10^15, such as 32 or 10_000; received '1e3'."),
        (["--memory", "0GiB"], "--memory must be an amount such as 24GiB"),
        (["--memory", "-1GiB"], "--memory must be an amount such as 24GiB"),
        (["--memory", "lots"], "memory must be an amount such as 24GiB, 24GB or 24g; received 'lots'."),
        (["--on", "moon"], "no device and no card is called 'moon'; this machine has: cpu"),
        (["--shape", "copies"], "--shape is written name=value, such as seq_len=512"),
        (["--shape", "=3"], "--shape is written name=value, such as seq_len=512"),
        (["--shape", "copies=2,,4"], "--shape copies must be a whole number"),
        (["--shape", "copies=2,long"], "--shape copies must be a whole number"),
        (["--shape", "copies=2,2"], "shape copies names a value twice; received [2, 2]."),
        (["--shape", "copies=2", "--shape", "copies=3"], "--shape copies was given twice."),
        (["--shape", "depth=3"], "cannot be called with depth; besides the number of samples it takes copies."),
        (["--shape-from", "3"], "--shape-from goes with one --shape of several values; received none."),
        (["--shape", "copies=2", "--shape-from", "3"], "--shape-from goes with one --shape of several values"),
        (["--shape", "copies=2,4", "--shape-from", "5"], "--shape-from 5 leaves nothing of copies=2,4."),
        (["--scale", "copies:2=1.0,else=0.5"], "scale is a share of limit, and no limit was given."),
        (["--limit", "9", "--scale", "copies:4=1.0,2=0.5,else=0.1"], "the bounds of --scale must rise"),
        (["--limit", "9", "--scale", "copies:2=1.0"], "--scale needs an entry else=factor"),
        (["--limit", "9", "--scale", "copies"], "a scale table is written name:bound=factor"),
        (["--limit", "9", "--scale", "copies:2=1.0,else=0.5"], "--scale goes by copies, but the shape has no names."),
        (["--limit", "4", "--start-at", "9"], "start 9 is above limit 4."),
        (["--limit", "9", "--start-at", "2", "--scale", "copies:2=1.0,else=0.5"], "scale computes the start"),
        (["--scale", "copies:2=1.0,else=0.5"], "try: --limit 64"),
        (["--limit", "9", "--scale", "copies"], "try: --scale max_crops:2=1.0,4=0.8,else=0.5"),
        (["--limit", "9", "--scale", "copies:2=1.0,else=0.5"], "try: --shape copies=2,4,6"),
        (["--margin", "5%"], "No such option: --margin\n  try: in Python: bw.fit(target, margin=0.05)"),
        (["--max-trials", "0"], "--max-trials must be a whole number"),
        (["--devices", "4"], "--devices changes nothing without --accumulate-to."),
        (["--then", "eval -b {size}"], "--then has '{size}'; what can be filled in: {micro_batch}."),
        (["--then", "eval -b {micro_batch:>4}"], "--then has '{micro_batch:>4}'"),
        (["--then", "eval -b {micro_batch"], "--then has '{'; what can be filled in"),
        (["--wibble"], "No such option"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(run: Run, file: Path, args: list[str], said: str) -> None:
    ran = run("fit", f"{file}:workload", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "trying" not in ran.err, "nothing was run"
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("foo", "a target is written path.py:function or module:function; received 'foo'."),
        ("nowhere.py:workload", "no file at 'nowhere.py'."),
        ("no_such_module:workload", "no module 'no_such_module'"),
        ("", "received ''."),
    ],
)
def test_a_target_that_leads_nowhere_is_one_message_and_exit_code_2(run: Run, target: str, said: str) -> None:
    ran = run("fit", target)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "loading" not in ran.err


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("ignores_n", "the batch ignores its size: asked for "),
        ("empty", "the workload's data is empty: there is no sample to probe with."),
        ("nothing", "has no function 'nothing'; it has: buggy, buggy_at_two_copies, empty, ignores_n, tells_its_limit"),
    ],
)
def test_a_workload_that_cannot_be_right_is_said_with_exit_code_2(
    run: Run, file: Path, function: str, said: str
) -> None:
    ran = run("fit", f"{file}:{function}")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def found(size: int | None, **changes: Any) -> Fit:
    """Return a fit as the library would."""
    trials = (Outcome(size, {}, "fits", PeakBytes(device=2**20), 1.0, 0.5),) if size else ()
    after = NextSize((size or 0) + 1, "out_of_memory", "ran out of memory")
    fields: dict[str, Any] = {"limit": 64, "limit_bytes": 2**21, "trials": trials, "next_size": after}
    return Fit("w", "cpu", size, reason="ran out of memory", **{**fields, **changes})


class Library:
    """In place of the library's `fit`: answers at once and keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: Fit | BaseException = found(19)
        self.asked: dict[str, Any] = {}
        monkeypatch.setattr("batchwright.fitting.fit.fit", self)
        monkeypatch.delenv("RANK", raising=False)

    def __call__(self, work: str, **asked: Any) -> Fit:
        self.asked = asked
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Library:
    # The target must be there, though nobody loads it.
    folder = tmp_path_factory.mktemp("target")
    (folder / "t.py").touch()
    monkeypatch.chdir(folder)
    return Library(monkeypatch)


def table(*sizes: int | None) -> Fit:
    rows = tuple(found(size, shape={"crops": number}) for number, size in enumerate(sizes, 1))
    return found(min(size for size in sizes if size), shapes=rows, shape={"crops": len(sizes)})


class TestWithoutProbes:
    def test_every_option_reaches_the_library(self, run: Run, library: Library) -> None:
        options = ["--on", "cuda", "--memory", "1GiB", "--limit", "64", "--shape", "crops=2,4", "--start-at", "3"]
        more = ["--powers-of-two", "--max-trials", "7", "--evaluate", "--no-cache"]
        assert run("fit", "t.py:w", *options, *more).code == 0
        del library.asked["progress"]
        assert library.asked == {
            "on": "cuda",
            "memory": 2**30,
            "limit": 64,
            "shapes": {"crops": [2, 4]},
            "start": 3,
            "scale": None,
            "powers_of_two": True,
            "max_trials": 7,
            "evaluate": True,
            "accumulation": 1,
            "devices": 1,
            "cache": False,
        }
        table = "crops:2=1.0,else=0.5"
        assert run("fit", "t.py:w", "--limit", "64", "--shape", "crops=2,4", "--scale", table).code == 0
        assert library.asked["scale"] == table

    def test_accumulate_to_adds_the_plan_and_probes_with_two_micro_batches(self, run: Run, library: Library) -> None:
        out = run("fit", "t.py:w", "--accumulate-to", "256", "--devices", "4").out
        assert library.asked["accumulation"] == 2
        assert "\nplan: micro-batch 16 x accumulation 4 x devices 4 = effective batch 256.\n" in out
        assert "\nnote: probes accumulated 2 micro-batches per optimizer step" in out

    def test_a_shape_at_which_nothing_fits_is_a_clean_no_below_the_table(self, run: Run, library: Library) -> None:
        library.answer = table(19, None)
        ran = run("fit", "t.py:w", "--shape", "crops=1,2")
        assert ran.code == 1
        assert "; nothing fits at crops=2" in ran.out
        assert ran.err.splitlines()[-1] == "no micro-batch fits for crops=2"

    def test_jobs_run_where_something_fits(self, run: Run, library: Library, tmp_path: Path) -> None:
        library.answer = table(19, None, 7)
        job = f"echo {{micro_batch}} {{crops}} >> {tmp_path}/out"
        ran = run("fit", "t.py:w", "--shape", "crops=1,2,3", "--then", job)
        assert ran.code == 1
        assert (tmp_path / "out").read_text() == "19 1\n7 3\n"
        assert f"running echo 7 3 >> {tmp_path}/out" in ran.err

    def test_a_job_that_fails_ends_the_rest_with_exit_code_3(self, run: Run, library: Library, tmp_path: Path) -> None:
        library.answer = table(19, 7)
        ran = run("fit", "t.py:w", "--shape", "crops=1,2", "--then", f"touch {tmp_path}/{{crops}}; exit 5")
        assert ran.code == 3
        assert ran.out.startswith("w: micro-batch 7"), "the answer is printed first"
        assert ran.err.splitlines()[-1] == f"the job ended with exit code 5: touch {tmp_path}/1; exit 5"
        assert [path.name for path in tmp_path.iterdir()] == ["1"]

    def test_only_the_first_rank_speaks_and_runs_the_job(
        self, run: Run, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = f"echo $RANK >> {tmp_path}/out"
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            ran = run("fit", "t.py:w", "--then", job)
            assert ran.code == 0
            assert bool(ran.out) == bool(ran.err) == (rank == "0")
        assert (tmp_path / "out").read_text() == "0\n"

    def test_a_step_that_failed_in_a_child_is_shown_as_it_is(self, run: Run, library: Library) -> None:
        library.answer = StepFailedError("Traceback (most recent call last):\nKeyError: 3")
        ran = run("fit", "t.py:w")
        assert (ran.code, ran.out) == (3, "")
        assert ran.err.endswith("\nTraceback (most recent call last):\nKeyError: 3\n")

    @pytest.mark.parametrize("end", [StepFailedError("KeyError: 3"), KeyboardInterrupt()])
    def test_what_was_found_before_the_end_is_told_once(self, run: Run, library: Library, end: BaseException) -> None:
        end.add_note("found before that: micro-batch 19 fits at crops=1")
        library.answer = end
        ran = run("fit", "t.py:w", "--shape", "crops=1,2")
        assert ran.err.splitlines()[-1] == "found before that: micro-batch 19 fits at crops=1"
        assert ran.err.count("found before that") == 1

    def test_an_interrupt_ends_with_130(self, run: Run, library: Library) -> None:
        library.answer = KeyboardInterrupt()
        assert run("fit", "t.py:w").code == 130


@pytest.mark.parametrize("words", [["--on", "t4-16gb", "--limit", "4"], ["--on", "t4-16gb", "--limit", "4", "--json"]])
def test_a_command_of_ones_own_is_fitted_as_it_is(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\nmodel = torch.nn.Linear(8, 1).cuda()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n    model(torch.ones(int(sys.argv[1]), 8).cuda()).sum().backward(); optimizer.step()\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        main(["fit", *words, "--", "python", "train.py", "{micro_batch}"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert "python train.py 4" in out
    assert ('"micro_batch": 4' in out) == ("--json" in words)


def test_options_that_say_nothing_about_a_command_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["fit", "--evaluate", "--", "python", "train.py"])
    assert leaving.value.code == 2
    assert "--evaluate cannot be used with a command of your own" in capsys.readouterr().err
