"""A workload that fails on one rank, as the environment says; loaded by rank_faults.py and by tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw

FAULT, PLACE = os.environ.get("FAULT", "none"), os.environ.get("FAULT_PLACE", "loss")
SICK = os.environ.get("RANK") == os.environ.get("FAULT_RANK", "1")
IN_CHILD = any("batchwright.fitting.probe_process" in word for word in sys.orig_argv)


def maybe_fail(place: str) -> None:
    """Fail where that was asked for; note when, so that the seconds until the verdict can be told."""
    if not SICK or place != PLACE or (os.environ.get("FAULT_IN_CHILD") == "1") != IN_CHILD:
        return
    if marker := os.environ.get("FAULT_MARKER"):
        Path(marker).write_text(str(time.time()))
    if FAULT == "bug":
        raise KeyError("a bug of mine")
    if FAULT == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if FAULT == "hang":
        time.sleep(1e6)
    if FAULT == "extra collective" and dist.is_initialized():
        dist.barrier()
    if FAULT == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "exit":
        os._exit(5)


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Fail, or be an ordinary loss."""
    maybe_fail("loss")
    found: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
    return found


def workload() -> bw.Workload:
    """Return a small regression under DDP."""
    maybe_fail("load")
    return bw.Workload(
        model=lambda: torch.nn.Linear(8, 1),
        batch=lambda n: torch.randn(n, 8),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        wrap=DistributedDataParallel,
    )
