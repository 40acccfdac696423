"""Ranks under one real torchrun: a worker file is run once for all tests that read what its ranks told."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]


def told_by_ranks(worker: Path, factory: pytest.TempPathFactory, *, ranks: int = 2) -> list[Any]:
    """Return what each rank wrote as JSON to the file of its number, in the folder it was given.

    Tests are dealt to several processes, each with fixtures of its own. They share a folder, and the first to come
    runs the worker while the others wait.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / f"{worker.parent.name}-{worker.stem}"
    with (shared / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            _run(worker, folder, ranks)
    files = [folder / str(rank) for rank in range(ranks)]
    assert all(file.exists() for file in files), f"{worker} failed in another process, which has its output"
    return [json.loads(file.read_text()) for file in files]


def _run(worker: Path, folder: Path, ranks: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(worker), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
