"""`untouched`: nothing of the user's is changed by asking, whatever is asked and however it ends."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import io
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import batchwright as bw
from batchwright.device.batches import make_batch
from batchwright.device.step import build_model, build_optimizers, build_scaler
from batchwright.errors import CannotTraceError
from batchwright.noise.noise_run import measure_noise
from batchwright.state.process_state import uninterrupted
from batchwright.state.untouched import untouched
from batchwright.tuning.stages import measure_throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
    return loss


class Counting(nn.Module):
    """Counts its forwards in a buffer."""

    forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count one more."""
        self.forwards += 1
        return x


class Live:
    """Live objects in the middle of training, and a step that changes every one of them."""

    def __init__(self, *, by_function: bool) -> None:
        self.model = nn.Sequential(nn.Linear(8, 4), Counting(), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.shadow = {"bias": torch.zeros(1)}
        self.steps_seen = torch.zeros(())
        self.optimizer.register_step_post_hook(self.after_step)
        for _ in range(2):
            self.loss(self.model, torch.randn(4, 8)).backward()
            self.optimizer.step()
        self.model.eval()
        self.workload = bw.Workload(
            model=(lambda: self.model) if by_function else self.model,
            batch=lambda n: torch.randn(n, 8),
            loss=self.loss,
            optimizer=lambda params: self.optimizer,
            scaler=lambda: self.scaler,
        )

    def after_step(self, *_: Any) -> None:
        self.shadow["bias"] += 1

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.steps_seen += 1
        self.average.update_parameters(model)
        if self.optimizer.state:
            self.scheduler.step()
        return mean_square(model, batch)

    def state(self) -> dict[str, Any]:
        parameters = list(self.model.parameters())
        return {
            "weights": [value.clone() for value in self.model.state_dict().values()],
            "gradients": [parameter.grad.clone() for parameter in parameters if parameter.grad is not None],
            "average": [value.clone() for value in self.average.state_dict().values()],
            "optimizer": str(self.optimizer.state_dict()),
            "hooks": [len(self.optimizer._optimizer_step_post_hooks), [p._backward_hooks for p in parameters]],
            "holds": [id(parameter) for parameter in self.optimizer.state],
            "scheduler": {k: v for k, v in self.scheduler.state_dict().items() if not callable(v)},
            "scaler": [self.scaler._scale, str(self.scaler.state_dict())],
            "held": [self.shadow["bias"].clone(), self.steps_seen.clone()],
            "modes": [module.training for module in self.model.modules()],
            "kinds": [type(tensor).__name__ for tensor in (*parameters, *self.model.buffers())],
            "random": [torch.get_rng_state().sum().item(), random.getstate()],
            "process": [sys.excepthook, gc.isenabled(), gc.get_freeze_count() > 0, signal.getsignal(signal.SIGINT)],
        }


def same(state: Any, before: Any) -> bool:
    """Whether two states are equal to the last bit; says which part is not."""
    differ = []
    for name, value in state.items():
        pairs = list(zip(value, before[name], strict=True)) if isinstance(value, list) else [(value, before[name])]
        for now, then in pairs:
            equal = torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
            differ += [] if equal else [f"{name}: {then} -> {now}"]
    assert differ == []
    return True


ASK: dict[str, Callable[[bw.Workload], Any]] = {
    "estimate": lambda work: bw.estimate(work, on="cpu", what_if=True),
    "fit": lambda work: bw.fit(work, on="cpu", limit=4, cache=False),
    "audit": lambda work: bw.audit(work),
    "noise": lambda work: measure_noise(work, effective_batch=8, steps=4, on="cpu"),
    "branches": lambda work: bw.measure_critical_batch(work, batches=(4, 8), steps=4, seeds=1, on="cpu"),
    "throughput": lambda work: measure_throughput(work, [4], on="cpu", repeats=1, seconds=0),
    "tune": lambda work: bw.tune(work, on="cpu", limit=4, steps=4, noise_batch=8),
}


# The longest of them; the others show the same of each question, or of both ways to hand the model in.
SLOW_LIVE = {("noise", True), ("branches", True), ("throughput", True), ("tune", False), ("tune", True)}


@pytest.mark.parametrize(
    ("name", "by_function"),
    [
        pytest.param(
            name,
            by_function,
            id=f"{name}-{'function' if by_function else 'module'}",
            marks=[pytest.mark.slow] if (name, by_function) in SLOW_LIVE else [],
        )
        for name in ASK
        for by_function in (False, True)
    ],
)
def test_live_objects_are_as_before(name: str, by_function: bool) -> None:
    live = Live(by_function=by_function)
    before = live.state()
    # A few steps may reach no target; what is asked here is what is left behind.
    with contextlib.suppress(bw.BatchwrightError):
        ASK[name](live.workload)
    assert same(live.state(), before)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ValueError, "estimate"),
        (ValueError, "audit"),
        pytest.param(ValueError, "noise", marks=pytest.mark.slow),
        (ValueError, "tune"),
        (KeyboardInterrupt, "estimate"),
        pytest.param(KeyboardInterrupt, "audit", marks=pytest.mark.slow),
        (KeyboardInterrupt, "noise"),
        pytest.param(KeyboardInterrupt, "tune", marks=pytest.mark.slow),
    ],
)
def test_so_are_they_where_the_step_fails(name: str, error: type[BaseException]) -> None:
    live = Live(by_function=False)
    calls: list[None] = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise error("in the middle of a step")

    if name == "estimate":  # which sees no hooks of real tensors
        live.model.register_forward_hook(fail)
    else:
        next(live.model.parameters()).register_hook(fail)
    before = live.state()
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        ASK[name](live.workload)
    assert len(calls) >= 3
    assert same(live.state(), before)


def test_each_branch_begins_where_the_others_did() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    starts: list[tuple[float, float]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            starts.append((float(model.get_parameter("weight").detach().sum()), optimizer.param_groups[0]["lr"]))
        return mean_square(model, batch)

    work = bw.Workload(model=model, batch=lambda n: torch.randn(n, 4), loss=loss, optimizer=lambda _: optimizer)
    bw.measure_critical_batch(work, batches=(2, 8), steps=10, seeds=1, on="cpu")
    weight = float(model.weight.detach().sum())
    rates = {rate for at, rate in starts if at == weight}
    assert len(rates) > 2, "several rates are tried, each from the same weights"
    assert max(rates) <= 0.02 * 2**11, "and none of them grows from branch to branch"


def test_an_optimizer_of_live_weights_can_be_traced() -> None:
    live = Live(by_function=False)
    plain = bw.Workload(
        model=nn.Sequential(nn.Linear(8, 4), Counting(), nn.Linear(4, 1)),
        batch=lambda n: torch.randn(n, 8),
        loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )
    over_live = bw.Workload(
        model=live.model, batch=plain.batch, loss=plain.loss, optimizer=lambda params: live.optimizer
    )
    theirs, ours = (bw.estimate(work, micro_batch=4, on="cpu").parts["optimizer"] for work in (plain, over_live))
    # All but the counters of steps, of 4 bytes a weight, which are the live ones.
    assert theirs is not None
    assert ours is not None
    assert theirs - ours == 4 * len(list(live.model.parameters()))


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Remembers the sample that was read last, and keeps those that were read."""

    def __init__(self) -> None:
        self.latest = torch.zeros(8)
        self.read = {0: torch.ones(8)}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.latest.fill_(index + 1)
        return self.read.setdefault(index, torch.full((8,), float(index)))


@pytest.mark.parametrize("name", ["estimate", "fit", "audit", "noise"])
def test_a_dataset_is_as_before_its_samples_were_read(name: str) -> None:
    samples = Samples()
    work = bw.Workload(
        model=lambda: nn.Linear(8, 1),
        data=torch.utils.data.Subset(samples, range(8)),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    )
    ASK[name](work)
    assert not samples.latest.any()
    assert list(samples.read) == [0]


def test_an_unused_scaler_stays_unused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    work = bw.Workload(
        model=nn.Linear(4, 4),
        batch=lambda n: torch.randn(n, 4),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        scaler=lambda: scaler,
    )
    bw.estimate(work, on="cpu")
    assert scaler._scale is None
    assert scaler._growth_tracker is None


class Odd(nn.Module):
    """Holds what cannot be copied."""

    sparse: torch.Tensor
    __slots__ = ("in_a_slot",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.lock, self.file = threading.Lock(), io.StringIO("a line")
        self.numbers = (number for number in range(3))
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.in_a_slot = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count in the slot, and multiply."""
        self.in_a_slot += 1
        self.sparse.mul_(2)
        out: torch.Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("name", ["estimate", "fit", "audit"])
def test_locks_files_slots_and_sparse_tensors_are_no_obstacle(name: str) -> None:
    model = Odd()
    work = bw.Workload(
        model=model,
        batch=lambda n: torch.randn(n, 8),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    # A trace does not follow sparse tensors, and says so.
    with contextlib.suppress(CannotTraceError):
        ASK[name](work)
    assert model.in_a_slot.tolist() == [0, 0]
    assert torch.equal(model.sparse.to_dense(), torch.eye(4))
    assert next(model.numbers) == 0


def test_a_lazy_model_is_fitted_and_lazy_again() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    work = bw.Workload(
        model=model,
        batch=lambda n: torch.randn(n, 8),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    assert bw.fit(work, on="cpu", limit=4, cache=False).micro_batch == 4
    assert isinstance(model[0], nn.LazyLinear)
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    with pytest.raises(bw.BatchwrightError, match="lazy parameters"):
        bw.estimate(work, on="cpu")


@functools.cache
def cached_model() -> nn.Module:
    return nn.Linear(8, 1)


def test_a_model_in_a_cache_of_its_function_is_not_left_there_without_memory() -> None:
    cached_model.cache_clear()
    work = bw.Workload(
        model=lambda: cached_model(),
        batch=lambda n: torch.randn(n, 8),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    bw.estimate(work, on="cpu")
    assert next(cached_model().parameters()).device == CPU


class Schedule:
    """A scheduler of one's own: numbers alone, some of them of the class."""

    num_made = 0

    def __init__(self) -> None:
        self.rate, self.history = 1.0, [1.0]

    def step(self) -> None:
        """Halve the rate."""
        self.rate /= 2
        self.history.append(self.rate)
        Schedule.num_made += 1


class Smoothed(dict[str, float]):
    """An average of one's own that is a table."""


@pytest.mark.parametrize("name", ["estimate", "fit", "audit"])
def test_numbers_in_objects_tables_and_variables_come_back(name: str) -> None:
    schedule, smoothed, counts, replay = Schedule(), Smoothed(loss=1.0), Counter(step=0), [torch.zeros(1)]
    recent, seen, outputs = deque([1], maxlen=2), {0}, {"first": torch.zeros(1)}
    steps = 0
    log: list[int] = []
    model = nn.Linear(8, 1)
    # Nobody but the hook holds the table.
    model.register_forward_hook(lambda *values, table=outputs: table.update(last=values[2]))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        schedule.step()
        smoothed["loss"] *= 0.9
        counts["step"] += 1
        recent.append(steps)
        seen.add(steps)
        log.append(steps)
        replay.append(batch)
        return mean_square(model, batch)

    def state() -> str:
        return repr((vars(schedule), Schedule.num_made, smoothed, counts, recent, seen, steps, outputs, replay))

    work = bw.Workload(
        model=model,
        batch=lambda n: torch.randn(n, 8),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    before = state()
    found = ASK[name](work)
    assert state() == before
    # The one thing that stays is listed.
    assert log
    text = str(found.to_dict())
    assert "log: what was appended to it" in text
    assert "schedule" not in text


def test_what_is_not_the_users_is_listed_where_it_changes() -> None:
    bar, numbers = threading.Thread(), iter(range(100))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        bar.name = f"step {next(numbers)}"
        return mean_square(model, batch)

    work = bw.Workload(
        model=nn.Linear(8, 1),
        batch=lambda n: torch.randn(n, 8),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    [note] = [note for note in bw.audit(work).notes if note.startswith("not restored")]
    assert "bar: what changed inside of a Thread of threading" in note
    assert "numbers: how far a range_iterator has been read" in note


class TestEveryDoor:
    @pytest.mark.parametrize(
        "door",
        [
            lambda work: build_model(work, CPU),
            lambda work: build_optimizers(work, nn.Linear(2, 1)),
            lambda work: build_scaler(work),
            lambda work: make_batch(work, 1, {}, CPU),
        ],
    )
    def test_is_shut_to_a_command_that_forgets_to_keep(self, door: Callable[[bw.Workload], Any]) -> None:
        work = bw.Workload(
            model=lambda: nn.Linear(2, 1),
            batch=lambda n: torch.ones(n, 2),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=torch.optim.SGD,
        )
        with pytest.raises(RuntimeError, match="outside of `untouched"):
            door(work)
        other = bw.Workload(model=lambda: nn.Linear(2, 1), batch=work.batch, loss=work.loss)
        with untouched(other), pytest.raises(RuntimeError, match="outside of `untouched"):
            door(work)
        with untouched(work):
            door(work)

    def test_is_the_only_one(self) -> None:
        """No other file calls a workload's functions that hand out what may be live, or make its batches."""
        doors = {"device/step.py", "device/batches.py", "memory/tracing.py"}
        root = Path(bw.__file__).parent
        wrong = []
        for file in sorted(root.rglob("*.py")):
            if str(file.relative_to(root)) in doors:
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = ast.unparse(node.func.value)
                    if owner.endswith("workload") and node.func.attr in ("model", "optimizer", "batch", "scaler"):
                        wrong.append(f"{file.relative_to(root)}:{node.lineno}: {owner}.{node.func.attr}(...)")
        assert wrong == []


class TestInterrupts:
    def test_one_that_comes_while_things_are_put_back_waits(self) -> None:
        model = nn.Linear(2, 1)
        before = model.weight.detach().clone()

        class Interrupting(nn.Module):
            def get_extra_state(self) -> int:
                return 0

            def set_extra_state(self, state: int) -> None:
                signal.raise_signal(signal.SIGINT)

        model.add_module("interrupting", Interrupting())
        work = bw.Workload(model=model, batch=lambda n: torch.ones(n, 2), loss=lambda model, batch: model(batch).sum())
        with pytest.raises(KeyboardInterrupt), untouched(work):
            model.weight.data.zero_()
        assert torch.equal(model.weight, before)

    def test_one_that_python_drops_comes_again(self) -> None:
        things = [nn.Linear(2, 1)]
        hook = sys.unraisablehook
        reference = weakref.ref(things[0], lambda _: signal.raise_signal(signal.SIGINT))

        def drop_one_and_go_on() -> None:
            with untouched():
                things.clear()
                time.sleep(10)

        with pytest.raises(KeyboardInterrupt):
            drop_one_and_go_on()
        assert reference() is None
        assert sys.unraisablehook is hook

    @pytest.fixture
    def handler(self) -> Iterator[list[int]]:
        seen: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
        yield seen
        signal.signal(signal.SIGINT, before)

    def test_the_users_own_handler_is_called_and_stays(self, handler: list[int]) -> None:
        own = signal.getsignal(signal.SIGINT)
        with untouched():
            signal.raise_signal(signal.SIGINT)
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                assert len(handler) == 1
            assert len(handler) == 2
        assert signal.getsignal(signal.SIGINT) is own

    @pytest.mark.usefixtures("unfrozen")
    def test_what_the_step_sets_for_the_process_is_put_back(self) -> None:
        hook, folder, dtype = sys.excepthook, os.getcwd(), torch.get_default_dtype()
        with untouched():
            sys.excepthook = print
            gc.freeze()
            gc.disable()
            torch.set_default_dtype(torch.float64)
            torch_optimizer.register_optimizer_step_post_hook(print)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.chdir("/")
        assert (sys.excepthook, os.getcwd(), torch.get_default_dtype()) == (hook, folder, dtype)
        assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert not torch_optimizer._global_optimizer_post_hooks

    @pytest.mark.usefixtures("unfrozen")
    @pytest.mark.parametrize("was_frozen", [True, False])
    def test_garbage_is_looked_for_among_new_objects_only(self, was_frozen: bool) -> None:
        if was_frozen:
            gc.freeze()
        try:
            with untouched(), untouched(is_traced=True):
                inside = gc.get_freeze_count()
            assert inside > 0
            assert (gc.get_freeze_count() > 0) == was_frozen
        finally:
            gc.unfreeze()

    def test_before_the_next_probe_too(self) -> None:
        sizes: list[int] = []
        dtypes: list[str] = []

        def train(batch_size: int) -> None:
            sizes.append(batch_size)
            dtypes.append(str(torch.get_default_dtype()))
            torch.set_default_dtype(torch.float64)
            if batch_size > 2:
                raise MemoryError

        bw.find_batch_size(train, 8, limit=8, on="cpu")()
        torch.set_default_dtype(torch.float32)
        assert len(sizes) > 2, "several calls were needed"
        assert set(dtypes) == {"torch.float32"}
