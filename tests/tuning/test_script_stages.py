"""tune on an unmodified program: every stage runs it, and the answer is a command line."""

from __future__ import annotations

import shlex
from textwrap import dedent
from typing import TYPE_CHECKING

import batchwright as bw

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
    import argparse, torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--grad-accum", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(512, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(1000):
        for index, (x, y) in enumerate(loader):
            ((model(x) - y).pow(2).mean() / args.grad_accum).backward()
            if (index + 1) % args.grad_accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


def test_every_stage_measures_the_program_itself_and_the_answer_is_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(PROGRAM))
    tuned = bw.tune(bw.Script(["train.py"], cwd=tmp_path), on="cpu", limit=64, steps=60)
    advised = tuned.run["recommendation"]
    typed = shlex.split(advised["command"])
    assert typed[typed.index("--batch-size") + 1] == str(advised["micro_batch"])
    assert typed[typed.index("--grad-accum") + 1] == str(advised["accumulation"])
    assert f"type: {advised['command']}" in str(tuned)
    run = tuned.run
    about = run["workload"]
    assert (about["optimizer"], about["learning_rate"], about["samples"], about["num_trained"]) == (
        *("AdamW", 1e-3),
        *(512, 17),
    )
    assert run["fit"]["micro_batch"] == 64
    assert [row["micro_batch"] for row in run["throughput"]["rows"]][-1] == 64
    assert run["audit"]["exact"]
    assert run["noise"]["effective_batch"] == 64
    assert "traced" in run["estimate"]["skipped"]
