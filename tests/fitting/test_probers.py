"""Ranks under a real torchrun with gloo: one answer for all, and no hang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, os, sys
from pathlib import Path
import batchwright as bw
answers = {}
for target in sys.argv[3:]:
    try:
        fit = bw.fit(f"{sys.argv[1]}:{target}", memory="256MiB", start=8, limit=9, cache=False)
        answers[target] = [fit.micro_batch, fit.ranks, fit.trials[-1].verdict, fit.trials[-1].rule]
    except bw.BatchwrightError as error:
        answers[target] = [type(error).__name__, str(error).splitlines()[-1]]
Path(sys.argv[2], os.environ["RANK"]).write_text(json.dumps(answers))
sys.stdout.flush(), os._exit(0)
"""


@pytest.mark.slow
def test_what_happens_on_one_rank_is_the_answer_of_all(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    targets = Path(__file__).with_name("targets.py")
    sick = ["ddp_out_of_memory_on_rank_1", "fsdp_dies_on_rank_1", "ddp_bug_on_rank_1"]
    done = subprocess.run(
        [*command, str(targets), str(tmp_path), *sick], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert first == second
    assert first == {
        "ddp_out_of_memory_on_rank_1": [8, 2, "out_of_memory", "torch-out-of-memory-error"],
        "fsdp_dies_on_rank_1": [8, 2, "out_of_memory", "killed"],
        "ddp_bug_on_rank_1": ["StepFailedError", "KeyError: 'a bug on one rank'"],
    }
