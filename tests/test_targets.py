"""A workload from the user's own file or module, and each way that goes wrong."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.targets import load_workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = """
from dataclasses import dataclass
from functools import cache
from json import dumps
from shutil import get_terminal_size

import torch

import batchwright as bw


@dataclass
class Config:
    width: int = 8


def workload():
    return bw.Workload(
        model=lambda: torch.nn.Linear(Config().width, 1),
        batch=lambda n: torch.randn(n, Config().width),
        loss=lambda model, batch: model(batch).mean(),
    )


ready = workload()
layer = torch.nn.Linear(1, 1)


@cache
def cached():
    return workload()


def _private():
    return workload()


def named():
    return bw.Workload(model=ready.model, batch=ready.batch, loss=ready.loss, name="mine")


def number():
    return 3


def wants_width(width):
    return workload()


def broken():
    raise KeyError("no such layer")
"""


@pytest.fixture(autouse=True)
def imports_are_put_back() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if not name.startswith("torch"):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_training.py"
    path.write_text(FILE)
    return path


def test_a_function_of_a_file_is_called(file: Path) -> None:
    workload = load_workload(f"{file}:workload")
    assert isinstance(workload, bw.Workload)
    assert workload.name == f"{file}:workload"


def test_a_name_of_its_own_is_kept(file: Path) -> None:
    assert load_workload(f"{file}:named").name == "mine"


def test_a_workload_that_is_there_already_is_taken(file: Path) -> None:
    assert isinstance(load_workload(f"{file}:ready"), bw.Workload)


def test_a_function_of_a_module_in_this_folder_is_called(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert load_workload("my_training:workload").name == "my_training:workload"


def test_neighbours_of_a_file_are_imported(file: Path) -> None:
    (file.parent / "beside.py").write_text("from beside_too import workload\n")
    (file.parent / "beside_too.py").write_text(FILE)
    assert isinstance(load_workload(f"{file.parent / 'beside.py'}:workload"), bw.Workload)


def test_a_file_may_be_loaded_twice_and_may_bear_the_name_of_a_module(file: Path) -> None:
    twin = file.with_name("json.py")
    twin.write_text(FILE)
    for _ in range(3):
        assert isinstance(load_workload(f"{twin}:workload"), bw.Workload)
    import json

    assert hasattr(json, "dumps")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("train.py", "try: train.py:workload"),
        ("", "received ''."),
        (":workload", "received ':workload'."),
        ("train.py:", "received 'train.py:'."),
        ("train.py:work load", "received 'train.py:work load'."),
        ("nowhere.py:workload", "no file at 'nowhere.py'."),
        ("no_such_module:workload", "no module 'no_such_module'; a file is written with its ending"),
        ("json.nothing:workload", "no module 'json.nothing'"),
        (".train:workload", "no module '.train'"),
        ("train..inner:workload", "no module 'train..inner'"),
        ("json:nothing", "'json' has no function 'nothing'; it has: none that takes no arguments."),
    ],
)
def test_a_target_that_leads_nowhere_says_why(target: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        load_workload(target)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("wrkload", "has no function 'wrkload'; it has: broken, cached, named, number, ready, workload."),
        ("number", "returned 3; a batchwright.Workload is expected."),
        ("wants_width", "cannot be called without arguments: missing a required argument: 'width'."),
    ],
)
def test_a_function_that_gives_no_workload_says_why(file: Path, function: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        load_workload(f"{file}:{function}")
    assert said in str(refused.value)


def test_the_users_own_error_is_left_alone(file: Path) -> None:
    with pytest.raises(KeyError, match="no such layer"):
        load_workload(f"{file}:broken")


@pytest.mark.parametrize(("source", "kind"), [("import no_such_package", ModuleNotFoundError), ("def (", SyntaxError)])
def test_a_file_that_does_not_load_fails_as_it_would_by_itself(
    file: Path, source: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(source)
    monkeypatch.chdir(file.parent)
    for target in (f"{file}:workload", "my_training:workload"):
        with pytest.raises(kind):
            load_workload(target)
    assert "my_training" not in sys.modules


def test_a_missing_package_whose_name_begins_like_the_module_is_the_users_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    file.write_text("import my_train")
    with pytest.raises(ModuleNotFoundError, match="'my_train'"):
        load_workload("my_training:workload")
