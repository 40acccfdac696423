"""Every way that `NoiseScale` gets at gradients, against gradients made one by one: in one process, or as a rank.

The model is a small transformer that trains with SGD. Before each step the weights are copied, and the oracle of the
tests (tests/oracle/noise_by_hand.py) makes the gradient of every part anew from the copy, in fp64. The error of T is
relative to the oracle's T; that of |G|^2, which may pass through 0, to the square of the mean gradient that it is
calculated from.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from batchwright.accumulate.accumulator import Accumulator
from batchwright.noise.noise_scale import NoiseScale

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS, WIDTH, VOCAB, LENGTH = 6, 16, 29, 8
LENGTHS = (4, 9, 6, 12, 5, 7, 11, 3)
RAGGED = (3, 1, 2, 4, 2, 5, 1, 2)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend causally with one head, then transform."""
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        added: torch.Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return added


def make_model(dtype: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Embedding(VOCAB, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCAB)]
        return nn.Sequential(*layers).to(DTYPES[dtype])


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def count_tokens(tokens: torch.Tensor) -> int:
    return tokens[:, 1:].numel()


@dataclass(frozen=True)
class Case:
    """A way to get at gradients: the samples of each micro-batch of a step, over all ranks."""

    name: str
    sizes: tuple[int, ...]
    loop: str = "accumulator"
    counts_tokens: bool = False


def cases_of(ranks: int) -> list[Case]:
    if ranks == 1:
        return [
            Case("Accumulator, m = 2", (8,) * 2),
            Case("Accumulator, m = 4", (4,) * 4),
            Case("Accumulator, m = 8", (2,) * 8),
            Case("Accumulator, m = B", (1,) * 16),
            Case("Accumulator, ragged", RAGGED),
            Case("Accumulator, weights in tokens", (2,) * 8, counts_tokens=True),
            Case("own loop, m = 4", (4,) * 4, "own"),
            Case("per example, Accumulator", (16,)),
            Case("per example, own loop", (16,), "own"),
        ]
    number = 2 * ranks
    return [
        Case("one micro-batch each", (4,) * ranks),
        Case("two each", (4,) * number),
        Case("two each, ragged", RAGGED[:number]),
        Case("two each, weights in tokens", (2,) * number, counts_tokens=True),
        Case("own loop, two each", (4,) * number, "own"),
    ]


def parts_of(case: Case, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    lengths = [LENGTHS[i % len(LENGTHS)] if case.counts_tokens else LENGTH for i in range(len(case.sizes))]
    shapes = zip(case.sizes, lengths, strict=True)
    return [torch.randint(0, VOCAB, (size, length + 1), generator=generator) for size, length in shapes]


def spread(model: nn.Sequential, kind: str) -> Any:
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def wanted_of(model: Any, case: Case, parts: Sequence[torch.Tensor], *, by_example: bool) -> tuple[float, ...]:
    """Return T, |G|^2 and |mean g|^2 by the oracle, at the weights as they are now."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.oracle.noise_by_hand import observe_by_hand

    twin = make_model("fp64")
    whole: Any = model.module if isinstance(model, DistributedDataParallel) else model
    for mine, theirs in zip(twin.parameters(), whole.parameters(), strict=True):
        value = theirs.detach()
        mine.data.copy_(value.full_tensor() if hasattr(value, "full_tensor") else value)
    if by_example:
        parts = [row[None] for part in parts for row in part]
    sizes = [count_tokens(part) if case.counts_tokens else len(part) for part in parts]
    trace, signal = observe_by_hand(twin, loss_of, parts, sizes)
    return trace, signal, signal + trace / sum(sizes)


def run(case: Case, kind: str, dtype: str) -> dict[str, Any]:
    """Train a few steps; return the largest errors, and what the critical batch came to."""
    rank, ranks = (0, 1) if kind == "one process" else (dist.get_rank(), dist.get_world_size())
    model = spread(make_model(dtype), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = len(case.sizes) // ranks
    if case.loop == "own":
        noise = NoiseScale(model, optimizer=optimizer, micro_batch=case.sizes[0])
    else:
        accumulator = Accumulator(model, optimizer, mine)
        noise = NoiseScale(accumulator, unit="tokens" if case.counts_tokens else "samples")
    wanted = []
    for step in range(STEPS):
        parts = parts_of(case, step)
        # In a loop of one's own, nothing tells before the first step that there will be a second backward.
        by_example = ranks == 1 and (mine == 1 or (case.loop == "own" and step == 0))
        wanted.append(wanted_of(model, case, parts, by_example=by_example))
        batches = parts[rank::ranks]
        if case.loop == "own":
            own_step(model, optimizer, batches, kind)
            continue
        for batch in accumulator.micro_batches(batches, count_tokens if case.counts_tokens else None):
            accumulator.backward(loss_of(model, batch))
    kept = noise.state_dict()["track"]["kept"]
    found = [(sum(one["traces"]), sum(one["signals"])) for one in kept]
    assert not [*noise.notes, *noise.skipped], (noise.notes, noise.skipped)
    pairs = list(zip(found, wanted, strict=True))
    said = noise.critical_batch
    assert said is not None
    return {
        "path": case.name,
        "kind": kind,
        "ranks": ranks,
        "dtype": dtype,
        "trace": max(abs(f[0] / w[0] - 1) for f, w in pairs),
        "signal": max(abs(f[1] - w[1]) / w[2] for f, w in pairs),
        "critical_batch": [said.trace, said.signal, said.value, said.low],
    }


def own_step(model: Any, optimizer: Any, batches: Sequence[torch.Tensor], kind: str) -> None:
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        if kind == "FSDP2":
            model.set_requires_gradient_sync(is_last)
        with model.no_sync() if kind == "DDP" and not is_last else contextlib.nullcontext():
            (loss_of(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def from_one_process(row: dict[str, Any]) -> float:
    """Return how far ranks are from one process on the same data: T, |G|^2, their ratio and its lower end."""
    case = next(case for case in cases_of(row["ranks"]) if case.name == row["path"])
    # A loop of one's own looks at its first step example by example where it is alone.
    alone = run(Case(case.name, case.sizes, counts_tokens=case.counts_tokens), "one process", row["dtype"])
    pairs = zip(row["critical_batch"], alone["critical_batch"], strict=True)
    return max([abs(mine - theirs) / abs(theirs) for mine, theirs in pairs if mine != theirs], default=0.0)


def launched(ranks: int) -> list[dict[str, Any]]:
    """Run the cases of ranks under torchrun; all ranks must tell the same."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, folder], check=True, env=environment, capture_output=True)
        told: list[list[dict[str, Any]]] = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    assert all([row["critical_batch"] for row in each] == [row["critical_batch"] for row in told[0]] for each in told)
    return told[0]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = cases_of(dist.get_world_size())
    rows = [run(case, kind, dtype) for kind in ("DDP", "FSDP2") for dtype in DTYPES for case in cases]
    Path(folder, str(dist.get_rank())).write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # torch's own teardown of gloo aborts at times, after all is done


if __name__ == "__main__":
    main(sys.argv[1])
