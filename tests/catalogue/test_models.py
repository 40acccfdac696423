"""The catalogue is true: each shape has the parameters that transformers' own model of it has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from batchwright.catalogue.models import ModelShape, count_parameters, find_model, load_models
from batchwright.errors import InvalidInputError
from tests.oracle.transformers_models import build_on_meta

# Larger ones are the same code with more layers; building them takes seconds each.
SMALL = [
    shape for shape in load_models().values() if shape.layers <= 26 or shape.family in ("falcon", "phi", "stablelm")
]
LARGE = ["llama-2-7b", "llama-3-8b", "llama-3.1-405b", "qwen2.5-72b", "qwen3-32b", "gemma-2-27b", "phi-4", "bloom-176b"]


def test_there_are_more_than_forty_and_each_has_a_source() -> None:
    assert len(load_models().values()) >= 40
    assert all(len(shape.source) > 20 for shape in load_models().values())
    assert len({shape.name for shape in load_models().values()}) == len(load_models().values())


@pytest.mark.parametrize("shape", load_models().values(), ids=lambda shape: shape.name)
def test_the_formula_gives_the_parameters_of_the_row(shape: ModelShape) -> None:
    assert count_parameters(shape).total == shape.parameters


@pytest.mark.parametrize("shape", [*SMALL, *map(find_model, LARGE)], ids=lambda shape: shape.name)
def test_transformers_has_as_many_parameters(shape: ModelShape) -> None:
    assert sum(weight.numel() for weight in build_on_meta(shape).parameters()) == shape.parameters


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("GPT2", "gpt2"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("someone/llama-3-8b", "llama-3-8b"),
        ("Llama_2_7b", "llama-2-7b"),
        (" qwen2.5-0.5B ", "qwen2.5-0.5b"),
    ],
)
def test_a_name_is_found_however_it_is_written(typed: str, found: str) -> None:
    assert find_model(typed).name == found


def test_no_two_models_answer_to_one_name() -> None:
    names = [name.lower() for shape in load_models().values() for name in (shape.name, *shape.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("typed", "near"), [("lama-3-8b", "llama-3-8b"), ("qwen25-7b", "qwen2.5-7b"), ("", "gpt2")])
def test_an_unknown_name_lists_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(InvalidInputError, match="no model is named") as raised:
        find_model(typed)
    assert near in raised.value.remedy


def test_neither_catalogue_nor_formulas_import_torch() -> None:
    code = "import sys, batchwright.catalogue.models, batchwright.memory.formulas; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
