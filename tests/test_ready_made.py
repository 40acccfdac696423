"""`Workload.from_transformers`: batches of the model's own kind, refused by name where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import batchwright as bw
from batchwright.errors import InvalidInputError
from tests.device.workloads import run_probe

# Its classes are only half typed.
tr: Any = transformers

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"input_ids": (3, 8), "labels": (3, 8)}
IMAGES = {"pixel_values": (3, 3, 16, 16), "labels": (3,)}


def bert(*architectures: str, **changes: Any) -> Any:
    return tr.BertConfig(**{**SMALL, "vocab_size": 50, "num_labels": 3, "architectures": [*architectures], **changes})


def gpt2(**changes: Any) -> Any:
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return tr.GPT2Config(**{"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, **tokens, **changes})


def t5(*architectures: str, **changes: Any) -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    return tr.T5Config(**{**sizes, "architectures": [*architectures], **changes})


def vit(*architectures: str, **changes: Any) -> Any:
    sizes = {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 3}
    return tr.ViTConfig(**{**sizes, "architectures": [*architectures], **changes})


def resnet() -> Any:
    sizes: dict[str, Any] = {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        "num_labels": 3,
    }
    return tr.ResNetConfig(**sizes, architectures=["ResNetForImageClassification"])


def shapes_of(batch: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


@pytest.mark.parametrize(
    ("config", "name", "shapes"),
    [
        (gpt2(), "GPT2LMHeadModel", TOKENS),
        (bert("BertForMaskedLM"), "BertForMaskedLM", TOKENS),
        (bert("BertForTokenClassification"), "BertForTokenClassification", TOKENS),
        (bert("BertForSequenceClassification"), "BertForSequenceClassification", {**TOKENS, "labels": (3,)}),
        (bert("BertForMultipleChoice"), "BertForMultipleChoice", {"input_ids": (3, 2, 8), "labels": (3,)}),
        (bert("BertForNextSentencePrediction"), "BertForNextSentencePrediction", {**TOKENS, "labels": (3,)}),
        (bert("BertForPreTraining"), "BertForPreTraining", {**TOKENS, "next_sentence_label": (3,)}),
        (
            bert("BertForQuestionAnswering", num_labels=2),
            "BertForQuestionAnswering",
            {"input_ids": (3, 8), "start_positions": (3,), "end_positions": (3,)},
        ),
        (
            t5("T5ForConditionalGeneration"),
            "T5ForConditionalGeneration",
            {**TOKENS, "decoder_input_ids": (3, 8)},
        ),
        (t5("T5ForConditionalGeneration", decoder_start_token_id=0), "T5ForConditionalGeneration", TOKENS),
        (vit("ViTForImageClassification"), "ViTForImageClassification", IMAGES),
        (resnet(), "ResNetForImageClassification", {**IMAGES, "pixel_values": (3, 3, 224, 224)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_makes_a_workload_that_trains(config: Any, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    workload = bw.Workload.from_transformers(config, seq_len=8)
    assert workload.name == name
    assert workload.batch is not None
    assert shapes_of(workload.batch(3)) == shapes
    assert len(run_probe(workload, 3, device=torch.device("cpu"), steps=1)) == 1


def test_a_live_model_is_taken_as_it_is() -> None:
    model = tr.BertForMaskedLM(bert()).eval()
    workload = bw.Workload.from_transformers(model, seq_len=8)
    assert workload.model is model
    assert workload.name == "BertForMaskedLM"
    run_probe(workload, 2, device=torch.device("cpu"), steps=1)


def test_the_length_is_a_shape_and_the_image_size_too() -> None:
    text = bw.Workload.from_transformers(gpt2(), seq_len=8)
    images = bw.Workload.from_transformers(vit("ViTForImageClassification"))
    assert text.batch is not None
    assert images.batch is not None
    assert shapes_of(text.batch(2, seq_len=5))["input_ids"] == (2, 5)
    assert shapes_of(images.batch(2, image_size=24))["pixel_values"] == (2, 3, 24, 24)


def test_tokens_and_classes_stay_within_what_the_model_knows() -> None:
    batch = bw.Workload.from_transformers(bert("BertForTokenClassification"), seq_len=8).batch
    assert batch is not None
    made = batch(64)
    assert 0 <= made["input_ids"].min() <= made["input_ids"].max() < 50
    assert set(made["labels"].flatten().tolist()) == {0, 1, 2}


def test_fields_are_replaced() -> None:
    workload = bw.Workload.from_transformers(gpt2(), seq_len=8, optimizer=None, name="mine")
    assert (workload.is_training, workload.name) == (False, "mine")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (bert("BertModel"), "BertModel takes no labels, so it has no loss."),
        (t5("T5EncoderModel"), "T5EncoderModel takes no labels, so it has no loss."),
        (vit("ViTForMaskedImageModeling"), "ViTForMaskedImageModeling takes no labels, so it has no loss."),
        (
            tr.SegformerConfig(architectures=["SegformerForSemanticSegmentation"]),
            "SegformerForSemanticSegmentation takes pixel_values but is no image classifier",
        ),
        (tr.Wav2Vec2Config(architectures=["Wav2Vec2ForCTC"]), "Wav2Vec2ForCTC takes input_values, for which no batch"),
        (bert("BertForMaskedLM", max_position_embeddings=4), "takes sequences of up to 4 tokens; received 8."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_class_without_a_batch_is_refused_by_name_unless_one_is_handed_in(config: Any, said: str) -> None:
    workload = bw.Workload.from_transformers(config, seq_len=8)
    assert workload.batch is not None
    with pytest.raises(InvalidInputError) as refused:
        workload.batch(2)
    assert said in str(refused.value)
    mine = bw.Workload.from_transformers(config, seq_len=8, batch=lambda n: torch.zeros(n)).batch
    assert mine is not None
    assert mine(2).shape == (2,)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gpt2", "takes a transformers model or config; received 'gpt2'."),
        (torch.nn.Linear(2, 2), "takes a transformers model or config; received Linear("),
        (t5(), "T5Config names no architecture and has no causal LM."),
        (bert("BertForPoetry"), "names the architecture BertForPoetry, which transformers does not have."),
    ],
    ids=["name", "module", "no causal LM", "unknown"],
)
def test_what_is_no_transformers_model_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        bw.Workload.from_transformers(given)
    assert said in str(refused.value)


@pytest.mark.parametrize("seq_len", [0, -1, 2.5, "8"])
def test_a_length_is_a_whole_number(seq_len: Any) -> None:
    with pytest.raises(InvalidInputError, match="seq_len must be a whole number"):
        bw.Workload.from_transformers(gpt2(), seq_len=seq_len)
