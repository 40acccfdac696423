"""`check_head`: one micro-batch and two counts tell what a head does with the item count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from batchwright.errors import InvalidInputError
from batchwright.integrations.transformers.exact_loss import check_head
from tests.integrations.transformers.exactly_trained import build, collate, samples

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch_for(name: str) -> dict[str, torch.Tensor]:
    return collate(samples(name)[:4])


@pytest.mark.parametrize(
    ("name", "ignores"),
    [
        ("BertForSequenceClassification", True),
        ("BertForTokenClassification", True),
        ("BertForMaskedLM", True),
        ("T5ForConditionalGeneration", True),
        ("LlamaForCausalLM", False),
        ("LlamaForSequenceClassification", True),
        ("MixtralForCausalLM", False),
    ],
)
def test_verdicts_agree_with_what_was_measured_on_trainers(name: str, ignores: bool) -> None:
    # The heads of research: measured there by training with a real Trainer.
    model = build(name)
    model.config.pad_token_id = 0
    found = check_head(model, batch_for(name))
    assert found.ignores_count is ignores
    assert found.verdict == ("ignores" if ignores else "uses")
    assert found.ignored_share == float(ignores)
    assert found.to_dict()["ignores_count"] is ignores


def test_a_term_that_ignores_the_count_is_told_by_its_share() -> None:
    model = build("MixtralForCausalLM", output_router_logits=True, router_aux_loss_coef=0.01)
    batch = batch_for("Mixtral")
    found = check_head(model, batch)
    with torch.no_grad():
        outputs = model(**batch)
    assert found.verdict == "partly"
    assert found.ignores_count
    assert found.ignored_share == pytest.approx(float(0.01 * outputs.aux_loss / outputs.loss), rel=0.1)
    assert "is multiplied by accumulation and ranks" in str(found)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        return (nn.functional.cross_entropy(self.embedding(input_ids).flatten(0, 1), labels.flatten()),)


class TakesKwargs(Plain):
    scale = 1.0

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return (super().forward(input_ids, labels=labels)[0] * self.scale,)


class OptsOut(TakesKwargs):
    accepts_loss_kwargs = False


@pytest.mark.parametrize(
    ("model", "drop", "reason"),
    [
        (Plain(), None, "takes no **kwargs"),
        (OptsOut(), None, "accepts_loss_kwargs = False"),
        (TakesKwargs(), "labels", 'has no "labels"'),
    ],
)
def test_where_trainer_divides_itself_there_is_nothing_to_ignore(model: Any, drop: str | None, reason: str) -> None:
    batch = {name: value for name, value in batch_for("Token").items() if name != drop}
    found = check_head(model, batch)
    assert found.ignores_count is None
    assert found.ignored_share is None
    assert found.verdict == "divided"
    assert reason in found.reason


def test_labels_that_are_no_tensor_are_not_counted() -> None:
    found = check_head(TakesKwargs(), {**batch_for("Token"), "labels": [{"boxes": 1}]})
    assert "no tensor" in found.reason


class Drifting(TakesKwargs):
    """A loss of its own each time."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.scale *= 1.5
        return super().forward(*args, **kwargs)


def test_a_batch_that_tells_nothing_is_refused() -> None:
    batch = batch_for("Token")
    with pytest.raises(InvalidInputError, match="every label of the batch is -100"):
        check_head(TakesKwargs(), {**batch, "labels": torch.full_like(batch["labels"], -100)})
    silent = TakesKwargs()
    silent.scale = 0.0
    with pytest.raises(InvalidInputError, match=r"has a loss of 0.0"):
        check_head(silent, batch)
    with pytest.raises(InvalidInputError, match="for the same batch, count and random numbers"):
        check_head(Drifting(), batch)


def test_asking_leaves_the_model_and_random_numbers_as_they_were() -> None:
    model = build("BertForTokenClassification", hidden_dropout_prob=0.4).eval()
    model.bert.encoder.train()
    model.register_module("norm", nn.BatchNorm1d(4))
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    assert check_head(model, batch_for("Token")).verdict == "ignores"
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(buffer, before) for buffer, before in zip(model.buffers(), buffers, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sixteen_bit_losses_are_told_apart() -> None:
    assert check_head(build("LlamaForCausalLM").bfloat16(), batch_for("Llama")).verdict == "uses"
    assert check_head(build("BertForMaskedLM").bfloat16(), batch_for("Masked")).verdict == "ignores"
