"""Answers across runs: whole or ignored, said, and never a reason to fail."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batchwright.device.outcome import Outcome
from batchwright.fitting import cache as cache_file
from batchwright.fitting.cache import AnswerBook, Answers, Remembered, from_remembered
from batchwright.fitting.fit_result import Fit, NextSize, Restored
from batchwright.fitting.probers import Budget
from batchwright.fitting.request import FitRequest
from batchwright.fitting.run_search import find_cap, fit_shapes
from batchwright.planning.search import Seen, by_doubling, by_growing, by_peaks, by_powers_of_two, by_prediction
from batchwright.targets import load_workload
from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

KEY = "ab" * 32
OTHER_KEY = "cd" * 32


def make_fit(micro_batch: int | None = 37, **changes: Any) -> Fit:
    trials = () if micro_batch is None else (Outcome(micro_batch, {}, "fits", PeakBytes(device=1000), 1.0),)
    fields: dict[str, Any] = {
        "name": "train.py:workload",
        "on": "cpu",
        "micro_batch": micro_batch,
        "limit": 100,
        "limit_bytes": 2**30,
        "trials": trials,
        "next_size": NextSize(38, "out_of_memory", "micro-batch 38 ran out of memory: cpu"),
        "reason": "micro-batch 38 ran out of memory",
        "shape": {"seq_len": 512},
    }
    return Fit(**{**fields, **changes})


def file_in(folder: Path, key: str = KEY) -> Path:
    return folder / f"{key}.json"


def test_an_answer_comes_back(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "new" / "folder")
    assert answers.recall(KEY) == (None, "")
    assert answers.remember(KEY, make_fit()) == ""
    answer, note = Answers(tmp_path / "new" / "folder").recall(KEY)
    assert note == ""
    assert answer is not None
    assert answer == Remembered(37, make_fit().next_size, make_fit().reason, answer.when)
    assert answers.recall(OTHER_KEY) == (None, "")


def test_a_later_answer_replaces_an_earlier_one(tmp_path: Path) -> None:
    answers = Answers(tmp_path)
    answers.remember(KEY, make_fit(37))
    answers.remember(KEY, make_fit(12, next_size=None))
    answer, _ = answers.recall(KEY)
    assert answer is not None
    assert (answer.micro_batch, answer.next_size) == (12, None)


def test_the_file_can_be_read_by_a_person(tmp_path: Path) -> None:
    Answers(tmp_path).remember(KEY, make_fit())
    entry = json.loads(file_in(tmp_path).read_text())
    assert entry["schema"] == 1
    assert entry["key"] == KEY
    assert (entry["name"], entry["on"], entry["limit_bytes"]) == ("train.py:workload", "cpu", 2**30)
    assert entry["shape"] == {"seq_len": "512"}
    assert "\n" in file_in(tmp_path).read_text()


def test_what_was_not_certified_is_not_remembered(tmp_path: Path) -> None:
    assert Answers(tmp_path).remember(KEY, make_fit(None)) == ""
    assert Answers(tmp_path).remember(KEY, make_fit(trials=())) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe\x00", "decode"),
        (b"[1]", "no JSON object"),
        (b"[" * 30_000, "recursion"),
        (b"1" * 10_000, "digits"),
    ],
    ids=["empty", "cut off", "binary", "a list", "deeply nested", "a huge number"],
)
def test_a_damaged_file_is_ignored_with_a_note(tmp_path: Path, content: bytes, problem: str) -> None:
    file_in(tmp_path).write_bytes(content)
    answers = Answers(tmp_path)
    answer, note = answers.recall(KEY)
    assert answer is None
    assert note.startswith("a remembered answer was ignored: the file is damaged (")
    assert problem in note
    assert str(file_in(tmp_path)) in note
    assert answers.remember(KEY, make_fit()) == ""
    assert answers.recall(KEY)[1] == ""


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"key": OTHER_KEY},
        {"micro_batch": 0},
        {"micro_batch": True},
        {"micro_batch": "37"},
        {"micro_batch": 37.0},
        {"micro_batch": 10**16},
        {"when": "yesterday"},
        {"when": 5},
        {"reason": None},
        {"next_size": 38},
        {"next_size": {}},
        {"next_size": {"micro_batch": 37, "outcome": None, "why": ""}},
        {"next_size": {"micro_batch": 38, "outcome": "exploded", "why": ""}},
        {"next_size": {"micro_batch": 38, "outcome": ["fits"], "why": ""}},
        {"next_size": {"micro_batch": 38, "outcome": None, "why": None}},
    ],
    ids=str,
)
def test_every_field_is_checked(tmp_path: Path, change: dict[str, Any]) -> None:
    answers = Answers(tmp_path)
    answers.remember(KEY, make_fit())
    entry = json.loads(file_in(tmp_path).read_text())
    file_in(tmp_path).write_text(json.dumps({**entry, **change}))
    answer, note = answers.recall(KEY)
    assert answer is None
    assert "ignored: the file is damaged" in note


def test_a_file_that_cannot_be_read_is_ignored_with_a_note(tmp_path: Path) -> None:
    file_in(tmp_path).mkdir()
    answer, note = Answers(tmp_path).recall(KEY)
    assert answer is None
    assert note.startswith("a remembered answer was ignored: it cannot be read (")


def test_a_folder_that_cannot_be_read_is_ignored_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        # Not by chmod: tests may run as root, whom it does not stop.
        raise PermissionError(errno.EACCES, "Permission denied")

    Answers(tmp_path).remember(KEY, make_fit())
    monkeypatch.setattr(os, "open", refuse)
    expected = "a remembered answer was ignored: it cannot be read (Permission denied)"
    assert Answers(tmp_path).recall(KEY) == (None, expected)


def test_what_is_too_large_to_be_ours_is_not_read(tmp_path: Path) -> None:
    file_in(tmp_path).write_bytes(b" " * 100_000)
    note = Answers(tmp_path).recall(KEY)[1]
    assert note == "a remembered answer was ignored: it cannot be read (it is larger than 65,536 bytes)"


def test_what_is_no_plain_file_is_ignored_at_once_and_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{KEY}.json")
    answer, note = Answers(tmp_path).recall(KEY)
    assert answer is None
    assert note == "a remembered answer was ignored: it cannot be read (it is not a plain file)"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    answers = Answers(tmp_path / "taken" / "fits")
    note = answers.remember(KEY, make_fit())
    assert note.startswith("the answer is not remembered: ")
    assert "cannot be written to" in note
    assert answers.recall(KEY)[0] is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["write_bytes", "replace"])
def test_a_read_only_or_full_disk_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, where: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path if where == "write_bytes" else os, where, refuse)
    note = Answers(tmp_path).remember(KEY, make_fit())
    assert os.strerror(code) in note
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission_to_write_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "cannot be written to" in Answers(tmp_path).remember(KEY, make_fit())
    finally:
        tmp_path.chmod(0o700)


def test_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "_MOST_ENTRIES", 3)
    answers = Answers(tmp_path)
    for age, key in enumerate(("a1", "b2", "c3")):
        answers.remember(key, make_fit())
        os.utime(file_in(tmp_path, key), (1000.0 + age, 1000.0 + age))
    abandoned, fresh = tmp_path / ".x.json.1", tmp_path / ".y.json.1"
    abandoned.touch()
    fresh.touch()
    os.utime(abandoned, (1000.0, 1000.0))
    (tmp_path / "notes.txt").touch()
    assert answers.recall("a1")[0] is not None  # in use, so no longer the oldest
    answers.remember("d4", make_fit())
    assert {file.name for file in tmp_path.iterdir()} == {"a1.json", "c3.json", "d4.json", "notes.txt", ".y.json.1"}


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = "LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv(local, str(tmp_path / "caches"))
    Answers().remember(KEY, make_fit())
    assert file_in(tmp_path / "ours" / "fits").exists()
    monkeypatch.delenv("BATCHWRIGHT_CACHE")
    Answers().remember(KEY, make_fit())
    assert file_in(tmp_path / "caches" / "batchwright" / "fits").exists()
    monkeypatch.setenv(local, "relative")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    Answers().remember(KEY, make_fit())
    assert file_in(tmp_path / "home" / ".cache" / "batchwright" / "fits").exists()


def test_without_a_home_nothing_is_remembered_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("BATCHWRIGHT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    answers = Answers()
    assert answers.recall(KEY) == (None, "")
    assert "no home folder" in answers.remember(KEY, make_fit())


def test_writers_and_readers_at_once_see_whole_answers(tmp_path: Path) -> None:
    def write_and_read(_: int) -> None:
        for size in range(1, 50):
            assert Answers(tmp_path).remember(KEY, make_fit(size, next_size=None)) == ""
            answer, note = Answers(tmp_path).recall(KEY)
            assert note == ""
            assert answer is not None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_and_read, range(4)))
    assert [file.name for file in tmp_path.iterdir()] == [f"{KEY}.json"]


def drive(search: Generator[int, Seen, None], truth: int) -> list[int]:
    tried: list[int] = []
    size = next(search, None)
    while size is not None:
        tried.append(size)
        try:
            size = search.send(Seen(size, fits=size <= truth, peak=10 * size if size <= truth else None))
        except StopIteration:
            size = None
    return tried


CAP = 1000
FALLBACKS: dict[str, Callable[[int], Generator[int, Seen, None]]] = {
    "doubling": lambda truth: by_doubling(CAP),
    "growing": lambda truth: by_growing(50, CAP),
    "peaks": lambda truth: by_peaks(CAP, 10 * truth),
    "prediction": lambda truth: by_prediction(CAP, 10 * truth, lambda n: 9 * n, allowance=5),
}


def test_one_probe_certifies_a_size_that_still_fits() -> None:
    def never() -> Generator[int, Seen, None]:
        raise AssertionError("the fallback is not to be made")

    assert drive(from_remembered(37, never), truth=37) == [37]


@pytest.mark.parametrize("name", FALLBACKS)
@pytest.mark.parametrize("truth", [0, 1, 2, 30, 36, 500, 699])
def test_a_size_that_no_longer_fits_starts_the_search_that_finds_the_truth(name: str, truth: int) -> None:
    for stale in {truth + 1, truth + 2, 700, 1000}:
        tried = drive(from_remembered(stale, lambda: FALLBACKS[name](truth)), truth)
        assert tried[0] == stale
        assert len(set(tried)) == len(tried)
        # Nothing at or above the known failure is probed again.
        assert max(tried[1:], default=0) < stale
        assert max((size for size in tried if size <= truth), default=0) == truth
        assert min(size for size in tried if size > truth) == truth + 1


def test_a_known_failure_is_handed_to_the_search_in_place_of_a_probe() -> None:
    assert drive(by_doubling(64), truth=5) == [1, 2, 4, 8, 6, 5]
    assert drive(from_remembered(8, lambda: by_doubling(64)), truth=5) == [8, 1, 2, 4, 6, 5]
    assert drive(from_remembered(16, lambda: by_powers_of_two(64)), truth=5) == [16, 1, 2, 4, 8]
    # It may be all there was to know.
    assert drive(from_remembered(1, lambda: by_doubling(64)), truth=0) == [1]


TARGET = """
import random
import torch
from torch import nn
import batchwright as bw
from {helper} import WIDTH

def workload():
    print("building", random.random(), torch.rand(1))
    return bw.Workload(
        model=lambda: {model},
        batch=lambda n, seq_len=4: torch.randn(n, seq_len, WIDTH),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr={lr}),
    )
"""
CHILD = """
import sys
from batchwright.fitting.probers import Budget
from batchwright.fitting.cache import AnswerBook
from batchwright.fitting.request import FitRequest
from batchwright.targets import load_workload
book = AnswerBook(load_workload(sys.argv[1]), sys.argv[1], FitRequest(), "")
print(book.find_key({"seq_len": 4}, "cpu", Budget(2**30, was_asked=True), cap=64))
"""


def write_target(folder: Path, helper: str, *, width: int = 8, lr: float = 3e-4, model: str = "") -> str:
    (folder / f"{helper}.py").write_text(f"WIDTH = {width}\n")
    file = folder / f"target_of_{helper}.py"
    file.write_text(TARGET.format(helper=helper, lr=lr, model=model or "nn.Linear(WIDTH, WIDTH)"))
    return f"{file}:workload"


@contextlib.contextmanager
def loaded_and_gone(helper: str) -> Iterator[None]:
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules.pop(helper, None)
        sys.modules.pop(f"target_of_{helper}", None)


def find_key(target: str, helper: str, **changes: Any) -> str | None:
    """Load a target as a new process would, leaving nothing behind."""
    options: dict[str, Any] = {"shape": {"seq_len": 4}, "on": "cpu", "budget": Budget(2**30, was_asked=True), "cap": 64}
    options |= {name: changes.pop(name) for name in options.keys() & changes.keys()}
    with loaded_and_gone(helper):
        return AnswerBook(load_workload(target), target, FitRequest(**changes), "").find_key(**options)


def test_the_key_is_the_same_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_target(tmp_path, "helper_elsewhere")
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    # Earlier tests may have changed the number of threads here.
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.run([sys.executable, "-c", CHILD, target], env=environment, capture_output=True, text=True)
    # The files of tests are imported here and not there.
    monkeypatch.setattr(cache_file, "is_installed_or_ours", lambda file: not file.startswith(str(tmp_path)))
    assert child.stdout.split()[-1] == find_key(target, "helper_elsewhere"), child.stderr


@pytest.mark.parametrize("change", [{"width": 100}, {"lr": 3e-5}, {"model": "nn.Linear(8, 9)"}], ids=str)
def test_a_change_in_the_target_or_in_a_file_it_imports_changes_the_key(tmp_path: Path, change: Any) -> None:
    before = find_key(write_target(tmp_path, "helper_beside"), "helper_beside")
    assert before is not None
    assert find_key(write_target(tmp_path, "helper_beside"), "helper_beside") == before
    assert find_key(write_target(tmp_path, "helper_beside", **change), "helper_beside") != before


def test_the_model_as_it_prints_itself_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_target(tmp_path, "helper_by_repr", model='nn.Linear(8, int(__import__("os").environ["WIDTH"]))')
    keys = set()
    for width in ("4", "8"):
        monkeypatch.setenv("WIDTH", width)
        keys.add(find_key(target, "helper_by_repr"))
    assert len(keys) == 2
    assert None not in keys


@pytest.mark.parametrize(
    "change",
    [
        {"shape": {"seq_len": 6}},
        {"budget": Budget(2**31, was_asked=True)},
        {"budget": Budget(None)},
        {"cap": 65},
        {"accumulation": 2},
        {"clip_norm": 1.0},
        {"start": 4},
        {"powers_of_two": True},
    ],
    ids=str,
)
def test_another_request_has_another_key(tmp_path: Path, change: dict[str, Any]) -> None:
    target = write_target(tmp_path, "helper_asked")
    assert find_key(target, "helper_asked") != find_key(target, "helper_asked", **change)


def test_free_bytes_count_in_steps_of_256_mib(tmp_path: Path) -> None:
    target = write_target(tmp_path, "helper_free")
    keys = [find_key(target, "helper_free", budget=Budget(mib * 2**20)) for mib in (513, 700, 800)]
    assert keys[0] == keys[1] != keys[2]


def test_another_version_or_allocator_setting_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_target(tmp_path, "helper_versions")
    keys = [find_key(target, "helper_versions")]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    keys.append(find_key(target, "helper_versions"))
    monkeypatch.setattr(cache_file, "__version__", "99")
    keys.append(find_key(target, "helper_versions"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    keys.append(find_key(target, "helper_versions"))
    assert len(set(keys)) == len(keys)


def test_looking_for_the_key_leaves_random_state_alone_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = '(print("drawn"), __import__("random").random(), torch.rand(1), nn.Linear(8, 8))[-1]'
    target = write_target(tmp_path, "helper_drawing", model=draws)
    with loaded_and_gone("helper_drawing"):
        book = AnswerBook(load_workload(target), target, FitRequest(), "")
        capsys.readouterr()
        states = torch.get_rng_state(), random.getstate()
        assert book.find_key({}, "cpu", Budget(None), cap=8) is not None
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert capsys.readouterr().out == ""


def test_what_raises_on_the_way_has_no_key(tmp_path: Path) -> None:
    target = write_target(tmp_path, "helper_broken", model="1 / 0")
    assert find_key(target, "helper_broken") is None
    assert find_key(write_target(tmp_path, "helper_fine"), "helper_fine", on="no-such-device") is None


class PretendedSteps:
    """A prober whose steps fit up to a size."""

    on, where = "cpu", "nowhere"

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.tried: list[int] = []

    def probe(self, micro_batch: int, shape: Mapping[str, Any]) -> Outcome:
        self.tried.append(micro_batch)
        return Outcome(micro_batch, dict(shape), "fits" if micro_batch <= self.largest else "out_of_memory", None, 0.1)

    def restored(self) -> Restored:
        return Restored()


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Fit, list[int]]]:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(AnswerBook, "find_key", lambda *_, **__: KEY)

    def run(largest: int, **options: Any) -> tuple[Fit, list[int]]:
        prober, request = PretendedSteps(largest), FitRequest(limit=100, **options)
        book = AnswerBook(None, "train.py:workload", request, "")  # type: ignore[arg-type]
        fit = fit_shapes(
            request, prober, Budget(None), cap=find_cap(request), name="train", say=lambda _: None, book=book
        )
        return fit, prober.tried

    return run


def test_a_second_run_takes_one_probe_and_says_what_it_remembers(
    search: Callable[..., tuple[Fit, list[int]]],
) -> None:
    first, tried = search(37)
    assert len(tried) > 5
    again, tried_again = search(37)
    assert tried_again == [37]
    assert (again.micro_batch, again.certified, again.reason) == (37, True, first.reason)
    assert first.next_size is not None
    assert again.next_size is not None
    assert again.next_size.outcome == "out_of_memory"
    assert again.next_size.why.startswith(f"{first.next_size.why} (remembered from ")
    assert "certified by one probe" in again.notes[-1]


def test_a_remembered_size_that_no_longer_fits_is_searched_anew_and_replaced(
    search: Callable[..., tuple[Fit, list[int]]],
) -> None:
    search(37)
    fit, tried = search(12)
    assert (fit.micro_batch, tried[0]) == (12, 37)
    assert "fits no more; searched anew" in fit.notes[-1]
    assert search(12)[1] == [12]


def test_a_search_that_ran_out_of_trials_is_not_remembered(search: Callable[..., tuple[Fit, list[int]]]) -> None:
    assert search(37, max_trials=3)[0].micro_batch == 4
    assert search(37)[1][0] == 1
