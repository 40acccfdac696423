"""`exact_loss` on real Trainers: the gradient of each step against plain autograd on the big batch."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from batchwright.errors import InvalidInputError
from batchwright.integrations.transformers.exact_loss import exact_loss
from tests.integrations.transformers.exactly_trained import (
    LENGTHS,
    big_batch,
    build,
    collate,
    gradient_of,
    make_trainer,
    relative_error,
    samples,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS = (
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
)


def check_steps(trainer: Any, model: Any, data: list[Any], window: int) -> None:
    """Compare each step with the big batch of the same samples, gradient and logged loss."""
    assert len(trainer.recorder.gradients) == -(-len(data) // window)
    for index, (gradient, loss) in enumerate(zip(trainer.recorder.gradients, trainer.recorder.losses, strict=True)):
        right, right_loss = big_batch(model, data[index * window : (index + 1) * window])
        assert relative_error(gradient, right) <= 1e-6
        assert loss == pytest.approx(right_loss, rel=1e-5)


@pytest.fixture(scope="module", autouse=True)
def small_and_quick() -> Iterator[None]:
    """One thread, since these models are tiny; and no looking for garbage through all of torch, which Trainer does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("head", "split"), [*itertools.product(HEADS, [(2, 4), (1, 8)]), ("BertForTokenClassification", (3, 2))], ids=str
)
def test_head_that_ignores_the_count_trains_like_the_big_batch(
    head: str, split: tuple[int, int], tmp_path: Path
) -> None:
    # Ten samples of unequal length: the last window of 2x4 is one micro-batch, that of 3x2 is 3 + 1.
    model, data = build(head), samples(head)
    trainer = make_trainer(model, data, tmp_path, *split)
    made = exact_loss(trainer)
    assert made.changed == ("trainer.compute_loss",)
    assert made.is_exact
    assert made.head.ignores_count
    trainer.train()
    check_steps(trainer, model, data, split[0] * split[1])


def test_without_it_the_gradient_is_multiplied_by_the_accumulation(tmp_path: Path) -> None:
    head = "BertForSequenceClassification"
    model, data = build(head), samples(head)
    trainer = make_trainer(model, data, tmp_path, 2, 4)
    with exact_loss(trainer) as made:
        assert "compute_loss" in vars(trainer)
    assert "compute_loss" not in vars(trainer)
    made.undo()
    trainer.train()
    right, loss = big_batch(model, data[:8])
    assert float(trainer.recorder.gradients[0].norm() / right.norm()) == pytest.approx(4.0, rel=1e-5)
    assert trainer.recorder.losses[0] == pytest.approx(4 * loss, rel=1e-5)


def test_balance_loss_of_experts_does_not_grow_with_accumulation(tmp_path: Path) -> None:
    model = build("MixtralForCausalLM", output_router_logits=True, router_aux_loss_coef=1.0)
    data = samples("MixtralForCausalLM", LENGTHS[:8])
    trainer = make_trainer(model, data, tmp_path, 2, 4)
    made = exact_loss(trainer)
    assert made.head.verdict == "partly"
    assert made.head.ignored_share == pytest.approx(2.0 / 6.2, abs=0.1)
    assert not made.is_exact
    trainer.train()
    model.zero_grad()
    parts = [collate(data[start : start + 2]) for start in range(0, 8, 2)]
    total = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    losses = []
    for part in parts:
        outputs = model(**part, num_items_in_batch=total)
        losses.append(outputs.loss - outputs.aux_loss + outputs.aux_loss / 4)
    torch.stack(losses).sum().backward()
    assert relative_error(trainer.recorder.gradients[0], gradient_of(model)) <= 1e-6
    assert trainer.recorder.losses[0] == pytest.approx(sum(float(loss.detach()) for loss in losses), rel=1e-5)


def test_head_that_is_right_is_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(build("LlamaForCausalLM"), samples("LlamaForCausalLM"), tmp_path, 2, 4)
    before = dict(vars(trainer))
    made = exact_loss(trainer)
    assert vars(trainer) == before
    assert made.changed == ()
    assert str(made) == "LlamaForCausalLM: its loss uses the count and is exact already; nothing was changed"


def test_micro_batch_without_a_label_weighs_nothing(tmp_path: Path) -> None:
    model, data = build("BertForMaskedLM"), samples("BertForMaskedLM", LENGTHS[:8])
    trainer = make_trainer(model, data, tmp_path, 2, 4)
    exact_loss(trainer)
    for sample in data[2:4]:
        sample["labels"].fill_(-100)
    trainer.train()
    check_steps(trainer, model, data, 8)


def test_evaluation_loss_stays_as_it_was(tmp_path: Path) -> None:
    data = samples("BertForTokenClassification")
    losses = []
    for is_exact in (False, True):
        trainer = make_trainer(build("BertForTokenClassification"), data, tmp_path, 2, 4)
        if is_exact:
            exact_loss(trainer)
        trainer.train()
        losses.append(trainer.evaluate(data)["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Tagger(nn.Module):
    """Takes no **kwargs, so Trainer divides by the accumulation count: right for the mean of means only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(60, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def test_head_that_takes_no_count_is_weighted_by_its_labels(tmp_path: Path) -> None:
    data = samples("BertForTokenClassification")
    for is_exact in (False, True):
        model = Tagger()
        trainer = make_trainer(model, data, tmp_path, 2, 4)
        if is_exact:
            made = exact_loss(trainer)
            assert made.changed == ("trainer.compute_loss", "trainer._get_num_items_in_batch")
            assert made.unit == "labels"
        trainer.train()
        batch = collate(data[:8])
        model.zero_grad()
        model(**batch)["loss"].backward()
        error = relative_error(trainer.recorder.gradients[0], gradient_of(model))
        assert error <= 1e-6 if is_exact else error > 0.1


class Summing(Tagger):
    """Takes the count, drops it, and adds up its loss, as CTC heads do by default."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        return {"loss": super().forward(input_ids, attention_mask, labels)["loss"] * (labels != -100).sum()}


class BySample(Tagger):
    """Takes the count, drops it, and averages the means of samples, as CTC heads do by choice."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        rows = [self.head(self.embedding(ids)) for ids in input_ids]
        pairs = zip(rows, labels, strict=True)
        return {"loss": torch.stack([nn.functional.cross_entropy(row, label) for row, label in pairs]).mean()}


def test_loss_that_is_a_sum_adds_up_by_itself(tmp_path: Path) -> None:
    model, data = Summing(), samples("BertForTokenClassification")
    trainer = make_trainer(model, data, tmp_path, 2, 4, remove_unused_columns=False)
    made = exact_loss(trainer)
    assert made.head.verdict == "ignores"
    assert made.changed == ()
    assert "is a sum" in made.reason
    trainer.train()
    model.zero_grad()
    model(**collate(data[:8]))["loss"].backward()
    assert relative_error(trainer.recorder.gradients[0], gradient_of(model)) <= 1e-6


@pytest.mark.parametrize("lengths", [LENGTHS[:8], (4, 2, 2, 2, 5, 28, 3, 17), (6,) * 8], ids=str)
def test_mean_of_the_means_of_samples_is_told_from_a_mean_over_labels(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    data = samples("BertForTokenClassification", lengths)
    by_label = make_trainer(build("BertForTokenClassification"), data, tmp_path, 3, 3)
    assert exact_loss(by_label).unit == "labels"
    model = BySample()
    trainer = make_trainer(model, data, tmp_path, 3, 3, remove_unused_columns=False)
    assert exact_loss(trainer).unit == "samples"
    trainer.train()
    model.zero_grad()
    model(**collate(data))["loss"].backward()
    assert relative_error(trainer.recorder.gradients[0], gradient_of(model)) <= 1e-6


def test_labels_of_another_name_are_counted_by_samples(tmp_path: Path) -> None:
    model = build("BertForQuestionAnswering", num_labels=2)
    data = [
        {"input_ids": sample["input_ids"][:3], "start_positions": torch.tensor(0), "end_positions": torch.tensor(2)}
        for sample in samples("Llama")
    ]
    trainer = make_trainer(model, data, tmp_path, 3, 2)
    trainer.data_collator = torch.utils.data.default_collate
    made = exact_loss(trainer)
    assert made.head.verdict == "divided"
    assert made.unit == "samples"
    trainer.train()
    model.zero_grad()
    model(**torch.utils.data.default_collate(data[6:])).loss.backward()
    assert relative_error(trainer.recorder.gradients[1], gradient_of(model)) <= 1e-6


def test_loss_that_is_no_mean_over_anything_counted_is_averaged(tmp_path: Path) -> None:
    model, data = build("BertForPreTraining"), samples("BertForMaskedLM", LENGTHS[:8])
    for index, sample in enumerate(data):
        sample["next_sentence_label"] = torch.tensor(index % 2)

    def collate_both(chosen: list[Any]) -> dict[str, torch.Tensor]:
        return {**collate(chosen), "next_sentence_label": torch.stack([s["next_sentence_label"] for s in chosen])}

    trainer = make_trainer(model, data, tmp_path, 2, 4, remove_unused_columns=False)
    trainer.data_collator = collate_both
    made = exact_loss(trainer)
    assert made.unit == "micro-batches"
    assert not made.is_exact
    trainer.train()
    means = [float(model(**collate_both(data[start : start + 2])).loss.detach()) for start in range(0, 8, 2)]
    assert trainer.recorder.losses[0] == pytest.approx(sum(means) / 4, rel=1e-5)


def test_asking_changes_nothing(tmp_path: Path) -> None:
    model = build("BertForTokenClassification", hidden_dropout_prob=0.3).eval()
    model.bert.encoder.train()
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    trainer = make_trainer(model, samples("BertForTokenClassification"), tmp_path, 2, 4)
    state = torch.get_rng_state()
    exact_loss(trainer).undo()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_not_the_heads_own_loss_is_left_alone_or_refused(tmp_path: Path) -> None:
    head = "BertForTokenClassification"
    data = samples(head)
    smoothed = make_trainer(build(head), data, tmp_path, 2, 4, label_smoothing_factor=0.1)
    assert exact_loss(smoothed).changed == ()
    twice = make_trainer(build(head), data, tmp_path, 2, 4)
    assert exact_loss(twice).changed
    assert "here before" in exact_loss(twice).reason
    own = make_trainer(build(head), data, tmp_path, 2, 4)
    own.compute_loss = lambda *args, **kwargs: Trainer.compute_loss(own, *args, **kwargs)
    with pytest.raises(InvalidInputError, match="a compute_loss of its own"):
        exact_loss(own)
    with pytest.raises(InvalidInputError, match=r"takes a transformers.Trainer; received 'model'"):
        exact_loss("model")
    own.train_dataset = None
    del own.compute_loss
    with pytest.raises(InvalidInputError, match="no train_dataset"):
        exact_loss(own)


RANKS = """
import sys
import torch, transformers
from batchwright.integrations.transformers.exact_loss import exact_loss
from tests.integrations.transformers.exactly_trained import *

transformers.logging.set_verbosity_error()
for head in ("BertForSequenceClassification", "BertForTokenClassification", "T5ForConditionalGeneration"):
    model, data = build(head), samples(head, LENGTHS[:8])
    right, loss = big_batch(build(head), data)
    trainer = make_trainer(model, data, sys.argv[1], 2, 2, ddp_backend="gloo")
    made = exact_loss(trainer)
    trainer.train()
    assert len(trainer.recorder.gradients) == 1
    error = relative_error(trainer.recorder.gradients[0], right)
    assert error <= 1e-6, (head, error)
    if trainer.is_world_process_zero():
        assert abs(trainer.recorder.losses[0] / loss - 1) < 1e-5, (trainer.recorder.losses, loss)
options = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
model, data = build("MixtralForCausalLM", **options), samples("Mixtral", LENGTHS[:8])
trainer = make_trainer(model, data, sys.argv[1], 2, 2, ddp_backend="gloo")
exact_loss(trainer)
trainer.train()
if trainer.is_world_process_zero():
    loss = big_batch(build("MixtralForCausalLM", **options), data)[1]
    # The balance of parts is not that of the whole, but its share is the same.
    assert abs(trainer.recorder.losses[0] / loss - 1) < 0.05, (trainer.recorder.losses, loss)
print("equal")
"""


@pytest.mark.slow
def test_two_ranks_agree_with_the_big_batch(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=180, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("equal") == 2
