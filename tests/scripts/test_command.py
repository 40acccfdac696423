"""A command behind `--`: taken apart as its launcher would, filled in, and nothing else of it touched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.scripts.command import check_program, read_command, set_option

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("words", "program", "arguments", "is_module", "num_processes"),
    [
        ("train.py --lr 1", "train.py", "--lr 1", False, 1),
        ("python train.py --lr 1", "train.py", "--lr 1", False, 1),
        ("python3.11 -u -W ignore -X dev train.py -m x", "train.py", "-m x", False, 1),
        ("python -m package.train --bs 8", "package.train", "--bs 8", True, 1),
        ("torchrun --nproc-per-node 4 train.py --bs 8", "train.py", "--bs 8", False, 4),
        ("torchrun --standalone --nnodes=2 --nproc_per_node=4 -m package.train -v", "package.train", "-v", True, 8),
        ("torchrun --nproc-per-node gpu train.py", "train.py", "", False, 1),
        ("accelerate launch --num_processes 2 --mixed_precision bf16 train.py --bs 8", "train.py", "--bs 8", False, 2),
        ("accelerate launch --multi_gpu train.py", "train.py", "", False, 1),
        ("deepspeed --num_gpus 2 train.py --deepspeed ds.json", "train.py", "--deepspeed ds.json", False, 2),
        ("CUDA_VISIBLE_DEVICES=0 X= python train.py a=b", "train.py", "a=b", False, 1),
    ],
)
def test_launchers_are_understood(
    words: str, program: str, arguments: str, is_module: bool, num_processes: int
) -> None:
    command = read_command(words.split())
    assert (command.program, command.arguments) == (program, tuple(arguments.split()))
    assert (command.is_module, command.num_processes) == (is_module, num_processes)
    assert str(command) == words


def test_a_bare_python_is_this_one_and_a_path_is_itself() -> None:
    assert read_command(["python", "train.py"]).interpreter == sys.executable
    assert read_command([sys.executable, "train.py"]).interpreter == sys.executable


@pytest.mark.parametrize(
    ("start", "interpreter"),
    [
        ("#!{python}\n# -*- coding: utf-8 -*-\n", sys.executable),
        ("#!/usr/bin/env python3\n", sys.executable),
        ('#!/bin/sh\n\'\'\'exec\' "{python}" "$0" "$@"\n', sys.executable),
        ("#!/bin/sh\npython train.py\n", None),
        ("\x7fELF python \n", None),
    ],
)
def test_a_command_that_a_package_installed_is_the_python_file_that_it_is(
    start: str, interpreter: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer").write_text(start.format(python=sys.executable))
    (tmp_path / "trainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if interpreter is None:
        with pytest.raises(InvalidInputError, match="not a Python program"):
            read_command(["trainer", "fit"])
        return
    command = read_command(["trainer", "fit", "--bs", "8"])
    assert (command.program, command.interpreter) == (str(tmp_path / "trainer"), interpreter)
    assert str(command.with_option("--bs", 4)) == "trainer fit --bs 4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the command is empty"),
        (["A=1"], "no program"),
        (["bash", "run.sh"], "not a Python program"),
        (["python"], "runs no file"),
        (["python", "-c", "print(1)"], "runs no file"),
        (["python", "-m"], "no module"),
        (["nowhere/python", "train.py"], "no interpreter"),
        (["accelerate", "config"], "accelerate launch"),
        (["torchrun", "--nproc-per-nod", "2"], "torchrun does not understand"),
        (["torchrun", "--nproc-per-node", "0", "train.py"], "would start no process: --nproc-per-node 0"),
    ],
)
def test_what_cannot_be_run_is_said(words: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_command(words)


def test_a_script_is_looked_for_where_it_will_run(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.py").touch()
    command = read_command(["python", "other.py"])
    check_program(command, tmp_path / "inner")
    check_program(read_command(["python", "-m", "any.module"]), tmp_path)
    with pytest.raises(InvalidInputError, match=r"(?s)no script 'other.py' in .*cwd="):
        check_program(command, tmp_path)


def test_only_exact_placeholders_are_filled() -> None:
    words = [
        "train.py",
        "--bs={micro_batch}",
        "{accumulation}",
        '{"a": {"b": 1}}',
        "${oc.env:X}",
        "{ micro_batch }",
        "{}",
    ]
    command = read_command(words)
    assert command.placeholders == {"micro_batch", "accumulation"}
    filled = command.fill({"micro_batch": 8, "accumulation": 4})
    assert filled.arguments == ("--bs=8", "4", '{"a": {"b": 1}}', "${oc.env:X}", "{ micro_batch }", "{}")
    assert filled.words == ("train.py", *filled.arguments)
    assert command.fill({}) == command


@pytest.mark.parametrize(
    ("arguments", "option", "expected"),
    [
        ("--bs 4 --lr 1", "--bs", "--bs 8 --lr 1"),
        ("--bs=4 --lr 1", "--bs", "--bs=8 --lr 1"),
        ("--lr 1", "--bs", "--lr 1 --bs 8"),
        ("--bs 4 --bs 5", "--bs", "--bs 4 --bs 8"),
        ("train.batch_size=4 lr=1", "train.batch_size=", "train.batch_size=8 lr=1"),
        ("+batch_size=4", "batch_size=", "+batch_size=8"),
        ("lr=1", "batch_size=", "lr=1 batch_size=8"),
        ("--bs-eval 4", "--bs", "--bs-eval 4 --bs 8"),
        ("-b 4", "-b", "-b 8"),
    ],
)
def test_an_option_is_set_in_its_place(arguments: str, option: str, expected: str) -> None:
    assert " ".join(set_option(arguments.split(), option, 8)) == expected


@given(st.lists(st.text(max_size=8)), st.sampled_from(["--bs", "bs="]))
def test_setting_an_option_twice_is_setting_it_once(arguments: list[str], option: str) -> None:
    once = set_option(arguments, option, 8)
    assert set_option(set_option(arguments, option, 4), option, 8) == once
    assert set_option(once, option, 8) == once
