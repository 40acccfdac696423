"""The calculator: it joins what the library answers, reads any address, and needs neither torch nor numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.memory.calculator import (
    SHARDINGS,
    Question,
    answer_query,
    check_text,
    list_choices,
)
from batchwright.memory.formula_tensors import OPTIMIZERS, PRECISIONS, TUNINGS


def test_it_says_what_the_library_says() -> None:
    query = (
        "model=qwen2.5-7b&card=a100-40gb&batch=100&devices=3&tuning=qlora&seq_len=1024&sharding=zero-2&optimizer=sgd"
    )
    answer = answer_query(query)
    size = answer["plan"]["micro_batch"]
    assert answer["plan"] == bw.plan(100, micro_batch=answer["card"]["largest_micro_batch"], devices=3).to_dict() | {
        "table": answer["plan"]["table"]
    }
    named = bw.estimate_named(
        "qwen2.5-7b", micro_batch=size, seq_len=1024, tuning="qlora", zero=2, devices=3, optimizer="sgd"
    )
    assert answer["estimate"] == named.to_dict()
    assert answer["config"].startswith(f"# micro-batch {size} x")
    assert answer["plan"]["table"][0]["peak_bytes"] == named.peak


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    question = Question.read("model=gpt2&card=t4&seq_len=512")
    answer = answer_query(question.query)
    largest, usable = answer["card"]["largest_micro_batch"], answer["card"]["usable_bytes"]
    assert question.estimate(largest).peak <= usable < question.estimate(largest + 1).peak


def test_the_power_of_two_below_is_what_recommend_says_of_the_same_step() -> None:
    answer = answer_query("model=llama-2-7b&card=a100-80gb&tuning=qlora&seq_len=512")
    recommended = bw.recommend("llama-2-7b", on="a100-80gb", tuning="qlora", seq_len=512, task="generation").answers[0]
    largest = answer["card"]["largest_micro_batch"]
    assert recommended.recommended_batch_size == 2 ** (largest.bit_length() - 1)


def test_the_command_prints_the_same_numbers() -> None:
    answer = answer_query("model=gpt2&card=h100-80gb&seq_len=256&batch=64&checkpointing=yes")
    command = answer["commands"]["again"]
    code = command.removeprefix('python -c "').removesuffix('"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(Question.read(answer["query"]).estimate(64)).splitlines()[0]


def test_what_does_not_fit_says_what_would() -> None:
    answer = answer_query("model=llama-3-8b&card=rtx-3060&tuning=full&devices=8")
    assert not answer["fits"]
    assert "does not fit" in answer["summary"]
    needed = {(change["name"], change["value"]): change["needed_bytes"] for change in answer["changes"]}
    assert needed[("tuning", "qlora")] < needed[("tuning", "lora")]
    assert ("sharding", "zero-3") in needed
    assert all(bytes_ < answer["estimate"]["peak_bytes"]["allocated"] for bytes_ in needed.values())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("model=lama-3-8b", "no model is named 'lama-3-8b' in the catalogue."),
        ("card=a100", "the card 'a100' comes in 2 sizes."),
        ("batch=1e9", "batch must be a whole number"),
        ("batch=" + "9" * 5000, "batch must be a whole number"),
        ("seq_len=0", "seq-len must be a whole number from 1"),
        ("seq_len=99999999", "takes sequences of up to"),
        ("devices=-3", "devices must be a whole number from 1"),
        ("sharding=zero-3", "zero-3 shares out over devices, and there is 1."),
        ("sharding=zero-9&devices=2", "sharding must be one of none, zero-1"),
        ("checkpointing=maybe", "checkpointing must be one of no, yes"),
        ("modle=gpt2", "a question has no 'modle'."),
        ("batch=1&batch=2", "batch is there twice."),
        ("framework=keras", "unknown framework 'keras'"),
        ("&".join("a=1" for _ in range(200)), "the question cannot be read"),
        ("model=%00%ff", "no model is named"),
    ],
)
def test_a_bad_address_is_answered_with_the_librarys_message(query: str, message: str) -> None:
    answer = answer_query(query)
    assert set(answer) == {"schema", "error"}
    assert answer["error"].startswith(message) or message in answer["error"]


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=80))
def test_any_text_at_all_is_answered(query: str) -> None:
    answer = answer_query(query)
    assert answer["schema"] == 1
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 10**15),
    devices=st.integers(1, 10**6),
    tuning=st.sampled_from(TUNINGS),
    precision=st.sampled_from(list(PRECISIONS)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    sharding=st.sampled_from(list(SHARDINGS)),
)
def test_any_question_is_answered_and_read_back(batch: int, devices: int, **choices: str) -> None:
    question = Question(batch=batch, devices=devices, **choices)  # type: ignore[arg-type]
    if question.sharding != "none" and devices == 1:
        with pytest.raises(InvalidInputError):
            question.checked()
        return
    assert Question.read(question.query) == question
    answer = answer_query(question.query)
    assert answer["question"] == asdict(question)
    json.dumps(answer, allow_nan=False)


def test_a_config_is_checked_as_its_file_is_and_names_no_folder() -> None:
    text = json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4})
    checked = check_text(text, ".json", "8")
    assert (checked["agrees"], checked["path"]) == (False, "config.json")
    assert checked["findings"] == ["train_batch_size is 64, but 4 x 4 x 8 devices = 128"]
    assert check_text("{", ".json", "8")["error"].startswith("'config.json' is not valid JSON")
    assert "devices must be" in check_text(text, ".json", "many")["error"]


def test_every_choice_offered_is_understood() -> None:
    choices = list_choices()
    for card in choices["cards"]:
        assert "error" not in answer_query(f"card={card['name']}&model=gpt2&seq_len=128")
    for model in choices["models"]:
        assert "error" not in answer_query(f"model={model['name']}&seq_len={model['max_positions']}")


def test_neither_torch_nor_numpy_nor_rich_is_imported_and_what_needs_torch_says_so() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
import batchwright as bw
from batchwright.memory.calculator import answer_query
assert answer_query("")["fits"]
assert bw.recommend("7b", "24GiB").fits and bw.plan(64, micro_batch=8) and bw.advise("slow", micro_batch=4)
assert "rich" not in sys.modules and "click" not in sys.modules
try:
    bw.fit
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bw.fit needs torch, which is not installed.")
    assert "bw.plan, bw.recommend" in done.stdout
