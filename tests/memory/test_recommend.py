"""`recommend`: real shapes, four fifths of the memory, a power of two, and the rule of thumb beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchwright.catalogue.models import find_model
from batchwright.errors import InvalidInputError
from batchwright.memory.formula_tensors import Setup
from batchwright.memory.recommend import SIZES, TASKS, needed_bytes, recommend
from tests.oracle.live_bytes import count_peak
from tests.oracle.transformers_models import build_on_meta

GB = 10**9


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tuning", ["full", "lora", "qlora"])
def test_the_answer_fits_and_the_next_power_of_two_does_not(task: str, tuning: str) -> None:
    setup = Setup.of(tuning=tuning)
    for answer in recommend(SIZES, ["24GiB", "80GiB", "640GiB"], task=task, tuning=tuning).answers:
        usable, shape = int(0.8 * answer.memory_bytes), find_model(answer.model)
        if answer.recommended_batch_size is None:
            assert answer.needed_bytes > usable
            continue
        batch = answer.recommended_batch_size
        assert batch & (batch - 1) == 0
        assert answer.estimated_memory_usage is not None
        assert answer.estimated_memory_usage <= usable
        assert needed_bytes(shape, setup, micro_batch=2 * batch, seq_len=512, task=task) > usable


def test_the_rule_of_thumb_gives_its_own_table() -> None:
    answers = recommend(["7b", "13b", "30b"], [f"{size}GB" for size in (8, 16, 24, 40)]).answers
    rules = [answer.rule_of_thumb for answer in answers]
    assert [rule.recommended_batch_size for rule in rules if rule] == [16, 32, 32, 64, 8, 16, 16, 32, 4, 8, 8, 16]
    assert [rule.gradient_accumulation_for_32 for rule in rules if rule] == [2, 1, 1, 1, 4, 2, 2, 1, 8, 4, 4, 2]


def test_the_computed_table_of_the_same_sizes() -> None:
    answers = recommend(["7b", "13b", "30b"], [f"{size}GB" for size in (8, 16, 24, 40)], tuning="qlora").answers
    assert [a.recommended_batch_size for a in answers] == [None, 2, 4, 8, None, None, 2, 4, None, None, None, 1]
    assert [a.gradient_accumulation_for_32 for a in answers[1:4]] == [16, 8, 4]
    assert [a.gradient_accumulation_for_64 for a in answers[1:4]] == [32, 16, 8]


def test_nothing_fits_says_what_is_needed_and_what_would_need_less() -> None:
    (answer,) = recommend("70b", 24 * 2**30).answers
    assert not answer.fits
    assert answer.recommended_batch_size is answer.gradient_accumulation_for_32 is None
    assert answer.needed_bytes > 2 * 68 * GB
    assert 'tuning="qlora"' in answer.remedy


def test_generation_pays_for_the_vocabulary() -> None:
    generation, classification, qa = (
        recommend("1b", "80GiB", task=task).answers[0].memory_per_sample
        for task in ("generation", "classification", "qa")
    )
    assert generation > classification == qa


def test_a_large_batch_needs_no_accumulation() -> None:
    answer = recommend("qwen2.5-0.5b", "640GiB", tuning="qlora", checkpointing=True).answers[0]
    assert answer.recommended_batch_size is not None
    assert answer.recommended_batch_size >= 64
    assert answer.gradient_accumulation_for_32 == answer.gradient_accumulation_for_64 == 1
    assert answer.rule_of_thumb is None


def test_a_single_answer_has_its_keys_at_the_top() -> None:
    data = recommend("7b", "24GiB").to_dict()
    assert data["schema"] == 1
    assert data["recommended_batch_size"] == data["answers"][0]["recommended_batch_size"] == 2
    assert "recommended_batch_size" not in recommend(["7b", "13b"], "24GiB").to_dict()


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("9b", "24GiB"), {}),
        (("7b", "lots"), {}),
        (("7b", "24GiB"), {"task": "poetry"}),
        (("7b", "24GiB"), {"tuning": "half"}),
        (("7b", "24GiB"), {"seq_len": 100_000}),
        (([], "24GiB"), {}),
    ],
)
def test_wrong_input_is_explained(args: tuple[Any, Any], options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        recommend(*args, **options)


class Adapter(torch.nn.Module):
    """What peft puts in the place of a matrix: it stays, frozen, and two fp32 halves are added."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 16, bias=False, device="meta")
        self.up = torch.nn.Linear(16, base.out_features, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> Any:
        out = self.base(x)
        return (out + self.up(self.down(x.float())) * 2.0).to(out.dtype)


@pytest.mark.parametrize(("name", "labels"), [("llama-2-7b", 2), ("qwen2.5-0.5b", None), ("opt-1.3b", 2)])
def test_lora_is_within_five_percent_of_the_count(name: str, labels: int | None) -> None:
    shape = replace(find_model(name), layers=2, dropout=0.0)
    model = build_on_meta(shape, dtype=torch.bfloat16, labels=labels).requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and "layers." in path:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, Adapter(module))

    def loss(model: Any, batch: torch.Tensor) -> Any:
        return model(input_ids=batch, labels=batch[:, 0] % 2 if labels else batch).loss

    counted = count_peak(model, loss, samples=8, seq_len=256, autocast=True)
    task = "classification" if labels else "generation"
    needed = needed_bytes(shape, Setup.of(tuning="lora"), micro_batch=8, seq_len=256, task=task)
    assert abs(needed / counted - 1) < 0.05
