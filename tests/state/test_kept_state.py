"""A probe on live objects leaves no trace: the oracle is a hash over every byte, name, place and flag they have."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.state.kept_state import KeptState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def kept(objects: Iterable[Any] = (), *, accelerator: torch.device | None = None) -> Iterator[KeptState]:
    state = KeptState(objects, accelerator=accelerator)
    try:
        yield state
    finally:
        state.restore()


class MomentsInFp32(torch.optim.Optimizer):
    """Momentum of bf16 parameters kept in fp32, as `load_state_dict` would not leave it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["old"] = [parameter.clone()]
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                state["old"].append(parameter.clone())
                parameter.sub_(group["lr"] * state["moment"])


class Tied(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        hidden: torch.Tensor = self.embedding((inputs[:, 0] > 0).long())
        return nn.functional.dropout(self.head(hidden), training=self.training)


@dataclass
class World:
    """Live objects of one training program."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None

    @property
    def objects(self) -> list[Any]:
        held = [self.model, self.optimizer, self.scheduler, self.scaler]
        return [thing for thing in held if thing is not None]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6))


def one_cycle_with_a_scaler() -> World:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    return World(model, optimizer, OneCycleLR(optimizer, max_lr=0.5, total_steps=50), scaler)


def bf16_with_fp32_moments() -> World:
    model = mlp().bfloat16()
    return World(model, MomentsInFp32(model.parameters()))


def amsgrad() -> World:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    return World(model, optimizer, SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], [2]))


def momentum_on_a_plateau() -> World:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return World(model, optimizer, ReduceLROnPlateau(optimizer, patience=0))


def tied_weights() -> World:
    model = Tied()
    return World(model, torch.optim.Adam(model.parameters(), lr=0.1))


def frozen_part() -> World:
    model = mlp()
    for part in model[:2]:  # type: ignore[attr-defined]
        part.eval().requires_grad_(False)
    return World(model, torch.optim.AdamW(model[4].parameters(), lr=0.1))


def learning_rate_as_a_tensor() -> World:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    return World(model, optimizer, StepLR(optimizer, 1, gamma=0.5))


WORLDS = [
    one_cycle_with_a_scaler,
    bf16_with_fp32_moments,
    amsgrad,
    momentum_on_a_plateau,
    tied_weights,
    frozen_part,
    learning_rate_as_a_tensor,
]
ENDS = {
    "data": MemoryError("no room for the batch"),
    "forward": torch.OutOfMemoryError("CUDA out of memory"),
    "backward": torch.OutOfMemoryError("CUDA out of memory"),
    "half a step": torch.OutOfMemoryError("CUDA out of memory"),
    "after a step": ZeroDivisionError("a plain bug"),
    "scheduler": KeyboardInterrupt(),
    "generate": torch.OutOfMemoryError("CUDA out of memory"),
    "never": None,
}
# Where a first step makes two moments for each of several parameters.
MAKE_MOMENTS = (one_cycle_with_a_scaler, amsgrad, frozen_part, learning_rate_as_a_tensor)
CASES = [
    (build, warm_steps, end)
    for build in WORLDS
    for end in ENDS
    for warm_steps in (0, 1)
    if end != "half a step" or (build in MAKE_MOMENTS and not warm_steps)
]


def train_step(world: World, end: str = "never") -> None:
    """One step that touches all there is, and fails where it is told to."""

    def maybe_fail(moment: str) -> None:
        if moment == end and (error := ENDS[end]) is not None:
            raise error

    noise = np.random.random() + random.random()
    maybe_fail("data")
    inputs = torch.randn(8, 4) + noise
    world.model.train()
    outputs = world.model(inputs.to(next(world.model.parameters()).dtype))
    maybe_fail("forward")
    # In the middle of backward: when it comes to the first weight, the last layer has its gradient.
    first = next(parameter for parameter in world.model.parameters() if parameter.requires_grad)
    hook = first.register_hook(lambda _: maybe_fail("backward"))
    loss = outputs.float().square().mean()
    (loss if world.scaler is None else world.scaler.scale(loss)).backward()
    hook.remove()
    with pytest.MonkeyPatch.context() as patch:
        if end == "half a step":
            patch.setattr(torch, "zeros_like", failing_at_its_fourth_call(torch.zeros_like))
        if world.scaler is None:
            world.optimizer.step()
        else:
            world.scaler.step(world.optimizer)
            maybe_fail("after a step")
            world.scaler.update()
    maybe_fail("after a step")
    if isinstance(world.scheduler, ReduceLROnPlateau):
        world.scheduler.step(1.0)
    elif world.scheduler is not None:
        world.scheduler.step()
    maybe_fail("scheduler")
    world.model.eval()
    maybe_fail("generate")


def failing_at_its_fourth_call(zeros_like: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Adam asks for two moments a parameter: at the fourth call the second parameter has `step` and `exp_avg`."""
    calls = iter([False] * 3 + [True] * 100)

    def limited(*args: Any, **options: Any) -> torch.Tensor:
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros_like(*args, **options)

    return limited


def told(value: Any, places: bool) -> Any:
    """Everything about a value as plain data; with `places` also which object and memory it is."""
    where: tuple[Any, ...] = ()
    if isinstance(value, torch.Tensor):
        if places:
            where = (id(value), value.data_ptr(), value.storage_offset())
        content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        form = (type(value), value.dtype, value.shape, value.stride(), value.device, value.requires_grad)
        return (*where, form, content, told(value.grad, places) if value.is_leaf else value.grad_fn)
    if isinstance(value, LRScheduler):
        return [(name, told(inner, places)) for name, inner in vars(value).items() if name != "optimizer"]
    where = (id(value),) if places else ()
    if isinstance(value, dict):
        return (*where, [(told(key, places), told(inner, places)) for key, inner in value.items()])
    if isinstance(value, list | tuple):
        return (*where, [told(inner, places) for inner in value])
    return value if isinstance(value, int | float | str | None) else (type(value), *where)


def fingerprint(world: World, *, places: bool = True) -> str:
    numpy_state: Any = np.random.get_state()
    told_all: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    told_all += [numpy_state[1].tobytes(), numpy_state[2:]]
    for name, module in world.model.named_modules(remove_duplicate=False):
        told_all.append((name, type(module), module.training, sorted(module._non_persistent_buffers_set)))
        told_all.append(told({**module._parameters, **module._buffers}, False))
        told_all += [told(tensor, places) for tensor in (*module.parameters(False), *module.buffers(False))]
    optimizer = world.optimizer
    order = {id(parameter): n for n, parameter in enumerate(world.model.parameters())}
    told_all.append([(order[id(key)], told(state, places)) for key, state in optimizer.state.items()])
    told_all.append(told(optimizer.param_groups, places))
    told_all.append({name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)})
    told_all.append(told(world.scheduler, places))
    if world.scaler is not None:
        for name, value in vars(world.scaler).items():
            # Its keys are the optimizers' ids, which differ from run to run.
            told_all.append((name, [*value.values()] if name == "_per_optimizer_states" else told(value, places)))
    return hashlib.sha256(repr(told_all).encode()).hexdigest()


def make(build: Callable[[], World], *, warm_steps: int = 0) -> World:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    world = build()
    for _ in range(warm_steps):
        train_step(world)
    return world


def probe(world: World, end: str) -> None:
    error = ENDS[end]
    if error is None:
        train_step(world)
        train_step(world)
        return
    with pytest.raises(type(error)):
        train_step(world, end)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A collection is a fifth of a second in a process that holds all of torch; and where another process has one of
    # the cores, each parallel operator waits for its second thread, 40 ms at a time.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _callers_random_state() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


class TestNoTrace:
    @pytest.mark.parametrize(("build", "warm_steps", "end"), CASES)
    def test_every_byte_place_and_flag_is_as_before(
        self, build: Callable[[], World], warm_steps: int, end: str
    ) -> None:
        world = make(build, warm_steps=warm_steps)
        before = fingerprint(world)
        state = KeptState(world.objects)
        for _ in range(2):
            probe(world, end)
            assert fingerprint(world) != before
            state.restore()
            assert fingerprint(world) == before

    @pytest.mark.parametrize("build", WORLDS)
    def test_training_goes_on_as_if_there_had_been_no_probe(self, build: Callable[[], World]) -> None:
        undisturbed = make(build, warm_steps=3)
        expected = fingerprint(undisturbed, places=False)
        world = make(build, warm_steps=1)
        with kept(world.objects):
            train_step(world)
            train_step(world)
        train_step(world)
        train_step(world)
        assert fingerprint(world, places=False) == expected

    def test_a_half_made_state_leaves_no_entry_at_all(self) -> None:
        world = make(one_cycle_with_a_scaler)
        state = KeptState(world.objects)
        probe(world, "half a step")
        assert [list(entry) for entry in world.optimizer.state.values()] == [
            ["step", "exp_avg", "exp_avg_sq"],
            ["step", "exp_avg"],
        ]
        state.restore()
        assert len(world.optimizer.state) == 0
        assert world.scaler is not None
        assert world.scaler._scale is None

    def test_an_optimizer_that_forgot_gets_its_state_back(self) -> None:
        world = make(amsgrad, warm_steps=1)
        before = fingerprint(world)
        with kept(world.objects):
            del world.optimizer.state[next(world.model.parameters())]["max_exp_avg_sq"]
            world.optimizer.state.pop(list(world.model.parameters())[1])
            world.optimizer.param_groups[0].update(lr=7.0, betas=(0.0, 0.0), surprise=1)
            world.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            world.optimizer.load_state_dict(world.optimizer.state_dict())
        assert fingerprint(world) == before


class TestModules:
    def assert_put_back(self, change: Callable[[Any], object], model: nn.Module | None = None) -> None:
        """Assert that a change is seen by the oracle, and is gone afterwards."""
        model = model or nn.Sequential(Tied(), mlp())
        world = World(model, torch.optim.SGD(model.parameters()))
        for parameter in list(model.parameters())[:2]:
            parameter.grad = torch.randn_like(parameter)
        before = fingerprint(world)
        with kept([model]):
            change(model)
            assert fingerprint(world) != before
        assert fingerprint(world) == before

    def test_storage_that_was_swapped(self) -> None:
        self.assert_put_back(lambda model: setattr(model[1][0].weight, "data", torch.zeros(3, 3)))

    def test_another_dtype_and_back(self) -> None:
        self.assert_put_back(lambda model: model.double())

    def test_another_device_and_back(self) -> None:
        model = nn.Linear(4, 8)
        model.weight.grad = gradient = torch.ones_like(model.weight)
        weight = model.weight.tolist()
        with kept([model]):
            model.to("meta")
        assert model.weight.tolist() == weight
        assert model.weight.grad is gradient
        assert gradient.tolist() == torch.ones(8, 4).tolist()

    def test_buffers_replaced_registered_and_removed(self) -> None:
        self.assert_put_back(lambda model: model[1][1]._buffers.update(running_mean=torch.ones(8)))
        self.assert_put_back(lambda model: setattr(model[0], "seen", None))
        self.assert_put_back(lambda model: model.register_buffer("cache", torch.ones(1), persistent=False))
        self.assert_put_back(lambda model: delattr(model[1][1], "num_batches_tracked"))

    def test_parameters_and_modules_added_and_replaced(self) -> None:
        self.assert_put_back(lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))))
        self.assert_put_back(lambda model: setattr(model[1][0], "weight", nn.Parameter(torch.ones(8, 4))))
        self.assert_put_back(lambda model: model.add_module("0", nn.Linear(1, 1)))

    def test_flags_and_gradients(self) -> None:
        self.assert_put_back(lambda model: model.requires_grad_(False))
        self.assert_put_back(lambda model: model[1].eval())
        self.assert_put_back(lambda model: model.zero_grad())
        self.assert_put_back(lambda model: model[1](torch.ones(2, 4)).sum().backward())

    def test_a_buffer_that_got_a_history(self) -> None:
        self.assert_put_back(lambda model: model[0].seen.mul_(model[0].head.weight.sum()))

    def test_plain_attributes_caches_and_hooks(self) -> None:
        model: Any = nn.Linear(2, 2)
        model.calls, model.cache, model.table = 0, {"keys": [torch.zeros(2)]}, np.zeros(2)
        cached = model.cache["keys"][0]
        with kept([model]):
            model.calls += 1
            cached.add_(1)
            model.cache["keys"].append(torch.ones(2))
            model.cache = {}
            model.table += 1
            model.register_forward_hook(lambda *_: None)
            del model.calls
        assert (model.calls, model.table.tolist(), len(model._forward_hooks)) == (0, [0, 0], 0)
        assert model.cache["keys"] == [cached]
        assert cached.tolist() == [0, 0]

    def test_a_lazy_module_is_lazy_again_with_any_other_width(self) -> None:
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        state = KeptState([model])
        for width in (2, 5):
            model(torch.ones(4, width)).sum().backward()
            assert model[0].weight.shape == (3, width)
            state.restore()
            assert isinstance(model[0], nn.LazyLinear)
            assert model[0].has_uninitialized_params()

    def test_extra_state(self) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inside = SimpleNamespace(steps=torch.zeros(1), names=["a"])

            def get_extra_state(self) -> Any:
                return vars(self.inside)

            def set_extra_state(self, state: Any) -> None:
                vars(self.inside).update(state)

        model = Counts()
        state = KeptState([model])
        for _ in range(2):
            model.inside.steps += 1
            model.inside.names.append("b")
            state.restore()
            assert (model.inside.steps.tolist(), model.inside.names) == ([0], ["a"])

    def test_sparse_gradients(self) -> None:
        model = nn.Embedding(4, 2, sparse=True)
        model(torch.tensor([1])).sum().backward()
        gradient = model.weight.grad
        assert gradient is not None
        with kept([model]):
            gradient._values().mul_(3)
            model(torch.tensor([1, 2])).sum().backward()
            model.zero_grad()
        assert model.weight.grad is gradient
        assert gradient.to_dense().tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]

    def test_a_tensor_made_of_others(self) -> None:
        model: Any = nn.Linear(2, 2)
        one, two = torch.ones(2), torch.ones(2) * 2
        model.weight = nn.Parameter(TwoTensor(one, two))
        parameter = model.weight
        with kept([model]):
            parameter.data.mul_(3)
            parameter.a = torch.zeros(2)
        assert parameter.b.tolist() == [2, 2]
        assert parameter.a.tolist() == [1, 1]

    def test_parts_of_a_tensor_that_are_in_slots(self) -> None:
        # As those of a DTensor are.
        class Slotted(TwoTensor):
            __slots__ = ("a", "b")

        model: Any = nn.Module()
        model.register_buffer("pair", Slotted(torch.ones(2), torch.ones(2)))  # type: ignore[no-untyped-call]
        part = model.pair.a
        with kept([model]):
            model.pair.a = torch.zeros(2)
        assert model.pair.a is part

    def test_what_hangs_on_a_parameter(self) -> None:
        model: Any = nn.Linear(2, 2)
        model.weight.main_grad = torch.zeros(2)
        with kept([model]):
            model.weight.main_grad.add_(1)
            model.weight.seen = True
        assert model.weight.main_grad.tolist() == [0, 0]
        assert not hasattr(model.weight, "seen")

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script")
    def test_a_scripted_module(self) -> None:
        model = torch.jit.script(nn.BatchNorm1d(2))
        before = [tensor.tolist() for tensor in model.state_dict().values()]
        with kept([model]):
            model(torch.randn(4, 2))
            nn.init.zeros_(model.weight)
        assert [tensor.tolist() for tensor in model.state_dict().values()] == before

    def test_a_storage_that_was_freed(self) -> None:
        model = nn.Linear(2, 2)
        weight = model.weight.tolist()
        with kept([model]):
            model.weight.untyped_storage().resize_(0)
        assert model.weight.tolist() == weight

    def test_under_inference_mode(self) -> None:
        model = nn.Linear(2, 2)
        with torch.inference_mode():
            model.register_buffer("made_there", torch.ones(2))
            average = Average()
            with kept([model, average]):
                model.made_there.add_(1)  # type: ignore[operator]
                model.register_buffer("later", torch.ones(1))
        assert model.made_there.tolist() == [1, 1]  # type: ignore[operator]
        assert "later" not in model._buffers
        # Put back there, usable here.
        assert not average.shadow.is_inference()


class Copied(TorchDispatchMode):
    """Counts the bytes that are copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.clone, torch.ops.aten.copy_):
            self.num_bytes += out.nbytes
        return out


class TestCopies:
    def test_each_tensor_is_copied_once_whoever_names_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Copies are hidden from a trace that is under way, as the counter below is.
        monkeypatch.setattr("batchwright.state.kept_state._disable_current_modes", contextlib.nullcontext)
        model = Tied()
        model.register_buffer("rows", model.head.weight.detach()[:])
        model.register_buffer("wide", torch.ones(1).expand(1000))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with Copied() as copied:
            state = KeptState([model, optimizer, StepLR(optimizer, 1), model])
        # The weight, its gradient and its momentum; `seen` and the one element of `wide`.
        assert copied.num_bytes == 3 * model.head.weight.nbytes + 2 * 4 + 4
        with Copied() as copied:
            state.restore()
        assert copied.num_bytes == 0, "weights mapped from a file must not be written without need"

    def test_nothing_is_copied_of_meta_tensors(self) -> None:
        model = nn.Linear(1000, 1000, device="meta")
        with Copied() as copied, kept([model]):
            model.weight.data = torch.empty(2, 2, device="meta")
        assert copied.num_bytes == 0
        assert model.weight.shape == (1000, 1000)

    def test_kept_twice_is_as_it_was_the_first_time(self) -> None:
        model = nn.Linear(2, 2)
        before = model.weight.tolist()
        state = KeptState([model])
        nn.init.zeros_(model.weight)
        state.keep(model)
        state.keep(model)
        state.restore()
        assert model.weight.tolist() == before
        assert len(state.covered) == 2

    def test_an_optimizer_that_first_appears_in_the_probe(self) -> None:
        world = make(frozen_part)
        before = fingerprint(world)
        state = KeptState([world.model])
        torch.nn.init.zeros_(next(world.model.parameters()))
        # Its parameters are those of the model: they stay as they were when that was kept.
        state.keep(world.optimizer)
        train_step(world)
        state.restore()
        assert fingerprint(world) == before


class Average:
    """Neither a module nor an optimizer: known by its state_dict alone."""

    def __init__(self) -> None:
        self.shadow = torch.zeros(2)
        self.updates = [0]

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class TestOtherThings:
    @pytest.mark.parametrize(
        ("generator", "draw"),
        [
            (torch.Generator().manual_seed(1), lambda g: torch.rand(3, generator=g).tolist()),
            (np.random.default_rng(1), lambda g: g.random(3).tolist()),
            (np.random.RandomState(1), lambda g: g.random_sample(3).tolist()),
            (random.Random(1), lambda g: g.random()),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_random_generators(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        state = KeptState([generator])
        first = draw(generator)
        for _ in range(2):
            state.restore()
            assert draw(generator) == first
        assert state.covered[0] == f"random state of a {type(generator).__name__}"

    def test_anything_with_a_state_dict_many_times(self) -> None:
        average = Average()
        state = KeptState([average])
        for _ in range(3):
            average.shadow += 1
            average.updates.append(1)
            state.restore()
            assert (average.shadow.tolist(), average.updates) == ([0, 0], [0])
        assert state.covered[0] == "state of Average"

    @pytest.mark.parametrize("thing", [3, "model", nn.Linear, random.SystemRandom(), lambda: 3, [nn.Linear(1, 1)]])
    def test_what_cannot_be_kept_is_refused_by_what_can(self, thing: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"a module, an optimizer, .* or anything with state_dict\(\)"):
            KeptState([thing])

    def test_words(self) -> None:
        world = make(one_cycle_with_a_scaler)
        assert KeptState(world.objects).covered == (
            "weights and buffers of Sequential (9 tensors)",
            "state of AdamW",
            "state of OneCycleLR",
            "state of GradScaler",
            "random state of torch, Python, numpy",
        )

    def test_random_state_of_an_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Backend:
            states: dict[str, int]

            def get_rng_state(self, device: torch.device) -> int:
                return self.states[str(device)]

            def set_rng_state(self, state: int, device: torch.device) -> None:
                self.states[str(device)] = state

        backend = Backend()
        backend.states = {"cuda:1": 5}
        monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
        with kept(accelerator=torch.device("cuda:1")) as state:
            backend.states["cuda:1"] = 6
        assert backend.states == {"cuda:1": 5}
        assert state.covered == ("random state of torch, Python, numpy, cuda:1",)


class Idle(Average):
    """Has no state to hand out yet, as a data loader that accelerate prepared."""

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("no attribute 'dl_state_dict'")


class Open(Average):
    """Hands out what cannot be copied."""

    def state_dict(self) -> dict[str, Any]:
        return {"batches": (number for number in self.updates)}


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        raise ValueError("not ready")


class TestWhatWasOnlyFound:
    def test_the_rest_is_kept_and_what_could_not_be_is_told(self) -> None:
        model, average = nn.Linear(2, 2), Average()
        before = model.weight.tolist()
        state = KeptState()
        assert state.keep_all([Idle(), model, Open(), average]) == (
            "Idle: it has a state_dict that raises or cannot be copied (AttributeError)",
            "Open: it has a state_dict that raises or cannot be copied (TypeError)",
        )
        spoil(model, average)
        state.restore()
        assert (model.weight.tolist(), average.updates) == (before, [0])
        assert state.covered[:-1] == ("weights and buffers of Linear (2 tensors)", "state of Average")

    def test_a_model_that_cannot_be_kept_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="not ready"):
            KeptState().keep_all([Extra(1, 1)])
        with pytest.raises(InvalidInputError, match="what a probe restores must be"):
            KeptState().keep_all(["weights.pt"])

    def test_a_step_is_probed_all_the_same_unless_it_was_handed_in(self) -> None:
        model, loader = nn.Linear(2, 2), Idle()

        def step(batch_size: int) -> None:
            spoil(model, loader)

        before = model.weight.tolist()
        found = bw.fit(step, limit=1)
        assert model.weight.tolist() == before
        assert found.restored.not_covered[0].startswith("Idle: it has a state_dict that raises")
        with pytest.raises(AttributeError, match="dl_state_dict"):
            bw.fit(step, limit=1, state=[loader])


class Stubborn(Average):
    """Fails when it is loaded, as often as it is told to."""

    def __init__(self, *failures: BaseException) -> None:
        super().__init__()
        self.failures = list(failures)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.failures:
            raise self.failures.pop()
        super().load_state_dict(state)


def spoil(model: nn.Linear, average: Average | None = None, error: type[BaseException] | None = None) -> None:
    nn.init.zeros_(model.weight)
    if average is not None:
        average.updates.append(1)
    if error is not None:
        raise error


class TestFailuresOnTheWayBack:
    def test_the_rest_comes_back_and_all_failures_are_told(self) -> None:
        model, one, two = nn.Linear(2, 2), Stubborn(ValueError("one")), Stubborn(TypeError("two"))
        before = model.weight.tolist()
        with pytest.raises(ExceptionGroup, match="2 parts could not be put back") as caught, kept([one, model, two]):
            nn.init.zeros_(model.weight)
        assert model.weight.tolist() == before
        assert [str(error) for error in caught.value.exceptions] == ["two", "one"]
        assert caught.value.exceptions[0].__notes__ == ["while putting back Stubborn"]

    def test_an_interrupt_waits_until_everything_is_back(self) -> None:
        model, slow, bad = nn.Linear(2, 2), Stubborn(KeyboardInterrupt()), Stubborn(ValueError("bad"))
        before = model.weight.tolist()
        with pytest.raises(KeyboardInterrupt) as caught, kept([model, slow, bad]):
            spoil(model, slow)
        assert model.weight.tolist() == before
        assert slow.updates == [0]
        assert "1 part could not be put back" in caught.value.__notes__[0]

    @pytest.mark.parametrize(
        "error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, torch.OutOfMemoryError]
    )
    def test_an_error_inside_passes_through_and_everything_is_back(self, error: type[BaseException]) -> None:
        model = nn.Linear(2, 2)
        before = model.weight.tolist()
        with pytest.raises(error), kept([model]):
            spoil(model, error=error)
        assert model.weight.tolist() == before
