"""`batchwright recommend` as a person types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "recommend.md"
KEYS = {
    "recommended_batch_size",
    "memory_per_sample",
    "estimated_memory_usage",
    "gradient_accumulation_for_32",
    "gradient_accumulation_for_64",
}


def test_one_size_and_one_memory(run: Run) -> None:
    ran = run("recommend", "7b", "--memory", "24GiB", "--task", "generation")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("llama-2-7b in 24 GiB: micro-batch 1")
    assert "rule of thumb" in ran.out


def test_lists_and_repeats_give_the_same_table(run: Run) -> None:
    listed = run("recommend", "7b,13b", "--memory", "24GB,40GB")
    repeated = run("recommend", "7b", "13b", "--memory", "24GB", "--memory", "40GB")
    assert listed == repeated
    assert len(re.findall(r"^(?:7b|13b) +\d", listed.out, re.MULTILINE)) == 4


def test_as_json(run: Run) -> None:
    data = json.loads(run("recommend", "7b", "--memory", "24GiB", "--json").out)
    assert set(data) >= KEYS
    assert set(data["rule_of_thumb"]) >= KEYS
    assert (data["schema"], data["source"], data["tuning"]) == (1, "formula", "lora")


def test_nothing_fits_is_exit_code_1_with_the_memory_needed(run: Run) -> None:
    ran = run("recommend", "70b", "--memory", "24GiB")
    assert ran.code == 1
    assert "micro-batch 1 needs 147 GiB" in ran.out
    assert run("recommend", "1b,70b", "--memory", "24GiB").code == 0
    data = json.loads(run("recommend", "70b", "--memory", "24GiB", "--json").out)
    assert data["recommended_batch_size"] is None
    assert data["needed_bytes"] > 24 * 2**30


@pytest.mark.parametrize(
    "args",
    [
        ["7b"],
        ["--memory", "24GiB"],
        ["7b", "--memory", "lots"],
        ["7q", "--memory", "24GiB"],
        ["7b", "--memory", "24GiB", "--task", "poetry"],
        ["7b", "--memory", "24GiB", "--tuning", "half"],
        ["7b", "--memory", "24GiB", "--precision", "int3"],
        ["7b", "--memory", "24GiB", "--seq-len", "0"],
        [",", "--memory", "24GiB"],
    ],
)
def test_bad_input_is_exit_code_2(run: Run, args: list[str]) -> None:
    ran = run("recommend", *args)
    assert (ran.code, ran.out) == (2, "")


def test_every_example_of_the_page_prints_what_it_shows(run: Run) -> None:
    examples = re.findall(r"```console\n\$ batchwright (.+)\n((?:.*\n)*?)```", PAGE.read_text(encoding="utf-8"))
    assert len(examples) >= 2
    for command, shown in examples:
        assert run(*command.split()).out == shown, command


def test_no_torch_is_imported() -> None:
    code = (
        "import sys\nfrom batchwright import cli\n"
        "try:\n    cli.main(['recommend', '7b', '--memory', '24GiB'])\n"
        "except SystemExit as leaving:\n    assert leaving.code == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
