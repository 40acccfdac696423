"""The training scripts among the examples do what the commands at their top say: they are tuned, and they train."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("plain_loop", "trainer", "lightning_module", "ddp")
QUICK = "--limit 16 --steps 20 --skip estimate"


def commands(script: str) -> tuple[str, str]:
    """Return the two commands that a script gives at its top: to tune it, and to train."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{script}.py").read_text())) or ""
    tune, train = (line for line in text.splitlines() if f"examples/{script}.py" in line)
    return tune, train


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Type a command, in a folder that has the examples."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # One thread each: ranks and other tests share the cores.
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "script",
    [
        "plain_loop",
        "ddp",
        pytest.param("trainer", marks=pytest.mark.slow),
        pytest.param("lightning_module", marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_its_top_says(script: str, tmp_path: Path) -> None:
    _, train = commands(script)
    told = typed(train, tmp_path).stdout
    first, last = map(float, re.search(r"^loss ([\d.]+) at .* ([\d.]+) at the ", told, re.M).groups())  # type: ignore[union-attr]
    assert last < 0.8 * first
    assert re.search(r"^effective batch [\dx ]+ = \d+, [\d,]+ samples/s$", told, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_tuned_as_its_top_says(script: str, tmp_path: Path) -> None:
    tune, train = commands(script)
    told = typed(f"{tune} {QUICK}", tmp_path).stdout
    run = json.loads((tmp_path / "run.json").read_text())
    found = run["recommendation"]
    size, accumulation, devices = (found[name] for name in ("micro_batch", "accumulation", "devices"))
    assert told.startswith(f"micro-batch {size} x accumulation {accumulation} x devices {devices} = ")
    assert found["effective_batch"] == size * accumulation * devices
    assert found["seconds_per_step"] > 0
    assert found["best_effective_batch"] or not found["critical_batch"]
    assert run["fit"]["micro_batch"] == 16
    assert run["audit"]["exact"]
    assert devices == (2 if train.startswith("torchrun") else 1)
    assert found["learning_rate"]["at_batch"] == 64  # as the script says beside its own
