"""The models of benchmarks/exactness.py, from tiny configs, and their samples: nothing is downloaded.

Lengths differ from sample to sample, and a micro-batch is padded to its own longest, so that every way to take a mean
over the wrong thing shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

# Its classes are not typed.
transformers: Any = import_module("transformers")

VOCAB, LABELS, IGNORED = 64, 3, -100
# 111 tokens are predicted. With 17 as the last length it would be 108, and of that number every part of a cut rounds to
# the same fp32 scalar: heads that compute their loss in fp32 would look exact to 1e-16, by luck.
LENGTHS = (4, 30, 7, 22, 5, 28, 3, 20)
# Modules that FSDP2 shards one by one.
BLOCKS = {"LlamaDecoderLayer", "MixtralDecoderLayer", "BertLayer", "T5Block"}

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One head: how it is built, what one of its samples is, and what its loss is a mean over."""

    name: str
    build: Callable[[], nn.Module]
    labels: str
    """What a sample's labels are: its tokens, a class per token, one class, or another sequence."""
    count: Callable[[Any], int] | None
    """Units of a batch; None: its samples."""


def _bert() -> Any:
    return transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _decoder(kind: Any, **options: Any) -> Any:
    return kind(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        pad_token_id=0,
        **options,
    )


def _llama() -> nn.Module:
    model: nn.Module = transformers.LlamaForCausalLM(_decoder(transformers.LlamaConfig))
    return model


def _mixtral() -> nn.Module:
    # Grouped kernels of experts compute in bf16 or fp32 only; the balance term is not additive over micro-batches.
    config = _decoder(transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0)
    model: nn.Module = transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager")
    return model


def _t5() -> nn.Module:
    model: nn.Module = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )
    return model


def count_shifted(batch: Any) -> int:
    """Count the tokens that are predicted: the first of each sample is not."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def count_labels(batch: Any) -> int:
    return int((batch["labels"] != IGNORED).sum())


CASES = (
    Case("Llama, causal LM", _llama, "tokens", count_shifted),
    Case("BERT classifier", lambda: transformers.BertForSequenceClassification(_bert()), "class", None),
    Case("BERT token classifier", lambda: transformers.BertForTokenClassification(_bert()), "classes", count_labels),
    Case("T5", _t5, "sequence", count_labels),
    Case("Mixtral, no balance term", _mixtral, "tokens", count_shifted),
)


def make_model(case: Case, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    # Built in fp32 first, so that both types have the same weights. Norms of Llama and T5 stay fp32 inside.
    return case.build().to(dtype).train()


def make_samples(case: Case, number: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(number):
        tokens = torch.randint(3, VOCAB, (LENGTHS[index % len(LENGTHS)],), generator=generator)
        if case.labels == "tokens":
            labels = tokens
        elif case.labels == "classes":
            labels = torch.randint(0, LABELS, tokens.shape, generator=generator)
        elif case.labels == "class":
            labels = torch.randint(0, LABELS, (), generator=generator)
        else:
            length = LENGTHS[(3 * index + 1) % len(LENGTHS)]
            labels = torch.randint(3, VOCAB, (length,), generator=generator)
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Pad to the longest of these samples."""
    ids = [sample["input_ids"] for sample in samples]
    labels = [sample["labels"] for sample in samples]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": torch.stack(labels)
        if labels[0].dim() == 0
        else torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The head's own loss: a mean over the units of this batch."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def relative_error(gradient: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    pairs = list(zip(gradient, reference, strict=True))
    difference = sum(float((mine.double() - theirs.double()).square().sum()) for mine, theirs in pairs)
    return float((difference / sum(float(theirs.double().square().sum()) for _, theirs in pairs)) ** 0.5)


def big_batch_gradient(model: nn.Module, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Return the gradient of all samples in one batch, by plain autograd."""
    weights = list(model.parameters())
    found = torch.autograd.grad(loss_of(model, collate(samples)), weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
