"""A workload from the user's own file or module, and each way that goes wrong."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.targets import is_installed_or_ours, load_workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Run

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
        # Only the user's own: a library that was imported meanwhile cannot be imported twice.
        if not is_installed_or_ours(getattr(sys.modules[name], "__file__", None)):
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


ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=1)
parser.add_argument("--title", default="untitled")
typed = parser.parse_args()
import torch
import batchwright as bw


def workload():
    return bw.Workload(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(parser.parse_args().layers))),
        batch=lambda n: torch.ones(n, 4),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        name=f"{typed.title} {typed.layers}",
    )
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "reads_arguments.py"
    path.write_text(ARGPARSE)
    return path


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("", "untitled 1"),
        (" --", "untitled 1"),
        (" -- --layers 3 --title 'a: b'", "a: b 3"),
        (" -- --title='a -- b'", "a -- b 1"),
    ],
)
def test_a_targets_argparse_reads_its_own_arguments(script: Path, arguments: str, name: str) -> None:
    before = sys.argv
    assert load_workload(f"{script}:workload{arguments}").name == name
    assert sys.argv is before


def test_an_argument_that_a_target_does_not_know_is_its_own_error(script: Path) -> None:
    before = sys.argv
    with pytest.raises(SystemExit):
        load_workload(f"{script}:workload -- --nope")
    assert sys.argv is before


def test_arguments_that_cannot_be_read_are_refused(script: Path) -> None:
    with pytest.raises(InvalidInputError, match="the target's arguments cannot be read"):
        load_workload(f"{script}:workload -- 'open")


def test_functions_that_read_arguments_later_find_them_in_the_command_and_in_its_probes(script: Path, run: Run) -> None:
    words = (f"{script}:workload", "--json", "--", "--layers", "3")
    estimate = json.loads(run("estimate", *words).out)
    assert estimate["parts"]["weights"] == 3 * 4 * (4 + 4 * 4)
    ran = run("fit", words[0], "--limit", "2", "--no-cache", *words[1:])
    assert (ran.code, json.loads(ran.out)["micro_batch"]) == (0, 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["estimate", "--", "--layers", "3"], "try: a target before --, as in"),
        (["estimate", "gpt2", "--", "--layers", "3"], "'gpt2' names no function of a file or module"),
    ],
)
def test_arguments_without_a_target_say_where_they_go(run: Run, words: list[str], problem: str) -> None:
    ran = run(*words)
    assert ran.code == 2
    assert problem in ran.err
