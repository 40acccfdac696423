"""What each rank of the tests of callbacks does: the same problem under all three frameworks, and what they found."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from batchwright.integrations.lightning import BatchwrightCallback as LightningCallback
from batchwright.integrations.transformers import BatchwrightCallback as TrainerCallback
from tests.integrations.watched_training import (
    Module,
    trained_by_accelerate,
    trained_by_lightning,
    trained_by_transformers,
)
from tests.noise.regression import seen_by

NUMBER, STEPS = 4, 8


class Rows:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append([step, metrics])


def told_by(callback: Any, tracker: Rows, said: list[str], losses: Any, bare: Any) -> dict[str, Any]:
    return {
        "seen": seen_by(callback.noise),
        "metrics": callback.metrics,
        "logged": tracker.rows,
        "said": said,
        "notes": callback.notes,
        "same losses": losses == bare,
    }


def by_transformers(folder: Path) -> dict[str, Any]:
    tracker, said = Rows(), list[str]()
    callback = TrainerCallback(tracker=tracker, window=10**9, say=said.append)
    runs = [trained_by_transformers(folder, NUMBER, each, steps=STEPS) for each in ([callback], [])]
    losses, bare = ([row["loss"] for row in run.state.log_history if "loss" in row] for run in runs)
    return {**told_by(callback, tracker, said, losses, bare), "log": runs[0].state.log_history}


def by_lightning(folder: Path) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tracker, said = Rows(), list[str]()
    callback = LightningCallback(tracker=tracker, window=10**9, say=said.append)
    losses: list[list[float]] = []
    for each in ([callback], []):
        module = Module(NUMBER, rank=rank, ranks=ranks, steps=STEPS)
        options = {"devices": ranks, "strategy": "ddp", "logger": CSVLogger(str(folder), version=f"{len(losses)}")}
        trained_by_lightning(folder, module, NUMBER // ranks, each, **options)
        losses.append(module.losses)
    return told_by(callback, tracker, said, *losses)


def by_accelerate() -> dict[str, Any]:
    tracker, said = Rows(), list[str]()
    _, watched, losses = trained_by_accelerate(
        NUMBER, steps=STEPS, tracker=tracker, log_every=2, window=10**9, say=said.append
    )
    bare = trained_by_accelerate(NUMBER, steps=STEPS, is_watched=False)[2]
    return told_by(watched, tracker, said, losses, bare)


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    told = {"transformers": by_transformers(Path(folder, "transformers"))}
    told["accelerate"] = by_accelerate()
    told["lightning"] = by_lightning(Path(folder, "lightning"))
    Path(folder, str(dist.get_rank())).write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # torch's own teardown of gloo aborts at times, after all is done


if __name__ == "__main__":
    main(sys.argv[1])
