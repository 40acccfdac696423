"""The peers of benchmarks/fit.py behind one interface: a task goes in, the size they answer comes out.

Where a peer has a setting that costs it exactness or time and nothing else, the row has it in the peer's favour and
its name says so. What a peer raises is let through: it is its result.

- accelerate and toma only shrink, so they also get a large start. They run two steps per call: Adam makes its moments
  in the first, and a finder that comes from above has run none before.
- lightning gets `max_val` and `max_trials` high enough to succeed, and a DataLoader that makes a whole batch at once.
  It still ends at 8192: lightning 2.6.6 hands its max_val on only where a trial of binsearch succeeded.
- batch-finder knows models, not steps: it gets a module whose forward is the whole training step. With `model only` it
  gets what its documentation asks for, the model and the shape of its input; it then runs no loss and no optimizer.
  Its 0.75 s of sleep between attempts are taken out, and so is the child process in which it reads a signature.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fit_cells import Live

STEPS_PER_CALL = 2


@dataclass(frozen=True)
class Task:
    """What a finder may use: a training step of n samples, or its parts."""

    step: Callable[[int], None]
    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    build: Callable[[], nn.Module] | None = None
    """Builds the model anew, for a finder that wants its own."""
    large: int = 8192
    """A start above every answer, for finders that only shrink."""
    steps_per_call: int = STEPS_PER_CALL

    @classmethod
    def of(cls, live: Live, build: Callable[[], nn.Module]) -> Task:
        """Make the task of a live model."""
        return cls(live.step, live.model, live.batch, live.loss, live.optimizer, build)


@dataclass(frozen=True)
class Peer:
    """One row of the tables: how it is called and the module whose import is no part of its time."""

    name: str
    find: Callable[[Task], int | None]
    module: str
    in_sweep: bool = True
    in_budgets: bool = True
    """Where not, still there when it is named."""


def accelerate(start: int | None = None) -> Callable[[Task], int]:
    def find(task: Task) -> int:
        decorate = import_module("accelerate.utils").find_executable_batch_size

        def train(batch_size: int) -> int:
            for _ in range(task.steps_per_call):
                task.step(batch_size)
            return batch_size

        found: int = decorate(train, starting_batch_size=start or task.large)()
        return found

    return find


def toma(task: Task) -> int:
    def train(batch_size: int) -> int:
        for _ in range(task.steps_per_call):
            task.step(batch_size)
        return batch_size

    found: int = import_module("toma").simple.batch(train, task.large)
    return found


class MadeAtOnce(torch.utils.data.Dataset[Any]):
    """A dataset without end in sight that makes the batch a DataLoader asks for in one go."""

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, index: int) -> Any:
        return self._batch(1)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a whole batch; torch's loader prefers this to one sample after the other."""
        return self._batch(len(indices))


def as_it_is(batch: Any) -> Any:
    return batch


def lightning_module(task: Task) -> Any:
    base: Any = import_module("lightning.pytorch").LightningModule

    class Training(base):  # type: ignore[misc]
        """The task, as Lightning wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = task.model
            # Its first value to try: the first trial runs with what is set here, whatever Lightning says it tries.
            self.batch_size = 2

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            """Return the loss; Lightning does the rest."""
            return task.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return the task's own optimizer."""
            return task.optimizer

        def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
            """Return a loader of the size that is being tried."""
            dataset = MadeAtOnce(task.batch)
            return torch.utils.data.DataLoader(dataset, batch_size=self.batch_size, collate_fn=as_it_is)

    return Training()


def lightning(mode: str, **settings: Any) -> Callable[[Task], int | None]:
    def find(task: Task) -> int | None:
        pl, tuning = import_module("lightning.pytorch"), import_module("lightning.pytorch.tuner")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                default_root_dir=folder,
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            tuner, module = tuning.Tuner(trainer), lightning_module(task)
            found: int | None = tuner.scale_batch_size(module, mode=mode, max_val=2**24, max_trials=100, **settings)
            return found

    return find


class WholeStep(nn.Module):
    """A module whose forward trains a task once, on as many samples as the input has rows."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._step = task.step

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Train, and return what can be differentiated without effect."""
        self._step(len(rows))
        return rows.sum()


def batch_finder(task: Task) -> int | None:
    shape = import_module("batch_finder").find_max_minibatch(
        lambda: WholeStep(task), input_shapes=(-1, 1), device=torch.device("cpu"), delay=0.0, use_subprocess=False
    )
    return int(shape[0]) if shape else None


def batch_finder_model_only(task: Task) -> int | None:
    assert task.build is not None
    example = task.batch(2)
    inputs = example[0] if isinstance(example, tuple) else example
    shape = import_module("batch_finder").find_max_minibatch(
        task.build,
        input_shapes=(-1, *inputs.shape[1:]),
        # Its rule: a name with "ids" in it is for integers below 1000, any other for floats.
        forward_params=None if inputs.is_floating_point() else ["ids"],
        device=torch.device("cpu"),
        delay=0.0,
        use_subprocess=False,
    )
    return int(shape[0]) if shape else None


PEERS = (
    Peer("accelerate, start 128 (default)", accelerate(128), "accelerate.utils"),
    Peer("accelerate, large start", accelerate(), "accelerate.utils"),
    Peer("lightning power", lightning("power"), "lightning.pytorch"),
    # The same search as the next one, three times as long, less 5 % at the end.
    Peer("lightning binsearch", lightning("binsearch"), "lightning.pytorch", in_budgets=False),
    Peer(
        "lightning binsearch, margin 0, 1 step",
        lightning("binsearch", margin=0.0, steps_per_trial=1),
        "lightning.pytorch",
    ),
    Peer("toma, large start", toma, "toma"),
    Peer("batch-finder, no sleep", batch_finder, "batch_finder"),
    # Another question than that of the others, so only when it is asked for.
    Peer(
        "batch-finder, no sleep, model only",
        batch_finder_model_only,
        "batch_finder",
        in_sweep=False,
        in_budgets=False,
    ),
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what peers print off the tables."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
