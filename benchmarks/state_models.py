"""Live models of the state table: each in the middle of a training, and each odd in one way.

A builder returns a `Scene`: what is handed to batchwright, and what must be as before. What its step changes beyond the
documented reach (plain Python values that lead to no tensor, a cache that had entries, an iterator) stands in `beyond`.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
import sys
import threading
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import state_faults
import torch
from torch import nn
from torch.nn.utils import parametrizations

import batchwright as bw

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HIDDEN = 6, 4
Extra = "Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]"
MODELS: dict[str, Callable[[], Scene]] = {}


def odd(name: str) -> Callable[[Callable[[], Scene]], Callable[[], Scene]]:
    def add(build: Callable[[], Scene]) -> Callable[[], Scene]:
        MODELS[name] = build
        return build

    return add


def random_batch(n: int) -> Any:
    state_faults.at("batch")
    return torch.randn(n, WIDTH) + random.random() + float(np.random.rand())


@dataclass
class Scene:
    """What is handed in, and what is watched."""

    workload: bw.Workload
    train: Callable[[int], Any]
    watched: dict[str, Any]
    beyond: dict[str, Any] = field(default_factory=dict)


def make_loss(extra: Any) -> Callable[[Any, Any], torch.Tensor]:
    def loss(model: Any, batch: torch.Tensor) -> Any:
        output = model(batch)
        if output.is_complex():
            output = torch.view_as_real(output)
        value = output.float().pow(2).mean()
        if extra is not None:
            extra(model, batch, output)
        return state_faults.returned(value, output)

    return loss


def scene(
    model: Any,
    extra: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    builds_optimizer: bool = False,
    steps_before: int = 2,
    by_function: bool = False,
    batch: Callable[[int], Any] = random_batch,
    scaler: Any = None,
    watched: dict[str, Any] | None = None,
    beyond: dict[str, Any] | None = None,
    parts: dict[str, Any] | None = None,
) -> Scene:
    """Train a model a little, leave its gradients there, and hand it in with its optimizer."""
    live: Any = None
    if not builds_optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        live = (optimizer or functools.partial(torch.optim.Adam, lr=1e-2))(parameters)
        for each in live if isinstance(live, list) else [live]:
            each.register_step_pre_hook(state_faults.in_step)
    loss = loss or make_loss(extra)

    def built(params: Any) -> torch.optim.Optimizer:
        new = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        new.register_step_pre_hook(state_faults.in_step)
        return new

    def step(samples: Any) -> None:
        made = live if isinstance(live, list) else [live or built(model.parameters())]
        for each in made:
            each.zero_grad()
        loss(model, samples).backward()
        for each in made:
            each.step()

    def train(batch_size: int) -> None:
        state_faults.begin_call()
        for _ in range(2):
            step(batch(batch_size))

    for _ in range(steps_before):
        step(batch(3))
    handed_in: dict[str, Any] = {"batch": batch} | (parts or {})
    workload = bw.Workload(
        model=(lambda: model) if by_function else model,
        loss=loss,
        optimizer=built if live is None else lambda params: live,
        scaler=None if scaler is None else lambda: scaler,
        **handed_in,
    )
    all_watched = {"model": model, "optimizer": live, "scaler": scaler, "workload": vars(workload)} | (watched or {})
    return Scene(workload, train, all_watched, beyond or {})


def count(number: torch.Tensor) -> None:
    number.add_(1)


def net(*layers: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), *layers, nn.Linear(HIDDEN, 2))


@odd("plain")
def _() -> Scene:
    return scene(net(nn.ReLU()))


@odd("optimizer built by a function")
def _() -> Scene:
    return scene(net(nn.ReLU()), builds_optimizer=True)


@odd("model by a function, live optimizer")
def _() -> Scene:
    return scene(net(nn.ReLU()), by_function=True)


@odd("model by a function, optimizer built")
def _() -> Scene:
    return scene(net(nn.BatchNorm1d(HIDDEN)), by_function=True, builds_optimizer=True)


@odd("model built anew, average in the loss")
def _() -> Scene:
    average = {"weight": torch.zeros(HIDDEN, WIDTH)}

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        average["weight"] = average["weight"].lerp(model[0].weight.detach().cpu(), 0.1)

    made = scene(net(), extra, builds_optimizer=True, watched={"average": average})
    made.workload = bw.Workload(
        model=net, loss=made.workload.loss, batch=random_batch, optimizer=made.workload.optimizer
    )
    return made


@odd("tied weights")
def _() -> Scene:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(torch.relu(self.first(x)))

    return scene(Tied())


@odd("batch norm, one part frozen in eval mode")
def _() -> Scene:
    model = net(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3), nn.BatchNorm1d(HIDDEN))
    model[3].eval().requires_grad_(False)
    return scene(model)


@odd("frozen parts")
def _() -> Scene:
    model = net(nn.Linear(HIDDEN, HIDDEN))
    model[1].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return scene(model)


@odd("lazy modules")
def _() -> Scene:
    return scene(
        nn.Sequential(nn.LazyLinear(HIDDEN), nn.LazyBatchNorm1d(), nn.LazyLinear(2)),
        builds_optimizer=True,
        steps_before=0,
    )


@odd("a lock and a thread's local")
def _() -> Scene:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lock, self.local = nn.Linear(WIDTH, 2), threading.Lock(), threading.local()

        def forward(self, x: torch.Tensor) -> Any:
            with self.lock:
                return self.layer(x)

    return scene(Locked())


@odd("an open file that is read")
def _() -> Scene:
    reader = open(__file__, "rb")  # noqa: SIM115  # stays open: that is the oddity
    reader.readline()

    def extra(*_: Any) -> None:
        reader.readline()

    return scene(net(), extra, watched={"file": reader})


@odd("sparse gradients")
def _() -> Scene:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 3, sparse=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.table(x)

    def tokens(n: int) -> Any:
        state_faults.at("batch")
        return torch.randint(0, 9, (n, 2))

    return scene(Sparse(), batch=tokens, optimizer=torch.optim.SparseAdam)


@odd("a sparse buffer")
def _() -> Scene:
    model = net()
    model.register_buffer("counts", torch.eye(3).to_sparse())

    def extra(*_: Any) -> None:
        with torch.no_grad():
            model.counts = model.counts * 2

    return scene(model, extra)


@odd("a nested tensor")
def _() -> Scene:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.pieces = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return scene(model)


@odd("weight norm by hooks")
def _() -> Scene:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scene(nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, HIDDEN)), nn.Linear(HIDDEN, 2)))


@odd("weight norm by parametrization")
def _() -> Scene:
    return scene(nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, HIDDEN)), nn.Linear(HIDDEN, 2)))


@odd("spectral norm")
def _() -> Scene:
    return scene(nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, HIDDEN)), nn.Linear(HIDDEN, 2)))


@odd("complex numbers")
def _() -> Scene:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> Any:
            return x.to(torch.complex64) @ self.weight

    return scene(Waves())


@odd("a quantized buffer")
def _() -> Scene:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.register_buffer("levels", torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8))
    return scene(model)


@odd("a parameter of no elements")
def _() -> Scene:
    model = net()
    model.nothing = nn.Parameter(torch.empty(0, 3))
    return scene(model)


@odd("parameters in one storage")
def _() -> Scene:
    model = net()
    flat = torch.randn(2 * HIDDEN + WIDTH * HIDDEN)
    model[0].weight.data = flat[: WIDTH * HIDDEN].view(HIDDEN, WIDTH)
    model[0].bias.data = flat[WIDTH * HIDDEN : WIDTH * HIDDEN + HIDDEN]

    def extra(*_: Any) -> None:
        flat.mul_(0.99)

    return scene(model, extra, watched={"flat": flat})


@odd("transposed, expanded and overlapping")
def _() -> Scene:
    model = net()
    model[0].weight = nn.Parameter(torch.randn(WIDTH, HIDDEN).t())
    model.register_buffer("expanded", torch.zeros(1, 1).expand(5, 5))
    model.register_buffer("overlapping", torch.arange(12.0).as_strided((3, 4), (2, 1)))
    base = model.expanded[:1, :1]

    def extra(*_: Any) -> None:
        base.add_(1)

    return scene(model, extra)


@odd("an averaged copy")
def _() -> Scene:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)

    def extra(model: Any, *_: Any) -> None:
        average.update_parameters(model)

    return scene(model, extra, watched={"average": average})


@odd("averages in a dict")
def _() -> Scene:
    model = net()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def extra(model: Any, *_: Any) -> None:
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach().cpu(), 0.1)
        average.setdefault("steps", torch.zeros(())).add_(1)

    return scene(model, extra, steps_before=1, watched={"average": average})


@odd("a scheduler stepped in the loss")
def _() -> Scene:
    held: list[Any] = []

    def extra(*_: Any) -> None:
        for scheduler in held:
            scheduler.step()

    made = scene(net(), extra, watched={"schedulers": held})
    held.append(torch.optim.lr_scheduler.StepLR(made.watched["optimizer"], 2))
    return made


@odd("cosine schedule with warm restarts")
def _() -> Scene:
    holder: dict[str, Any] = {}

    def extra(*_: Any) -> None:
        if "scheduler" in holder:
            holder["scheduler"].step()

    made = scene(net(), extra, optimizer=functools.partial(torch.optim.SGD, lr=0.1), watched={"holder": holder})
    holder["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(made.watched["optimizer"], 3)
    return made


@odd("a scaler that is used")
def _() -> Scene:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    return scene(net(), scaler=scaler)


@odd("a scaler that the loss changes")
def _() -> Scene:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.ones(()))

    def extra(*_: Any) -> None:
        scaler.update(scaler.get_scale() * 0.5 if not torch._C._len_torch_dispatch_stack() else 4.0)

    return scene(net(), extra, watched={"scaler in the loss": scaler})


@odd("a scaler never used")
def _() -> Scene:
    return scene(net(), scaler=torch.amp.GradScaler("cpu", init_scale=4.0))


@odd("several optimizers")
def _() -> Scene:
    def two(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        half = len(parameters) // 2
        return [torch.optim.Adam(parameters[:half]), torch.optim.SGD(parameters[half:], lr=0.1, momentum=0.9)]

    return scene(net(), optimizer=two)


@odd("an optimizer with hooks, groups and a rate in a tensor")
def _() -> Scene:
    seen = torch.zeros(2)

    def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        parts: list[Any] = [
            {"params": parameters[:2], "lr": torch.tensor(0.1)},
            {"params": parameters[2:], "name": "head"},
        ]
        made = torch.optim.Adam(
            parts,
            foreach=False,
            capturable=False,
        )
        made.register_step_post_hook(lambda *_: count(seen[0]))
        made.register_step_pre_hook(lambda *_: count(seen[1]))
        return made

    return scene(net(), optimizer=groups, watched={"seen": seen})


@odd("rates changed by the loss")
def _() -> Scene:
    held: list[Any] = []

    def extra(*_: Any) -> None:
        for optimizer in held:
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.param_groups[0]["weight_decay"] = 0.1
            optimizer.defaults["lr"] = 7.0

    made = scene(net(), extra)
    held.append(made.watched["optimizer"])
    return made


@odd("LBFGS")
def _() -> Scene:
    return scene(net(), optimizer=functools.partial(torch.optim.LBFGS, max_iter=1), steps_before=0)


@odd("hooks on modules and tensors")
def _() -> Scene:
    model, seen = net(nn.ReLU()), {"forward": torch.zeros(()), "backward": torch.zeros(()), "leaf": torch.zeros(())}
    model[0].register_forward_hook(lambda *_: count(seen["forward"]))
    model[2].register_full_backward_hook(lambda *_: count(seen["backward"]))
    model[0].weight.register_hook(lambda gradient: count(seen["leaf"]))
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: count(seen["leaf"]))
    return scene(model, watched={"seen": seen})


@odd("hooks added by the loss")
def _() -> Scene:
    model = net(nn.ReLU())

    def extra(model: Any, *_: Any) -> None:
        model[0].register_forward_hook(lambda *_: None)
        model[1].register_full_backward_hook(lambda *_: None)
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        model[0].bias.register_hook(lambda gradient: None)

    return scene(model, extra, steps_before=0)


class Slotted:
    """Slots, and a way of its own to set attributes."""

    __slots__ = ("latest", "total")

    def __init__(self) -> None:
        self.total, self.latest = torch.zeros(()), torch.zeros(2)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@odd("slots")
def _() -> Scene:
    slotted = Slotted()

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        slotted.total.add_(1)
        slotted.latest = torch.ones(2)

    return scene(net(), extra, watched={"slotted": slotted})


@odd("attributes set in a way of its own")
def _() -> Scene:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)
            self.largest = torch.zeros(())
            self.num_forwards = 0

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "forbidden":
                raise AttributeError(name)
            super().__setattr__(name, value)

        def forward(self, x: torch.Tensor) -> Any:
            self.num_forwards += 1
            self.latest = self.layer(x)
            self.largest = self.latest.detach().abs().max()
            return self.latest

    return scene(Careful())


@odd("a scripted module")
def _() -> Scene:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scene(nn.Sequential(torch.jit.script(net(nn.BatchNorm1d(HIDDEN))), nn.Linear(2, 2)))


@odd("gradients of one half only")
def _() -> Scene:
    made = scene(net(nn.ReLU()))
    model: Any = made.workload.model
    model[0].weight.grad = None
    model[2].weight.grad = torch.randn(HIDDEN, 2).t()
    return made


@odd("half precision")
def _() -> Scene:
    def halves(n: int) -> Any:
        return random_batch(n).bfloat16()

    return scene(net(nn.ReLU()).bfloat16(), batch=halves)


@odd("double precision")
def _() -> Scene:
    def doubles(n: int) -> Any:
        return random_batch(n).double()

    return scene(net(nn.Tanh()).double(), batch=doubles)


@odd("tensors as plain attributes")
def _() -> Scene:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)
            self.cache: dict[str, Any] = {}
            self.history = deque([torch.zeros(1)], maxlen=3)

        def forward(self, x: torch.Tensor) -> Any:
            output = self.layer(x)
            self.cache[f"size {len(x)}"] = output
            self.history.append(output.detach().mean())
            return output

    return scene(Remembering())


@odd("a replay buffer")
def _() -> Scene:
    replay: list[Any] = []

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        replay.append((batch[0].detach().clone(), float(len(batch))))
        del replay[:-5]

    return scene(net(), extra, watched={"replay": replay})


@odd("arrays and generators of numpy")
def _() -> Scene:
    counts, draws = np.zeros(3), np.random.default_rng(0)

    def extra(*_: Any) -> None:
        counts[draws.integers(3)] += 1

    return scene(net(), extra, watched={"counts": counts, "draws": draws})


@odd("a generator of torch's and of Python's")
def _() -> Scene:
    for_torch, for_python = torch.Generator().manual_seed(3), random.Random(4)

    def noisy(n: int) -> Any:
        return random_batch(n) + torch.randn(n, WIDTH, generator=for_torch) + for_python.random()

    return scene(net(), batch=noisy, watched={"generators": [for_torch, for_python]})


@odd("counters beside a tensor")
def _() -> Scene:
    totals: dict[str, Any] = {"loss": torch.zeros(()), "steps": 0, "sizes": []}

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        totals["loss"] = totals["loss"] + 1
        totals["steps"] += 1

    return scene(net(), extra, watched={"totals": totals})


@dataclass
class Progress:
    """A state of one's own."""

    best: torch.Tensor
    steps: int = 0
    kept: dict[str, torch.Tensor] = field(default_factory=dict)


@odd("a dataclass")
def _() -> Scene:
    progress = Progress(torch.full((), 9.0))

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        progress.steps += 1
        progress.best = output.detach().min()
        progress.kept["weight"] = model[0].weight.detach().clone()

    return scene(net(), extra, watched={"progress": progress})


@odd("a cache that was empty")
def _() -> Scene:
    @functools.cache
    def mask(size: int) -> Any:
        return torch.ones(size)

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        mask(len(batch))

    return scene(net(), extra, steps_before=0, watched={"mask": mask})


@odd("a cache that had entries")
def _() -> Scene:
    @functools.cache
    def mask(size: int) -> Any:
        return torch.ones(size)

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        mask(len(batch))

    return scene(net(), extra, beyond={"mask": mask})


@odd("plain counters and logs")
def _() -> Scene:
    counters, log = {"steps": 0}, ["begun"]

    def extra(*_: Any) -> None:
        counters["steps"] += 1
        log.append("a step")

    return scene(net(), extra, beyond={"counters": counters, "log": log})


@odd("requires_grad flipped by the loss")
def _() -> Scene:
    def extra(model: Any, *_: Any) -> None:
        model[0].bias.requires_grad_(not model[0].bias.requires_grad)

    return scene(net(), extra)


@odd("a parameter replaced by the loss")
def _() -> Scene:
    def extra(model: Any, *_: Any) -> None:
        model[0].bias = nn.Parameter(model[0].bias.detach() + 1)
        model.register_buffer("new", torch.ones(2))

    return scene(net(), extra, steps_before=0)


@odd("a module replaced by the loss")
def _() -> Scene:
    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        model[1] = nn.Tanh()
        model.add_module("later", nn.Linear(2, 2, device=batch.device))

    return scene(net(nn.ReLU()), extra, steps_before=0)


@odd("modes flipped by the loss")
def _() -> Scene:
    def extra(model: Any, *_: Any) -> None:
        model.train(not model.training)
        model[1].eval()

    return scene(net(nn.Dropout(0.2)), extra)


@odd("memory replaced by the loss")
def _() -> Scene:
    def extra(model: Any, *_: Any) -> None:
        if not torch._C._len_torch_dispatch_stack():
            model[0].bias.data = model[0].bias.data.clone()

    return scene(net(nn.ReLU()), extra)


SHADOW: Any = torch.zeros(2)


@odd("a global of the module")
def _() -> Scene:
    def extra(*_: Any) -> None:
        global SHADOW
        SHADOW = SHADOW + 1

    class Global:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return {"SHADOW": SHADOW}

    return scene(net(), extra, watched={"global": Global()})


@odd("a name of the enclosing function")
def _() -> Scene:
    shadow = torch.zeros(2)

    def extra(*_: Any) -> None:
        nonlocal shadow
        shadow = shadow + 1

    return scene(net(), extra, watched={"extra": extra})


@odd("settings of the process changed by the loss")
def _() -> Scene:
    def extra(*_: Any) -> None:
        sys.excepthook = _print_nothing
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        gc.disable()
        os.chdir("/")
        nn.modules.module.register_module_forward_hook(lambda *_: None)

    return scene(net(), extra, steps_before=0)


def _print_nothing(*_: Any) -> None:
    pass


@odd("recurrent")
def _() -> Scene:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.state = nn.LSTM(2, 3, batch_first=True), None

        def forward(self, x: torch.Tensor) -> Any:
            output, self.state = self.rnn(x.view(len(x), 3, 2))
            return output[:, -1]

    return scene(Recurrent())


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are counted and kept as they are read."""

    def __init__(self) -> None:
        self.rows, self.latest = torch.randn(16, WIDTH), torch.zeros(WIDTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        state_faults.at("batch")
        self.latest.copy_(self.rows[index])
        return self.rows[index] + torch.rand(WIDTH) + random.random()


@odd("a dataset")
def _() -> Scene:
    samples = Samples()
    return scene(net(), watched={"samples": samples}, parts={"batch": None, "data": samples, "collate": torch.stack})


@odd("copied model, copied optimizer")
def _() -> Scene:
    first = scene(net(nn.ReLU()))
    model, optimizer = copy.deepcopy((first.workload.model, first.watched["optimizer"]))
    return scene(model, optimizer=lambda _: optimizer)


@odd("an iterator of batches")
def _() -> Scene:
    rows = iter(range(10**9))

    def extra(*_: Any) -> None:
        next(rows)

    return scene(net(), extra, beyond={"rows": rows})


@odd("everything at once")
def _() -> Scene:
    model = net(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.2), nn.ReLU())
    model[3].eval()
    average = torch.optim.swa_utils.AveragedModel(model)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    schedulers: list[Any] = []
    draws, seen = torch.Generator().manual_seed(1), torch.zeros(())

    def extra(model: Any, batch: torch.Tensor, output: torch.Tensor) -> None:
        average.update_parameters(model)
        for name, parameter in model.named_parameters():
            shadow[name].lerp_(parameter.detach().cpu(), 0.1)
        for scheduler in schedulers:
            scheduler.step()
        seen.add_(1)

    def noisy(n: int) -> Any:
        return random_batch(n) + torch.randn(n, WIDTH, generator=draws)

    watched = {"average": average, "shadow": shadow, "draws": draws, "schedulers": schedulers, "seen": seen}
    made = scene(model, extra, scaler=scaler, batch=noisy, watched=watched)
    made.watched["optimizer"].register_step_post_hook(lambda *_: count(seen))
    schedulers.append(torch.optim.lr_scheduler.StepLR(made.watched["optimizer"], 2))
    return made
