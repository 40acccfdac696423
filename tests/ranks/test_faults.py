"""One rank raises, runs out of memory, hangs or dies: all end, soon, with one message and the exit code of one process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET = f"{ROOT / 'benchmarks' / 'rank_faults_target.py'}:workload"
NOISE = ("noise", TARGET, "--effective-batch", "16", "--steps", "20")
FIT = ("fit", TARGET, "--memory", "512MiB", "--limit", "4", "--no-cache")
TUNE = ("tune", TARGET, "--memory", "512MiB", "--limit", "4", "--steps", "20", "--skip", "fit,estimate,audit")
LIMIT_SECONDS = 6
SAYS = {
    "bug": "rank {} raised",
    "out of memory": "rank {} ran out of memory",
    "hang": "rank {} hangs",
    "SIGKILL": "rank {} died",
    "SIGSTOP": "rank {} died",
    "extra collective": "all ranks wait for each other",
}


def run_ranks(folder: Path, command: tuple[str, ...], ranks: int = 2, **settings: str) -> tuple[list[int], str]:
    """Start the ranks without a launcher, which would end some of them; return their exit codes and all that was said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "BATCHWRIGHT_RANK_TIMEOUT": str(LIMIT_SECONDS),
        **settings,
    }
    with (folder / "said").open("w") as said:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "batchwright", *command],
                cwd=folder,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=said,
                stderr=said,
            )
            for rank in range(ranks)
        ]
        end = time.monotonic() + 120
        try:
            codes = [process.wait(timeout=max(end - time.monotonic(), 1)) for process in started if process]
        finally:
            for process in started:
                process.kill()
                process.wait()
    return codes, (folder / "said").read_text()


def check(fault: str, rank: int, codes: list[int], said: str) -> None:
    expected = 3 if fault == "bug" else 1
    well = [code for number, code in enumerate(codes) if number != rank or fault not in ("SIGKILL", "SIGSTOP")]
    assert set(well) == {expected}, (codes, said)
    # Once; and nothing of torch's own, or of ours, beside it.
    assert len(re.findall(SAYS[fault].format(rank), said)) == 1, said
    assert "third_party" not in said
    assert "C++" not in said
    assert said.count("Traceback") == (fault in ("bug", "out of memory")), said
    if fault == "bug":
        assert "rank_faults_target.py" in said
        assert "KeyError: 'a bug of mine'" in said


@pytest.mark.parametrize(
    "fault",
    [
        "bug",
        pytest.param("hang", marks=pytest.mark.slow),
        pytest.param("SIGKILL", marks=pytest.mark.slow),
        pytest.param("out of memory", marks=pytest.mark.slow),
        pytest.param("extra collective", marks=pytest.mark.slow),
    ],
)
def test_noise_ends_on_all_ranks(fault: str, tmp_path: Path) -> None:
    codes, said = run_ranks(tmp_path, NOISE, FAULT=fault)
    check(fault, 1, codes, said)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["bug", "hang", "SIGKILL"])
def test_tune_ends_on_all_ranks_whichever_fails(fault: str, tmp_path: Path) -> None:
    codes, said = run_ranks(tmp_path, TUNE, ranks=3, FAULT=fault, FAULT_RANK="0")
    if fault == "SIGKILL":  # rank 0 holds the store of ranks that no launcher started
        assert codes[1:] == [1, 1]
        assert len(re.findall("rank 0.* is gone|rank 0 died", said)) == 1
    else:
        check(fault, 0, codes, said)


@pytest.mark.slow
def test_several_ranks_that_see_one_die_say_so_once(tmp_path: Path) -> None:
    codes, said = run_ranks(tmp_path, NOISE, ranks=4, FAULT="SIGKILL", FAULT_RANK="2")
    check("SIGKILL", 2, codes, said)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["bug", "hang"])
@pytest.mark.parametrize("in_child", ["0", "1"])
def test_a_rank_that_fails_while_it_loads_ends_fit_on_all(fault: str, in_child: str, tmp_path: Path) -> None:
    codes, said = run_ranks(tmp_path, FIT, FAULT=fault, FAULT_PLACE="load", FAULT_IN_CHILD=in_child)
    check(fault, 1, codes, said)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "in_child"), [("0", "0"), ("1", "1")])
def test_a_hung_leader_and_a_hung_probe_end_fit_on_all(rank: str, in_child: str, tmp_path: Path) -> None:
    codes, said = run_ranks(tmp_path, FIT, FAULT="hang", FAULT_RANK=rank, FAULT_IN_CHILD=in_child)
    check("hang", int(rank), codes, said)
