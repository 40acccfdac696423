"""A command that is ended from outside leaves nothing behind: no process, no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import batchwright
from batchwright.state.process_state import UNCUT_FILES, UNCUT_FUNCTIONS, temporary_folder, uninterrupted

TARGET = """
import os, time
from pathlib import Path
import torch
import batchwright as bw

def batch(n):
    Path(__file__).with_name("running").write_text(str(os.getpid()))
    time.sleep(WAIT)
    return torch.randn(n, 4)

def workload():
    return bw.Workload(
        model=lambda: torch.nn.Linear(4, 1),
        batch=batch,
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
"""


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells whether a process is alive")
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (["fit", "--limit", "4", "--no-cache"], signal.SIGTERM, 143),
        pytest.param(["fit", "--limit", "4", "--no-cache"], signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(["tune", "--limit", "4"], signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(["noise", "--effective-batch", "8"], signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
    ids=["fit-SIGTERM", "fit-SIGINT", "tune-SIGTERM", "noise-SIGTERM"],
)
def test_a_command_that_is_ended_leaves_neither_processes_nor_folders(
    command: list[str], number: int, code: int, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    target = tmp_path / "target.py"
    target.write_text(TARGET.replace("WAIT", "60"))
    process = subprocess.Popen(
        [sys.executable, "-m", "batchwright", command[0], f"{target}:workload", "--on", "cpu", *command[1:]],
        env={**os.environ, "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        running = tmp_path / "running"
        deadline = time.monotonic() + 120
        while not (running.exists() and running.read_text()) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        output = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
    assert process.returncode == code, output
    assert "Interrupted." in output
    assert not is_alive(int(running.read_text()))
    # Another is torch's own cache.
    assert list(temporary.glob("batchwright*")) == []


def test_an_interrupt_waits_for_the_end_and_finds_what_is_to_be_undone() -> None:
    done: list[str] = []

    def start() -> None:
        try:
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("started")
            done.append("not reached")
        finally:
            done.append("ended")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["started", "ended"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_temporary_folder_is_gone_after_an_interrupt() -> None:
    folders: list[Path] = []

    def use() -> None:
        with temporary_folder() as folder:
            folders.append(folder)
            assert folder.is_dir()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        use()
    assert not folders[0].exists()


def test_what_may_not_be_cut_short_is_named_as_it_is() -> None:
    assert all(Path(file).exists() for file in UNCUT_FILES)
    text = "\n".join(file.read_text() for file in Path(batchwright.__file__).parent.rglob("*.py"))
    own = [name for name in UNCUT_FUNCTIONS if not name.startswith("__")]
    assert own
    assert all(f"def {name}(" in text for name in own)
