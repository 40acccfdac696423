"""A part imports only from parts listed above it; drawing a result is called from below and loads lazily."""

from __future__ import annotations

import ast
from pathlib import Path

import batchwright

ROOT = Path(batchwright.__file__).parent

# The order of docs/development/architecture.md, from the ground up.
PARTS = (
    "errors",
    "units",
    "user_files",
    "printed_result",
    "workload",
    "targets",
    "planning",
    "catalogue",
    "concepts",
    "state",
    "device",
    "ranks",
    "simulated",
    "trace",
    "timing",
    "memory",
    "fitting",
    "accumulate",
    "auditing",
    "noise",
    "scripts",
    "sampler",
    "tuning",
    "checkup",
    "report",
    "integrations",
    "cli",
)
# A result draws itself: `__rich__`, `_repr_html_` and `__str__` may call report/, inside the method.
DRAWING = {"__rich__", "_repr_html_", "__str__"}


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> list[tuple[ast.AST, str]]:
    imports: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("batchwright."):
            imports.append((node, (node.module or "").split(".")[1]))
        elif isinstance(node, ast.Import):
            imports += [(node, a.name.split(".")[1]) for a in node.names if a.name.startswith("batchwright.")]
    return imports


def lazily_drawn(tree: ast.AST) -> set[ast.AST]:
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in DRAWING
        for inner in ast.walk(node)
    }


def test_imports_point_down_only() -> None:
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        part = part_of(file)
        if part in ("__init__", "__main__"):
            continue
        tree = ast.parse(file.read_text())
        exempt = lazily_drawn(tree)
        for node, imported in imports_of(tree):
            if node in exempt and imported == "report":
                continue
            if PARTS.index(imported) > PARTS.index(part):
                wrong.append(f"{file.relative_to(ROOT)} imports {imported}")
    assert wrong == []


def test_every_part_is_in_the_order_and_in_the_map() -> None:
    parts = {part_of(file) for file in ROOT.rglob("*.py")} - {"__init__", "__main__"}
    assert parts <= set(PARTS)
    architecture = (ROOT.parents[1] / "docs" / "development" / "architecture.md").read_text()
    assert all(f"{part}/" in architecture or f"{part}.py" in architecture for part in parts)


def test_no_relative_imports() -> None:
    # They would slip past the check above.
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), file
