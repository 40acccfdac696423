"""What the command imports, seen from a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from batchwright import cli

if TYPE_CHECKING:
    from tests.conftest import Run

WATCH = """
import json, sys
from batchwright import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as leaving:
    code = leaving.code
print("\\n" + json.dumps([code, sorted(m for m in sys.modules if "." not in m)]))
"""


def imported_by(*args: str, expected_code: int = 0) -> set[str]:
    done = subprocess.run([sys.executable, "-c", WATCH, *args], capture_output=True, text=True, check=True)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == expected_code, done.stderr
    return set(modules)


@pytest.mark.parametrize(
    "args",
    [
        ["plan", "1024", "--micro-batch", "48", "--devices", "4", "--samples", "100000"],
        ["plan", "32", "--micro-batch", "8", "--for", "transformers"],
        ["plan", "32", "--micro-batch", "8", "--json"],
        ["advise", "slow", "--micro-batch", "4"],
        ["explain", "accumulation"],
        ["estimate", "llama-3-8b"],
        ["recommend", "7b", "--memory", "24GiB"],
    ],
)
def test_planning_never_imports_torch_or_numpy(args: list[str]) -> None:
    assert not {"torch", "numpy"} & imported_by(*args)


@pytest.mark.parametrize(
    "args",
    [
        ["foo"],
        ["nowhere.py:workload"],
        ["no_such_module:workload"],
        ["json:loads", "--memory", "lots"],
        ["json:loads", "--limit", "0"],
        ["json:loads", "--limit", "9", "--scale", "crops"],
        ["json:loads", "--scale", "crops:2=1.0,else=0.5"],
        ["json:loads", "--limit", "9", "--scale", "crops:2=1.0,else=0.5", "--shape", "depth=3"],
        ["json:loads", "--limit", "4", "--start-at", "9"],
        ["json:loads", "--shape", "crops"],
        ["json:loads", "--shape", "crops=2,2"],
        ["json:loads", "--margin", "5%"],
        ["json:loads", "--then", "echo {size}"],
    ],
)
def test_wrong_usage_of_fit_is_said_before_torch_is_imported(args: list[str]) -> None:
    assert not {"torch", "numpy"} & imported_by("fit", *args, expected_code=2)


def test_help_imports_none_of_them_nor_rich() -> None:
    assert not {"torch", "numpy", "rich"} & imported_by("--help")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, batchwright; print(sorted({'torch', 'numpy', 'rich', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_help_lines_of_the_group_are_those_of_the_commands() -> None:
    context = click.Context(cli.group)
    for name, line in cli.COMMANDS.items():
        command = cli.group.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert (command.help or "").splitlines()[0] == line


def test_python_m_batchwright_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchwright", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("batchwright ")


def test_a_mistake_of_our_own_is_one_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchwright.planning import plan

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr(plan, "plan", fails)
    monkeypatch.setattr("batchwright.cli.plan.plan", fails, raising=False)
    fails.__code__ = fails.__code__.replace(co_filename=plan.__file__)
    ran = run("plan", "256", "--micro-batch", "8")
    assert ran.code == 1
    assert ran.err.startswith(
        "Error: batchwright itself failed, not your code: ZeroDivisionError: nothing to divide by"
    )
    assert "Traceback" not in ran.err
    monkeypatch.setenv("BATCHWRIGHT_TRACEBACK", "1")
    assert "Traceback" in run("plan", "256", "--micro-batch", "8").err
