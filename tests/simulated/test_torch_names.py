"""The private names of torch that batchwright leans on are there; where one is not, a message says so."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import batchwright
from batchwright import simulated
from batchwright.errors import UnsupportedTorchError
from batchwright.simulated import check_torch, has_name

ROOT = Path(batchwright.__file__).parent
PROJECT = Path(__file__).parents[2]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_names() -> set[str]:
    """Every name of torch with a private part that the source imports, or reaches by its dots and does not set."""
    names: set[str] = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(dotted(node))
    return {
        name.removeprefix("torch.")
        for name in names
        if name.startswith("torch.") and any(part.startswith("_") and "__" not in part for part in name.split("."))
    }


def test_every_private_name_that_the_source_uses_is_in_this_torch() -> None:
    names = private_names()
    assert "_C._get_mkldnn_enabled" in names
    assert sorted(name for name in names if not has_name(name)) == []


def test_what_is_looked_up_first_is_there() -> None:
    check_torch()


def test_a_torch_without_one_of_them_is_refused_by_its_version_and_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simulated.NEEDED, "utils.no_such_module.function", "simulated cards")
    with pytest.raises(UnsupportedTorchError, match=r"torch \S+ lacks .*\n.*no_such_module.function, for simulated"):
        check_torch.__wrapped__()


def test_the_range_is_the_same_wherever_it_is_written() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    oldest = simulated.OLDEST.removesuffix(".0")
    assert f"torch>={oldest}" in project["dependencies"]
    python = project["requires-python"].removeprefix(">=")
    assert f"Python {python} or newer, torch {oldest} or newer" in (PROJECT / "README.md").read_text()
    assert f"Python {python} 或更新的版本、torch {oldest} 或更新的版本" in (PROJECT / "README.zh.md").read_text()
    limits = (PROJECT / "docs" / "reference" / "tested.md").read_text()
    assert f"torch {oldest} and newer, Python {python} and newer" in limits
    assert f"torch=={simulated.OLDEST} " in (PROJECT / "Makefile").read_text()
    pinned = re.search(r"^torch==(\S+)$", (PROJECT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    for version in (simulated.OLDEST, pinned[1], simulated.NEWEST):
        assert version in limits


def test_the_pythons_of_the_classifiers_are_those_that_were_run() -> None:
    classifiers = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["classifiers"]
    limits = (PROJECT / "docs" / "reference" / "tested.md").read_text()
    versions = [line.rpartition(" ")[2] for line in classifiers if re.search(r":: 3\.\d+$", line)]
    assert versions
    assert [version for version in versions if not re.search(rf"Python {re.escape(version)}\.\d+", limits)] == []
