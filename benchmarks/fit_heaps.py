"""How much more a later process takes than a probe of `fit` saw, on models that no cell of benchmarks/fit.py has.

    python benchmarks/fit_heaps.py [--processes 5]

A probe runs two steps in a fresh child. A training process imports other things, builds its model at another place of
the heap and runs more steps. For each model: the peak that a probe states beyond the model's own tensors, in several
fresh processes, and the peak of seven plain steps beyond what is held once the model is built, in several others. What
is printed is how much the second exceeds the first, in MiB: the median, and the largest against the smallest. It is the
ground for what a probe under a byte budget holds back (device/limited_host.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from batchwright.device.host import PINNED_ENVIRONMENT, PeakWatch
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20
STEPS = 7


class Tagger(nn.Module):
    """A GRU over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(500, 48), nn.GRU(48, 48, batch_first=True), nn.Linear(48, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        logits: torch.Tensor = self.head(self.gru(self.embed(ids))[0])
        return logits


class Bag(nn.Module):
    """A mean of embeddings and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20_000, 64)
        self.layers = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return one row of logits per bag."""
        logits: torch.Tensor = self.layers(self.bag(ids))
        return logits


def narrow() -> nn.Module:
    layers = [layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 3))


def up_and_down() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, 1), nn.GroupNorm(3, 12), nn.SiLU(), nn.ConvTranspose2d(12, 6, 2, 2), nn.Conv2d(6, 3, 1)
    )  # fmt: skip


def waves() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv1d(before, after, 9, stride=2, padding=4), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, 4))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 3000), nn.ReLU(), nn.Linear(3000, 3000), nn.ReLU(), nn.Linear(3000, 1))


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def tagged(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 20)


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # type: ignore[arg-type]


def ids(num_tokens: int, vocabulary: int) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randint(0, vocabulary, (n, num_tokens))


def noise(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randn(n, *shape)


MODELS: dict[str, tuple[Workload, int]] = {
    "GRU tagger": (Workload(model=Tagger, batch=ids(40, 500), loss=tagged, optimizer=adamw), 900),
    "embedding bag": (Workload(model=Bag, batch=ids(32, 20_000), loss=mean_square, optimizer=adamw), 3000),
    "narrow, deep": (Workload(model=narrow, batch=noise(64), loss=mean_square, optimizer=momentum), 5000),
    "down and up": (Workload(model=up_and_down, batch=noise(3, 48, 48), loss=mean_square, optimizer=adamw), 400),
    "1d convolutions": (Workload(model=waves, batch=noise(1, 800), loss=mean_square, optimizer=momentum), 900),
    "wide layers": (Workload(model=wide, batch=noise(256), loss=mean_square, optimizer=adamw), 700),
}


def probe(workload: Workload, n: int) -> int:
    """Return the peak that a probe states, beyond parameters and buffers."""
    from batchwright.device.host import LimitedHost

    outcome = LimitedHost(2**34).probe(workload, n)
    assert outcome.peak_bytes is not None
    assert outcome.peak_bytes.device is not None
    return outcome.peak_bytes.device - _model_bytes(_built(workload))


def train(workload: Workload, n: int) -> int:
    """Return the peak of some plain steps, beyond what is held once model and optimizer are built."""
    model = _built(workload)
    assert workload.optimizer
    assert workload.batch
    assert workload.loss
    optimizer = workload.optimizer(model.parameters())
    with PeakWatch() as watch:
        for _ in range(STEPS):
            workload.loss(model, workload.batch(n)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return watch.peak_bytes() - watch.bytes_before


def _built(workload: Workload) -> nn.Module:
    return workload.model if isinstance(workload.model, nn.Module) else workload.model()


def _model_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


KINDS: dict[str, Callable[[Workload, int], int]] = {"probe": probe, "train": train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        torch.set_num_threads(2)
        kind, name = chosen.one
        print(KINDS[kind](*MODELS[name]))
        return

    def measure(job: tuple[str, str]) -> float:
        command = [sys.executable, __file__, "--one", *job]
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, **PINNED_ENVIRONMENT}
        )
        return int(run.stdout) / MIB

    print("| model | probe states | median later | largest - smallest |\n|---|---:|---:|---:|")
    worst = -1e9
    with ThreadPoolExecutor(2) as pool:
        for name in MODELS:
            probes = list(pool.map(measure, [("probe", name)] * chosen.processes))
            later = list(pool.map(measure, [("train", name)] * chosen.processes))
            differs = max(later) - min(probes)
            worst = max(worst, differs)
            middle = statistics.median(later) - statistics.median(probes)
            print(f"| {name} | {statistics.median(probes):.1f} | {middle:+.2f} | {differs:+.2f} |", flush=True)
    print(f"\nmost that a later process took beyond a probe: {worst:.2f} MiB")


if __name__ == "__main__":
    main()
