"""The key of an answer: the same for the same work anywhere, another where anything that counts has changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.fitting import cache_key as fingerprint_file
from batchwright.fitting import cache_key as named_code
from batchwright.fitting.cache_key import fingerprint, rounded
from batchwright.targets import load_workload
from batchwright.workload import Workload
from tests.device.workloads import run_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

TARGET = """
import torch
from torch import nn
import batchwright as bw
from {helper} import WIDTH, make_loss

KINDS = {{"mean", "sum", "none", "max"}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = {{"a", "b", "c", "d"}}
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        return self.body(x) if "mean" in {{"mean", "sum", "none"}} else x

def workload():
    {inside}
    return bw.Workload(
        model=Net,
        batch=lambda n, seq_len=4: torch.randn(n, seq_len, WIDTH),
        loss=make_loss(KINDS),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
"""
HELPER = """
WIDTH = 8

def make_loss(kinds):
    def loss(model, batch):
        return model(batch).pow({power}).mean()
    return loss
"""
CHILD = """
import itertools, sys
from batchwright.fitting.cache_key import fingerprint
from batchwright.targets import load_workload
for target in sys.argv[1:]:
    workload = load_workload(target)
    for length, named in itertools.product((4, 5), (target, None)):
        shape = {"seq_len": length}
        print(fingerprint(workload, target=named, on="cpu", limit_bytes=2**30, shape=shape, settings={}))
assert "torch._dynamo" not in sys.modules, "its import takes longer than all the rest"
"""

EXPONENT = 2


@dataclass
class Config:
    width: int = 8
    dropout: float = 0.1
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    lr: float = 1e-3
    length: int = 4
    dtype: torch.dtype = torch.float32


class Last(nn.Module):
    def forward(self, outputs: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return outputs[0]


class PlainDescent:
    """Steps as SGD does; not one of torch's, of which the first that is made imports for seconds."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(params)}]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def mean_square(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).pow(EXPONENT).mean()


def make(config: Config | None = None, **changes: Any) -> Workload:
    config = config or Config()
    fields: dict[str, Any] = {
        "model": lambda: nn.Sequential(
            nn.Linear(config.width, config.width, dtype=config.dtype), nn.Dropout(config.dropout)
        ),
        "batch": lambda n, seq_len=config.length: torch.randn(n, seq_len, config.width),
        "loss": mean_square,
        "optimizer": lambda params: config.optimizer(params, lr=config.lr),  # type: ignore[call-arg]
    }
    return Workload(**{**fields, **changes})


def key_or_none(workload: Workload, **changes: Any) -> str | None:
    told: dict[str, Any] = {"target": None, "on": "cpu", "limit_bytes": 2**30, "shape": {}, "settings": {}}
    return fingerprint(workload, **{**told, **changes})


def key(workload: Workload, **changes: Any) -> str:
    found = key_or_none(workload, **changes)
    assert found is not None
    assert len(found) == 64
    return found


def write(folder: Path, *, helper: str, power: int = 2, inside: str = "pass") -> str:
    (folder / f"{helper}.py").write_text(HELPER.format(power=power))
    file = folder / f"target_of_{helper}.py"
    file.write_text(TARGET.format(helper=helper, inside=inside))
    return f"{file}:workload"


def key_of_target(target: str, helper: str) -> str:
    """Load a target as a new process would, leaving nothing behind."""
    with loaded_and_gone(helper):
        return key(load_workload(target), target=target)


@contextlib.contextmanager
def loaded_and_gone(*helpers: str) -> Iterator[None]:
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for helper in helpers:
            sys.modules.pop(helper, None)
            sys.modules.pop(f"target_of_{helper}", None)


@pytest.mark.slow
def test_the_same_in_another_process_with_another_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [write(tmp_path, helper="helper_of_file"), "target_of_helper_of_module:workload"]
    write(tmp_path, helper="helper_of_module")
    monkeypatch.chdir(tmp_path)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    # Earlier tests may have changed the number of threads here.
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *targets], env=environment, stdout=subprocess.PIPE, text=True
    )
    # The files of tests are imported here and not there.
    monkeypatch.setattr(fingerprint_file, "is_installed", lambda file: not file.startswith(str(tmp_path)))
    here = []
    with loaded_and_gone("helper_of_file", "helper_of_module"):
        for target in targets:
            workload = load_workload(target)
            for length, named in itertools.product((4, 5), (target, None)):
                here.append(key(workload, target=named, shape={"seq_len": length}))
    assert child.communicate()[0].split() == here
    assert child.returncode == 0
    assert len(set(here[:4])) == len(set(here[4:])) == 4


def test_the_same_when_asked_twice_of_workloads_made_anew() -> None:
    assert key(make()) == key(make())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert key(make(model=model)) == key(make(model=model))


def test_the_same_after_the_functions_have_run_often() -> None:
    # CPython rewrites the bytecode of functions that run often.
    workload = make()
    before = key(workload)
    assert workload.batch is not None
    for _ in range(200):
        assert workload.loss is not None
        workload.loss(nn.Identity(), workload.batch(1))
    assert key(workload) == before


@pytest.mark.parametrize(
    "change",
    [
        {"width": 9},
        {"dropout": 0.2},
        {"optimizer": torch.optim.Adam},
        {"lr": 1e-4},
        {"length": 5},
        {"dtype": torch.bfloat16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_where_the_setup_changes(change: dict[str, Any]) -> None:
    assert key(make(Config(**change))) != key(make())


@pytest.mark.parametrize(
    "change",
    [
        {"shape": {"seq_len": 6}},
        {"limit_bytes": 2**31},
        {"limit_bytes": None},
        {"settings": {"accumulation": 2}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_where_the_question_changes(change: dict[str, Any]) -> None:
    assert key(make(), **change) != key(make())


def test_another_where_a_body_or_what_it_reads_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(make())
    assert key(make(loss=lambda model, batch: model(batch).pow(EXPONENT).sum())) != before
    monkeypatch.setitem(globals(), "EXPONENT", 3)
    assert key(make()) != before


def test_what_functions_hold_counts_wherever_they_hold_it() -> None:
    def held_by_closure(value: Any) -> Callable[[int], Any]:
        return lambda n: torch.randn(n, 4, 8) if value else None

    def held_by_default(n: int, value: Any = None) -> Any:
        return torch.randn(n, 4, 8) if value is not self else None

    self = object()
    keys = {
        name: key(make(batch=batch))
        for name, batch in {
            "number": held_by_closure(1),
            "other number": held_by_closure(2),
            "float": held_by_closure(1.0),
            "bool": held_by_closure(True),
            "namespace": held_by_closure(SimpleNamespace(layers=2)),
            "other namespace": held_by_closure(SimpleNamespace(layers=3)),
            "config": held_by_closure(Config()),
            "other config": held_by_closure(Config(width=16)),
            "tensor": held_by_closure(torch.ones(1)),
            "other tensor": held_by_closure(torch.ones(1, dtype=torch.int8)),
            "array": held_by_closure(SimpleNamespace(x=np.ones(3))),
            "other array": held_by_closure(SimpleNamespace(x=np.ones(4))),
            "partial": functools.partial(held_by_default, value=1),
            "other partial": functools.partial(held_by_default, value=2),
            "function": held_by_closure(mean_square),
        }.items()
    }
    assert len(set(keys.values())) == len(keys)


def test_values_inside_tensors_do_not_count() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    assert key(make(model=model)) == key(make(model=other))


def test_tied_weights_and_flags_count() -> None:
    def pair(*, tied: bool = False, frozen: bool = False, checkpointing: bool = False) -> nn.Module:
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        if tied:
            model[1].weight = model[0].weight
        model[0].requires_grad_(not frozen)
        model.gradient_checkpointing = checkpointing  # type: ignore[assignment]
        return model

    def key_of(**how: bool) -> str:
        return key(make(model=pair(**how), optimizer=None))

    assert len({key_of(), key_of(tied=True), key_of(frozen=True), key_of(checkpointing=True)}) == 4


def test_another_with_another_version_or_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(make())]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    keys.append(key(make()))
    monkeypatch.setattr(fingerprint_file, "__version__", "99")
    keys.append(key(make()))
    for name, value in (
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        ("MALLOC_ARENA_MAX", "1"),
        ("LD_PRELOAD", ""),
    ):
        monkeypatch.setenv(name, value)
        keys.append(key(make()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.append(key(make()))
    assert len(set(keys)) == len(keys)
    monkeypatch.setenv("EDITOR", "vi")
    assert key(make()) == keys[-1]


def test_another_where_the_default_dtype_changes() -> None:
    before = key(make())
    torch.set_default_dtype(torch.float64)
    try:
        assert key(make()) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_where_a_helper_beside_the_target_changes(tmp_path: Path) -> None:
    before = key_of_target(write(tmp_path, helper="helper_beside"), "helper_beside")
    assert key_of_target(write(tmp_path, helper="helper_beside"), "helper_beside") == before
    # Another length too: Python takes a cached file for current by its time in seconds and its size.
    changed = write(tmp_path, helper="helper_beside", power=33)
    assert key_of_target(changed, "helper_beside") != before
    # Also by what no function of the workload reaches.
    unchanged = write(tmp_path, helper="helper_beside")
    with (tmp_path / "helper_beside.py").open("a") as file:
        file.write("torch_is_told_elsewhere = True")
    assert key_of_target(unchanged, "helper_beside") != before


def test_another_where_the_target_itself_changes(tmp_path: Path) -> None:
    before = key_of_target(write(tmp_path, helper="helper_below"), "helper_below")
    changed = write(tmp_path, helper="helper_below", inside="torch.get_num_threads()")
    assert key_of_target(changed, "helper_below") != before


def test_the_length_and_class_of_data_count_and_its_first_samples() -> None:
    class Other(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return list.__getitem__(self, index)

    def key_of(data: Any) -> str:
        return key(make(batch=None, data=data))

    samples = [torch.zeros(4, 8)] * 10
    others = (samples[:9], Other(samples), [torch.zeros(5, 8)] * 10)
    assert len({key_of(samples), *map(key_of, others)}) == 4
    assert key_of(samples) == key_of(list(samples))
    assert key_of(samples[:1]) != key_of(samples)


def test_random_state_and_the_users_modules_stay() -> None:
    def draws(n: int) -> torch.Tensor:
        torch.manual_seed(n)
        return torch.randn(n, random.randint(1, 4), 8) * float(np.random.rand())

    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    named = {name for name, module in sys.modules.items() if "site-packages" not in str(module)}
    found = key(make(batch=draws))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == states[2]
    assert named <= sys.modules.keys()
    torch.manual_seed(8)
    random.seed(8)
    assert key(make(batch=draws)) == found


def test_no_optimizer_is_made() -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        raise KeyError("these are not my parameters")

    assert key(make(optimizer=optimizer)) == key(make(optimizer=optimizer))


def test_what_cannot_be_named_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no such checkpoint")

    def endless() -> Any:
        links: list[Any] = []
        links.append(links)
        return lambda n: torch.randn(n, len(links), 8)

    assert key_or_none(make(model=broken)) is None
    assert key_or_none(make(model=lambda: "no module")) is None
    assert key_or_none(make(batch=endless())) is None
    assert key_or_none(make(), on="no-such-device") is None
    assert key_or_none(make(), target="no_such_module:workload") is None
    monkeypatch.setattr(named_code, "_MOST_NAMES", 10)
    assert key_or_none(make()) is None


def test_users_prints_and_warnings_do_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    def talkative() -> nn.Module:
        import warnings

        print("number of parameters: 124M")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return nn.Linear(8, 8)

    key(make(model=talkative))
    assert capsys.readouterr().out == ""


def test_everything_in_the_key_is_plain_and_without_addresses() -> None:
    found = fingerprint_file._ingredients(make(), None, "cpu", 2**30, {}, {})
    assert " at 0x" not in json.dumps(found)


def test_bytes_that_are_merely_free_are_rounded_coarsely() -> None:
    assert rounded(None, was_asked=True) is None
    assert rounded(5 * 2**20 + 3, was_asked=True) == 5 * 2**20 + 3
    assert rounded(700 * 2**20, was_asked=False) == rounded(513 * 2**20, was_asked=False) == 512 * 2**20


def test_the_same_after_a_probe() -> None:
    workload = make(
        model=nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4), nn.LSTM(4, 4), Last()), optimizer=PlainDescent
    )
    assert workload.batch is not None
    with torch.no_grad():
        workload.model(workload.batch(2))  # type: ignore[call-arg]  # what is lazy has its shape from here on
    before = key(workload)
    run_probe(workload, 2, device=torch.device("cpu"))
    assert key(workload) == before


def test_the_name_of_a_workload_does_not_count() -> None:
    assert key(replace(make(), name="other")) == key(make())
