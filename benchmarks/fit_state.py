"""What finders leave behind: a hash of everything before and after, for each place at which a probe can fail.

    python benchmarks/fit.py state          about two minutes

The live objects are a model with dropout and two BatchNorms (one frozen in eval mode), Adam with moments from three
steps, a GradScaler, a scheduler, gradients that were left there, and torch's, numpy's and Python's random state. Above
8 samples the step fails for real: torch asks its allocator for 256 TiB, a KeyError, or SIGINT sent to the process. In
the row of the first optimizer step Adam is given further layers of which it has no moments yet, under a budget that
ends in the middle of making them; how many it had made is said. Values and identity count: the same tensor objects in
the same storage.

The peers get the same objects as a plain step (lightning: its parts), without a scheduler, and only those places they
can reach.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fit_child import first_line
from fit_peers import PEERS, Task, quiet
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import batchwright as bw
from batchwright.device.host import live_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

WIDTH = 64
LATE_WIDTH = 2048
LIMIT = 8
TIME_OUT_SECONDS = 60
LARGEST = 4096
MIB = 2**20
OUT_OF_MEMORY, BUG, INTERRUPT = "out of memory", "bug", "interrupt"
FIRST_STEP = "out of memory, first optimizer step"
POINTS = {
    "none: the limit is reached": ("", ""),
    "out of memory, data loading": (OUT_OF_MEMORY, "data"),
    "out of memory, forward": (OUT_OF_MEMORY, "forward"),
    "out of memory, backward": (OUT_OF_MEMORY, "backward"),
    FIRST_STEP: ("", ""),
    "out of memory, generation": (OUT_OF_MEMORY, "generation"),
    "a bug, forward": (BUG, "forward"),
    "a bug, backward": (BUG, "backward"),
    "an interrupt, forward": (INTERRUPT, "forward"),
    "an interrupt, backward": (INTERRUPT, "backward"),
    "an interrupt, generation": (INTERRUPT, "generation"),
}
PLACES_OF_LIGHTNING = ("data", "forward", "backward")
SEARCHES = (
    "accelerate, large start",
    "lightning power",
    "lightning binsearch",
    "toma, large start",
    "batch-finder, no sleep",
)


@dataclass
class Fault:
    """Fails for real at one place of a step, above the limit."""

    kind: str
    place: str
    times: int = 0

    def at(self, place: str, seen: torch.Tensor) -> None:
        """Fail here, if this is the place; never in a trace, which runs nothing."""
        if place != self.place or len(seen) <= LIMIT or isinstance(seen, FakeTensor):
            return
        self.times += 1
        if self.kind == OUT_OF_MEMORY:
            torch.empty(2**46)
        if self.kind == INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)
        raise KeyError("a bug of mine")


class InBackward(torch.autograd.Function):
    """Does nothing, and in the backward meets the fault."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, fault: Fault) -> torch.Tensor:
        """Return what came in."""
        ctx.fault = fault
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return what came in, or fail."""
        ctx.fault.at("backward", gradients[0])
        return gradients[0], None


class Net(nn.Module):
    """Dropout, BatchNorm, and layers that may join the training later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.late = nn.ModuleList()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one value per feature."""
        hidden: torch.Tensor = self.second(self.first(inputs))
        for layer in self.late:
            hidden = layer(hidden.repeat(1, LATE_WIDTH // WIDTH))[:, :WIDTH]
        return hidden


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Sixty-four of them, made as they are asked for."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(WIDTH) + random.random() + np.random.rand()


class Scene:
    """Live objects in the middle of a training, and a step of n samples that meets a fault."""

    def __init__(self, fault: Fault, *, with_late_layers: bool = False) -> None:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        self.fault = fault
        self.model = Net().train()
        self.model.second[1].eval()
        self.moments_at_failure: list[tuple[int, int]] = []
        self.optimizer = self._adam(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        for _ in range(3):
            self.train(self.batch(4), keep_gradients=True)
            self.scheduler.step()
        if with_late_layers:
            self.model.late.extend(nn.Linear(LATE_WIDTH, LATE_WIDTH, bias=False) for _ in range(4))
            self.optimizer.add_param_group({"params": list(self.model.late.parameters())})

    def _adam(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        told = self.moments_at_failure

        class Told(torch.optim.Adam):
            """Adam that tells how far it was when it failed."""

            def step(self, closure: Any = None) -> Any:
                """Step, or say with how many entries of how many it ended."""
                try:
                    return super().step(closure)
                except RuntimeError:
                    made = sum(len(state) for state in self.state.values())
                    told.append((made, 3 * sum(len(group["params"]) for group in self.param_groups)))
                    raise

        return Told(parameters, lr=1e-3)

    def batch(self, n: int) -> torch.Tensor:
        """Make n samples with every generator there is."""
        if n > LARGEST:
            raise TakesTooLongError(f"went on to {n} samples")
        made = torch.rand(n, WIDTH) + random.random() + np.random.rand()
        self.fault.at("data", made)
        return made

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        """Put samples of the dataset together."""
        made = torch.stack(samples)
        self.fault.at("data", made)
        return made

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Run the forward, where a fault may wait, and lay one into the backward."""
        hidden: torch.Tensor = InBackward.apply(model(batch), self.fault)  # type: ignore[no-untyped-call]
        self.fault.at("forward", hidden)
        return hidden.pow(2).mean()

    def generate(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Run forward twice, without gradients."""
        once: torch.Tensor = model(batch)
        self.fault.at("generation", once)
        again: torch.Tensor = model(once)
        return again

    def train(self, batch: torch.Tensor, *, keep_gradients: bool = False) -> None:
        """Train once."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(self.model, batch)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if not keep_gradients:
            self.optimizer.zero_grad()

    def step(self, n: int) -> None:
        """Train once and generate, as a user's own function does."""
        batch = self.batch(n)
        self.train(batch)
        with torch.no_grad():
            self.generate(self.model, batch)

    def workload(self) -> bw.Workload:
        """Hand the live objects over; data comes through a DataLoader where the fault is in loading it."""
        told: dict[str, Any] = {"batch": self.batch}
        if self.fault.place == "data":
            told = {"data": Samples(), "collate": self.collate}
        if self.fault.place == "generation":
            told["generate"] = self.generate
        return bw.Workload(
            model=self.model, loss=self.loss, optimizer=lambda _: self.optimizer, scaler=lambda: self.scaler, **told
        )

    def hashes(self) -> dict[str, str]:
        """Return a hash of each kind of state: values, and which tensors in which storage hold them."""
        parameters = list(self.model.parameters())
        numbers = np.random.get_state(legacy=False)
        kinds: dict[str, Any] = {
            "weights": parameters,
            "buffers": list(self.model.buffers()),
            "gradients": [p.grad for p in parameters],
            "optimizer": [[(id(p), self.optimizer.state.get(p)) for p in parameters], self.optimizer.param_groups],
            "scaler": self.scaler.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": [torch.get_rng_state().tolist(), random.getstate(), numbers],
            "modes": [module.training for module in self.model.modules()],
        }
        return {kind: _hash(value) for kind, value in kinds.items()}


def _hash(value: Any) -> str:
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            digest.update(repr((id(part), part.data_ptr(), part.dtype, part.shape, part.requires_grad)).encode())
            digest.update(part.detach().contiguous().numpy().tobytes())
        elif isinstance(part, np.ndarray):
            digest.update(part.tobytes())
        elif isinstance(part, dict):
            for key, inner in part.items():
                digest.update(str(key if isinstance(key, str) else id(key)).encode())
                add(inner)
        elif isinstance(part, list | tuple):
            digest.update(f"{type(part).__name__} {len(part)}".encode())
            for inner in part:
                add(inner)
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()


@dataclass(frozen=True)
class StateRow:
    """One finder at one place."""

    finder: str
    point: str
    ending: str
    failures: int
    changed: list[str] = field(default_factory=list)
    moments: str = ""


class TakesTooLongError(BaseException):
    """Passes through what catches every `Exception`."""


def _stop(*_: object) -> None:
    raise TakesTooLongError(f"stopped after {TIME_OUT_SECONDS} s")


def _observe(name: str, point: str, scene: Scene, find: Callable[[], Any]) -> StateRow:
    before = scene.hashes()
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(TIME_OUT_SECONDS)
    try:
        with quiet():
            ending = str(find())
    except BaseException as error:  # how it ends is its row, and an interrupt is one of the ends
        ending = first_line(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    after = scene.hashes()
    changed = [kind for kind, hashed in before.items() if after[kind] != hashed]
    failures = scene.fault.times or len(scene.moments_at_failure)
    told = ", ".join(f"{made} of {entries}" for made, entries in sorted(set(scene.moments_at_failure)))
    return StateRow(name, point, ending, failures, changed, told)


def _ours(scene: Scene) -> int | None:
    return bw.fit(scene.workload(), limit=2 * LIMIT, cache=False).micro_batch


def _ours_plain(scene: Scene) -> int | None:
    return bw.fit(scene.step, limit=2 * LIMIT, state=[scene.scheduler], cache=False).micro_batch


def _ours_first_step(scene: Scene) -> int | None:
    held = live_bytes([scene.model, scene.optimizer])
    # Gradients of the late layers are 64 MiB and their moments 128: the budget has room for about half of these.
    return bw.fit(scene.workload(), memory=held + 150 * MIB, limit=2 * LIMIT, cache=False).micro_batch


def run_ours() -> Iterator[StateRow]:
    for point, (kind, place) in POINTS.items():
        is_first_step = point == FIRST_STEP
        finders: list[tuple[str, Callable[[Scene], Any]]] = [
            ("batchwright, Workload", _ours_first_step if is_first_step else _ours)
        ]
        if not is_first_step:
            finders.append(("batchwright, plain step", _ours_plain))
        for name, find in finders:
            scene = Scene(Fault(kind, place), with_late_layers=is_first_step)
            yield _observe(name, point, scene, partial(find, scene))


def run_peers(is_chosen: Callable[[str], bool]) -> Iterator[StateRow]:
    # One row of each search; settings make no difference here.
    for peer in (peer for peer in PEERS if is_chosen(peer.name) and peer.name in SEARCHES):
        import_module(peer.module)
        for point, (kind, place) in POINTS.items():
            if not place or ("lightning" in peer.name and place not in PLACES_OF_LIGHTNING):
                continue
            scene = Scene(Fault(kind, place))
            task = Task(
                step=scene.step,
                model=scene.model,
                batch=scene.batch,
                loss=scene.loss,
                optimizer=scene.optimizer,
                large=4 * LIMIT,
            )
            yield _observe(peer.name, point, scene, partial(peer.find, task))


def table_of(rows: Sequence[StateRow]) -> list[list[str]]:
    table = [["finder", "failure", "times", "ended in", "equal", "changed"]]
    for row in rows:
        ending = row.ending + (f" (entries of Adam's state at the failure: {row.moments})" if row.moments else "")
        equal = "no" if row.changed else "yes"
        table.append([row.finder, row.point, str(row.failures), ending[:110], equal, ", ".join(row.changed) or "-"])
    return table
