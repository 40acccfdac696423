"""Finders on several ranks: the workloads, the worker that torchrun starts, and what came of it.

    python benchmarks/fit.py ranks          minutes: every probe starts as many processes as there are ranks

Under torchrun with gloo, 2 and 4 ranks, DDP and FSDP2, a small MLP. Rank 1 has half of the others' budget. Killed: the
child of rank 1 ends itself with SIGKILL in its first step above 8 samples, while the others are in a collective;
seconds are those from there until the last rank has its answer. Beside it accelerate's decorator on two DDP ranks, of
which rank 1 runs out of memory in its first step above 32 samples; what is not done after 60 s counts as a hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WIDTH = 1024
MIB = 2**20
BUDGET_BYTES = 512 * MIB
SICK_RANK = 1
FITS_BEFORE_DEATH = 8
FITS_BEFORE_FULL = 32
TIME_OUT_SECONDS = 420.0
PEERS_TIME_OUT_SECONDS = 60.0
OURS = ("ddp", "fsdp", "ddp_killed", "fsdp_killed")
PEER = "accelerate"
# Where the worker says where to note the moment of death.
NOTES = "FIT_RANKS_NOTES"


# --- what the child ranks load


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def batch(n: int) -> torch.Tensor:
    return torch.randn(n, WIDTH)


def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(inputs).pow(2).mean()
    return result


def deadly_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    if os.environ.get("RANK") == str(SICK_RANK) and len(inputs) > FITS_BEFORE_DEATH:
        # No trace reaches this: it runs where the ranks search, and rank 0 does that.
        Path(os.environ[NOTES], "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(model, inputs)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model


def ddp(loss: Callable[..., torch.Tensor] = loss) -> bw.Workload:
    return bw.Workload(model=build, batch=batch, loss=loss, optimizer=adam, wrap=DistributedDataParallel)


def fsdp(loss: Callable[..., torch.Tensor] = loss) -> bw.Workload:
    return bw.Workload(model=build, batch=batch, loss=loss, optimizer=adam, wrap=sharded)


def ddp_killed() -> bw.Workload:
    return ddp(deadly_loss)


def fsdp_killed() -> bw.Workload:
    return fsdp(deadly_loss)


# --- one rank under torchrun


def work(folder: Path, cases: Sequence[str]) -> None:
    rank = int(os.environ["RANK"])
    os.environ[NOTES] = str(folder)
    for case in cases:
        start = time.time()
        try:
            told = _accelerate() if case == PEER else _ours(case, rank)
        except Exception as error:  # how it ends is its row
            told = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        ended = time.time()
        told["seconds"] = ended - start
        died = folder / "died"
        if case.endswith("killed") and died.exists():
            told["seconds_after_death"] = ended - float(died.read_text())
        scratch = folder / f"{case}.{rank}.part"
        scratch.write_text(json.dumps(told))
        scratch.rename(folder / f"{case}.{rank}")
        while case != PEER and len(list(folder.glob(f"{case}.[0-9]"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.1)
        if rank == 0:
            died.unlink(missing_ok=True)
    sys.stdout.flush()
    # A plain end would wait for ranks that are gone.
    os._exit(0)


def _ours(case: str, rank: int) -> dict[str, Any]:
    options: dict[str, Any] = {"memory": BUDGET_BYTES // 2 if rank == SICK_RANK else BUDGET_BYTES}
    if case.endswith("killed"):
        options = {"memory": BUDGET_BYTES, "start": FITS_BEFORE_DEATH, "limit": FITS_BEFORE_DEATH + 1}
    found = bw.fit(f"{Path(__file__).resolve()}:{case}", cache=False, **options)
    trials = [(trial.micro_batch, str(trial.verdict), trial.rule) for trial in found.trials]
    return {"answer": found.micro_batch, "next": found.next_size.why if found.next_size else "", "trials": trials}


def _accelerate() -> dict[str, Any]:
    from torch import distributed

    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = adam(model.parameters())

    def train(batch_size: int) -> int:
        for _ in range(2):
            inputs = batch(batch_size)
            if distributed.get_rank() == SICK_RANK and batch_size > FITS_BEFORE_FULL:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            loss(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    decorate = import_module("accelerate.utils").find_executable_batch_size
    answer: int = decorate(train, starting_batch_size=64)()
    return {"answer": answer}


# --- the launch


@dataclass(frozen=True)
class RanksRow:
    """One case on so many ranks."""

    case: str
    ranks: int
    answers: list[Any]
    seconds: float | None
    seconds_after_death: float | None = None
    trials: list[Any] = field(default_factory=list)
    note: str = ""

    @property
    def is_one_answer(self) -> bool:
        """Whether every rank answered, and the same."""
        return None not in self.answers and len(set(map(str, self.answers))) == 1


def launch(num_ranks: int, cases: Sequence[str], *, time_out: float) -> list[RanksRow]:
    script = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        log = (folder / "log").open("wb")
        launched = subprocess.Popen(
            [*command, str(script), name, *cases], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            launched.wait(timeout=time_out)
            ending = ""
        except subprocess.TimeoutExpired:
            ending = f"hangs: stopped after {time_out:.0f} s"
            launched.terminate()
            try:
                launched.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(launched.pid, signal.SIGKILL)
        log.close()
        rows = []
        for case in cases:
            paths = [folder / f"{case}.{rank}" for rank in range(num_ranks)]
            told = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
            rows.append(_row(case, num_ranks, told, ending))
        if launched.returncode and not ending:
            print((folder / "log").read_text()[-2000:], file=sys.stderr)
        return rows


def _row(case: str, num_ranks: int, told: Sequence[dict[str, Any]], ending: str) -> RanksRow:
    complete = all(told)
    after_death = [rank["seconds_after_death"] for rank in told if "seconds_after_death" in rank]
    return RanksRow(
        case=case,
        ranks=num_ranks,
        answers=[rank.get("answer", rank.get("error")) for rank in told],
        seconds=max(rank["seconds"] for rank in told) if complete else None,
        seconds_after_death=max(after_death, default=None),
        trials=told[0].get("trials", []),
        note=told[0].get("next", "") if complete else ending or "some rank said nothing",
    )


def run(note: Callable[[RanksRow], None]) -> list[RanksRow]:
    rows = []
    for num_ranks, cases, time_out in (
        (2, OURS, TIME_OUT_SECONDS),
        (2, (PEER,), PEERS_TIME_OUT_SECONDS),
        (4, OURS, TIME_OUT_SECONDS),
    ):
        for row in launch(num_ranks, cases, time_out=time_out):
            note(row)
            rows.append(row)
    return rows


def table_of(rows: Sequence[RanksRow]) -> list[list[str]]:
    table = [["case", "ranks", "answers", "one answer", "probes", "s", "s after the death", "next size"]]
    for row in rows:
        seconds = ["-" if s is None else f"{s:.1f}" for s in (row.seconds, row.seconds_after_death)]
        answers = ", ".join("none" if answer is None else str(answer)[:60] for answer in row.answers)
        agreed = "yes" if row.is_one_answer else "NO"
        table.append([row.case, str(row.ranks), answers, agreed, str(len(row.trials) or "-"), *seconds, row.note])
    return table


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
