"""Checking configs: the triangle against DeepSpeed's rule, the files people really have, and the broken ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.planning.config_check import judge_triangle

if TYPE_CHECKING:
    from pathlib import Path

small = st.integers(1, 40)
maybe = st.one_of(st.none(), small)


def filled_in(total: int | None, micro: int | None, steps: int | None, devices: int) -> tuple[int, int, int] | None:
    """DeepSpeed's own way: fill what is missing by integer division, then demand the product."""
    if total is None and micro is None:
        return None
    if total is None:
        assert micro is not None
        steps = steps or 1
        total = micro * steps * devices
    elif micro is None:
        steps = steps or 1
        micro = total // devices // steps
    elif steps is None:
        steps = total // micro // devices
    return (total, micro, steps) if micro > 0 and steps > 0 and total == micro * steps * devices else None


@settings(max_examples=500)
@given(total=st.one_of(st.none(), st.integers(1, 400)), micro=maybe, steps=maybe, devices=st.integers(1, 8))
def test_the_verdict_is_deepspeeds_and_every_change_mends_it(
    total: int | None, micro: int | None, steps: int | None, devices: int
) -> None:
    verdict = judge_triangle(total, micro, steps, devices)
    expected = filled_in(total, micro, steps, devices)
    if expected:
        assert verdict.agrees
        assert (verdict.total, verdict.micro_batch, verdict.accumulation) == expected
        return
    assert not verdict.agrees
    assert verdict.changes
    for change in verdict.changes:
        if change.startswith("set "):
            continue
        numbers: dict[str, int | None] = {
            "train_batch_size": total,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
            "devices": devices,
        }
        for part in change.split(" and "):
            name, _, value = part.partition(" ")
            numbers[name.rstrip(":")] = int(value.split()[-1].replace(",", ""))
        changed = list(numbers.values())
        assert filled_in(changed[0], changed[1], changed[2], changed[3] or 1), change


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_auto_is_left_to_the_trainer(tmp_path: Path) -> None:
    config = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    check = bw.check_config(write(tmp_path / "ds.json", config), devices=4)
    assert check.agrees
    assert check.effective_batch is None


def test_training_arguments_in_json_and_yaml(tmp_path: Path) -> None:
    content = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "output_dir": "out"}
    from_json = bw.check_config(write(tmp_path / "args.json", content), devices=5)
    text = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 4\noutput_dir: out\n"
    from_yaml = bw.check_config(write(tmp_path / "args.yaml", text), devices=5)
    assert from_json.agrees
    assert from_json.effective_batch == from_yaml.effective_batch == 80
    assert from_yaml.findings == ("4 x 4 x 5 devices = 80",)
    assert str(from_yaml).splitlines()[0].endswith("args.yaml: TrainingArguments agrees for 5 devices")


def test_auto_beside_numbers_still_has_to_divide(tmp_path: Path) -> None:
    config = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}
    check = bw.check_config(write(tmp_path / "ds.json", config), devices=4)
    assert not check.agrees
    assert check.changes == ("train_batch_size: 100 -> 96", "train_batch_size: 100 -> 108")


def test_a_deepspeed_config_is_recognised_by_its_sections(tmp_path: Path) -> None:
    config = {"gradient_accumulation_steps": 4, "fp16": {"enabled": True}}
    assert not bw.check_config(write(tmp_path / "ds.json", config)).agrees


def test_a_key_that_deepspeed_ignores_is_named_also_inside_arguments(tmp_path: Path) -> None:
    inner = {"train_batch_size": 64.0, "train_micro_batch_size": 4}
    check = bw.check_config(write(tmp_path / "ds.json", inner), devices=4)
    assert check.effective_batch == 64
    assert "'train_micro_batch_size' is not a key of DeepSpeed" in check.findings[1]
    outer = {"per_device_train_batch_size": 4, "deepspeed": {"train_micro_batch_size": 3}}
    assert not bw.check_config(write(tmp_path / "args.json", outer), devices=4).agrees


def test_auto_find_batch_size_is_warned_of(tmp_path: Path) -> None:
    content = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
    assert "the effective batch falls" in bw.check_config(write(tmp_path / "args.json", content)).findings[-1]


def test_what_is_not_set_is_taken_at_the_default_and_said(tmp_path: Path) -> None:
    check = bw.check_config(write(tmp_path / "args.yaml", "gradient_accumulation_steps: 2\n"))
    assert check.effective_batch == 16
    assert "per_device_train_batch_size is not set; transformers takes 8" in check.findings


def test_the_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    assert fields["per_device_train_batch_size"].default == 8
    assert fields["gradient_accumulation_steps"].default == 1


@pytest.mark.parametrize("kind", ["inline", "file"])
def test_training_arguments_are_compared_with_the_deepspeed_config_they_name(tmp_path: Path, kind: str) -> None:
    inner = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    write(tmp_path / "ds.json", inner)
    outer = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "deepspeed": inner if kind == "inline" else "ds.json",
    }
    check = bw.check_config(write(tmp_path / "args.json", outer), devices=5)
    assert not check.agrees
    assert "train_batch_size is 64" in check.findings[-1]
    assert check.changes[0].startswith("train_batch_size: 64 -> 80")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not valid JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ("a.json", "", "is empty"),
        ("a.json", "[1, 2]", "a mapping of settings is expected"),
        ("a.json", '{"lr": 1}', "neither a DeepSpeed config nor a file of TrainingArguments"),
        ("a.json", '{"train_batch_size": 64, "train_batch_size": 32}', "sets 'train_batch_size' twice"),
        ("a.yaml", "per_device_train_batch_size: 4\nper_device_train_batch_size: 8", "twice"),
        ("a.yaml", "{per_device_train_batch_size: 0}", "received 0."),
        ("a.json", '{"train_batch_size": 64, "per_device_train_batch_size": 8}', "not clear which of the two reads it"),
        (
            "a.json",
            '{"per_device_train_batch_size": 4, "deepspeed": "a\\u0000b"}',
            "a file name or a mapping is expected",
        ),
        ("a.json", '{"per_device_train_batch_size": 4, "deepspeed": ""}', "a file name or a mapping is expected"),
        ("a.json", '{"train_batch_size": 0}', "must be a whole number from 1 to 10^15; received 0."),
        ("a.json", '{"train_batch_size": 2.5}', "received 2.5."),
        ("a.json", '{"train_batch_size": "many"}', "received 'many'."),
        ("a.json", '{"train_batch_size": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("a.json", "[" * 100_000, "a.json'"),
        ("a.yaml", "a: [1", "not valid YAML"),
        ("a.yaml", "just words", "a mapping of settings is expected"),
        ("a.yaml", "per_device_train_batch_size: -4", "received -4."),
        ("a.yaml", "per_device_train_batch_size: 4\ndeepspeed: 7", "a file name or a mapping is expected"),
        ("a.yaml", "per_device_train_batch_size: 4\ndeepspeed: none.json", "no config file at 'none.json'"),
    ],
)
def test_a_broken_file_is_one_clear_message(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        bw.check_config(write(tmp_path / name, content))
    assert message in str(error.value)


def test_a_missing_file_names_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "ds_config.json", {})
    with pytest.raises(InvalidInputError, match=r"one of ds_config\.json in the same folder"):
        bw.check_config(tmp_path / "ds_confg.json")


@pytest.mark.parametrize("path", ["", None, 7, "a\0b"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(InvalidInputError, match="named by its path"):
        bw.check_config(path)


def test_yaml_without_its_reader_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from batchwright.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'batchwright\[transformers\]'"):
        bw.check_config(write(tmp_path / "args.yaml", "gradient_accumulation_steps: 2\n"))
