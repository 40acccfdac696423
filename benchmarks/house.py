"""How large and how easy to walk the code is, counted: now, and at any commit before.

    python benchmarks/house.py                      the checkout
    python benchmarks/house.py --against c9af590    that commit and the checkout, side by side

"Apart" leaves out what runs a user's own command (`OF_SCRIPTS`), which came after c9af590.

Statements are counted by the grammar, without docstrings; blank lines and comments do not count. A catch-all name is an
identifier of STYLE.md's list, wherever it is bound: assigned, an argument, a loop variable, a function. Options are
counted per command, as click knows them, without --help and --version.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import math
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CATCH_ALLS = ("told", "said", "asked", "found", "made", "each", "there", "_why", "_when")
OF_SCRIPTS = ("scripts/", "tuning/script_stages.py", "report/text/script_text.py", "trace/programs/")
LARGEST_FOLDER_BUT_ROOT = "files in the largest folder"


def statements(tree: ast.AST) -> int:
    """Count the statements of a file, docstrings left out."""
    count = 0
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        count += isinstance(node, ast.stmt) and not is_text
    return count


def bound_names(tree: ast.AST) -> list[str]:
    """Return every name that a file binds."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
    return names


def importers(trees: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """Return for every module of the package those that import it."""
    by: dict[str, set[str]] = collections.defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for module in wanted:
                if module in trees and module != name:
                    by[module].add(name)
    return by


def count_options(src: Path) -> int:
    """Ask the command of a checkout for its options, in a process of its own."""
    code = (
        "import click\n"
        "from batchwright.cli import group as main\n"
        "ctx = click.Context(main)\n"
        "print(sum(isinstance(p, click.Option) and p.name not in ('help', 'version')"
        " for n in main.list_commands(ctx) for p in main.get_command(ctx, n).params))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(src)}, capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


def count_house(root: Path, *, leave_out: tuple[str, ...] = ()) -> dict[str, float]:
    """Count one checkout, but for the files whose paths begin so."""
    package = root / "src" / "batchwright"
    files = sorted(p for p in package.rglob("*.py") if not p.relative_to(package).as_posix().startswith(leave_out))
    trees = {
        ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in files
    }
    lines = [len(path.read_text().splitlines()) for path in files if path.name != "__init__.py"]
    by = importers(trees)
    folders = collections.Counter(path.parent for path in files if path.name != "__init__.py")
    names = collections.Counter(name for tree in trees.values() for name in bound_names(tree))
    public = ast.parse((package / "__init__.py").read_text())
    exported = next(
        len(node.value.elts)
        for node in ast.walk(public)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
        and isinstance(node.value, ast.List)
    )
    basenames = collections.Counter(path.name for path in files if path.name != "__init__.py")
    return {
        "files": len(files),
        "lines": sum(len(path.read_text().splitlines()) for path in files),
        "statements": sum(statements(tree) for tree in trees.values()),
        "median lines of a file": statistics.median(lines),
        "longest file": max(lines),
        "files with one importer": sum(len(by[name]) == 1 for name in trees),
        LARGEST_FOLDER_BUT_ROOT: max(folders.values()),
        "basenames used twice": sum(count > 1 for count in basenames.values()),
        "options": count_options(root / "src"),
        "public names": exported,
        "dict[str, Any]": sum(path.read_text().count("dict[str, Any]") for path in files),
        "catch-all names": sum(names[name] for name in CATCH_ALLS),
        "words of README": len(re.findall(r"\S+", (root / "README.md").read_text())),
    }


def at_commit(root: Path, commit: str) -> dict[str, float]:
    """Count a commit, unpacked into a folder that goes again."""
    packed = subprocess.run(["git", "archive", commit, "src", "README.md"], cwd=root, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return count_house(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="count this commit too")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    columns = {"now": count_house(root), "apart": count_house(root, leave_out=OF_SCRIPTS)}
    for row in ("options", "public names", "words of README"):
        columns["apart"][row] = math.nan  # not counted apart
    if options.against:
        columns = {options.against: at_commit(root, options.against), **columns}
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for row in columns["now"]:
        print(
            f"| {row} | "
            + " | ".join(("" if math.isnan(column[row]) else f"{column[row]:,.0f}") for column in columns.values())
            + " |"
        )


if __name__ == "__main__":
    main()
