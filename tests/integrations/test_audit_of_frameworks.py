"""The audit on real trainers: transformers, Lightning, accelerate. Each leaves the run as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from batchwright.errors import InvalidInputError
from batchwright.integrations.accelerate import audit_first_window
from batchwright.integrations.lightning import AuditFirstWindow
from batchwright.integrations.live_run import audit

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = (4, 9, 2, 7, 5, 8, 3, 6)


def sentences(*, per_token: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        labels = torch.randint(0, 3, (length if per_token else 1,), generator=generator).tolist()
        ids = torch.randint(1, 64, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": labels if per_token else labels[0]})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(values: list[int], value: int) -> list[int]:
        return values + [value] * (longest - len(values))

    labels = [row["labels"] if isinstance(row["labels"], int) else filled(row["labels"], -100) for row in rows]
    return {
        "input_ids": torch.tensor([filled(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor(labels),
    }


def small(kind: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind.__name__ == "LlamaForCausalLM":
        return kind(transformers.LlamaConfig(intermediate_size=32, num_key_value_heads=2, **sizes))
    sizes["num_labels"] = 3
    return kind(transformers.BertConfig(intermediate_size=32, **sizes))


def trainer_of(model: Any, folder: Path, *, per_token: bool, accumulation: int = 4) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, report_to=[], use_cpu=True
    )
    rows = sentences(per_token=per_token)
    return transformers.Trainer(model, arguments, train_dataset=rows, data_collator=padded)


def test_a_trainer_with_a_bert_classifier_is_told_its_factor(tmp_path: Path) -> None:
    model = small(transformers.BertForSequenceClassification)
    trainer = trainer_of(model, tmp_path, per_token=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arguments, state, numbers = trainer.args, trainer.state, torch.random.get_rng_state()
    found = audit(trainer)
    assert (found.exact, found.cause) == (False, "count ignored")
    assert found.ratio == pytest.approx(4.0)
    assert "exact_loss" in (found.remedy or "")
    assert trainer.model is model
    assert (trainer.args is arguments, trainer.state is state, trainer.optimizer) == (True, True, None)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(numbers, torch.random.get_rng_state())
    assert arguments.max_grad_norm == 1.0
    assert model.bert.embeddings.dropout.p == 0.1


@pytest.mark.slow
def test_a_trainer_with_a_causal_model_is_right(tmp_path: Path) -> None:
    found = audit(trainer_of(small(transformers.LlamaForCausalLM), tmp_path, per_token=True))
    assert found.exact
    assert [split.name for split in found.splits] == ["2x4", "2x1"]


def test_a_collator_that_draws_numbers_is_no_alarm(tmp_path: Path) -> None:
    trainer = trainer_of(small(transformers.LlamaForCausalLM), tmp_path, per_token=True)

    def masked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = padded(rows)
        batch["labels"] = torch.where(torch.rand(batch["labels"].shape) < 0.3, -100, batch["labels"])
        return batch

    trainer.data_collator = masked
    found = audit(trainer)
    assert found.exact
    assert any("random" in note for note in found.notes)
    assert trainer.accelerator._dataloaders == []


class Module(pl.LightningModule):
    """A token classifier with the loss that everybody writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(64, 8), nn.Dropout(0.0), nn.Linear(8, 3)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean over tokens."""
        loss = token_mean(self, batch)
        self.log("loss", loss)
        return loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.head(self.drop(self.embed(ids)))
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what steps."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def token_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def loader(*, is_even: bool = False) -> Any:
    rows = sentences(per_token=True)
    if is_even:
        rows = [{name: (values * 9)[:9] for name, values in row.items()} for row in rows]
    return DataLoader(rows, batch_size=2, collate_fn=padded)  # type: ignore[arg-type]


def fitted(folder: Path, callbacks: list[Any], *, is_even: bool = False) -> Module:
    module = Module()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=4, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, loader(is_even=is_even))
    return module


@pytest.mark.filterwarnings("ignore")
def test_lightning_is_audited_in_a_real_run_which_goes_on_as_if_nothing_were(tmp_path: Path) -> None:
    said: list[str] = []
    callback = AuditFirstWindow(say=said.append)
    audited, alone = fitted(tmp_path, [callback]), fitted(tmp_path, [])
    assert callback.audit is not None
    assert (callback.audit.exact, callback.audit.cause) == (False, "mean of means")
    assert len(said) == 1
    assert "NOT" in said[0]
    for one, other in zip(audited.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_even_samples_is_right(tmp_path: Path) -> None:
    callback = AuditFirstWindow(say=lambda _: None)
    fitted(tmp_path, [callback], is_even=True)
    assert callback.audit is not None
    assert callback.audit.exact


def trained_with_accelerate(*, is_audited: bool, is_even: bool = False, num_batches: int = 4) -> tuple[nn.Module, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    module: nn.Module = Module()
    some: Any = [*loader(is_even=is_even)][:num_batches]
    module, optimizer, batches = accelerator.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(some, batch_size=None)
    )

    def train(over: Any) -> None:
        for batch in over:
            with accelerator.accumulate(module):
                accelerator.backward(token_mean(module, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    if not is_audited:
        train(batches)
        return module, None
    with audit_first_window(accelerator, module, optimizer, token_mean) as watched:
        train(watched.batches(batches))
    return module, watched.audit


def test_accelerate_is_audited_in_a_real_run_which_goes_on_as_if_nothing_were() -> None:
    audited, found = trained_with_accelerate(is_audited=True)
    alone, _ = trained_with_accelerate(is_audited=False)
    assert (found.exact, found.cause) == (False, "mean of means")
    for one, other in zip(audited.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


def test_accelerate_with_even_samples_is_right_but_for_its_tail() -> None:
    assert trained_with_accelerate(is_audited=True, is_even=True)[1].exact
    tail = trained_with_accelerate(is_audited=True, is_even=True, num_batches=1)[1]
    assert (tail.exact, tail.cause) == (False, "tail scale")
    assert tail.ratio == pytest.approx(0.25)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="audit takes a Workload"):
        audit(nn.Linear(1, 1))


class WidePairs(nn.Module):
    """A regression in fp64 that scales its loss by the count it is given, as a Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.layer(x).squeeze(-1), labels)}


def test_a_trainer_of_fp64_is_audited_in_fp64(tmp_path: Path) -> None:
    rows = [{"x": torch.randn(3).double(), "labels": torch.randn(()).double()} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=4, report_to=[], use_cpu=True
    )
    model = WidePairs()
    found = audit(transformers.Trainer(model, arguments, train_dataset=rows))
    assert (found.exact, found.dtype) == (True, "fp64")
    assert model.layer.weight.dtype == torch.float64


def test_the_first_window_of_a_random_loss_has_no_cause() -> None:
    from batchwright.integrations.live_run import FirstWindow

    model = torch.nn.Linear(4, 1)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = model(batch + torch.randn_like(batch)).square()
        return squares.mean()

    window = FirstWindow(model, loss, accumulation=2, name="loop", what="its first window")
    for batch in torch.randn(2, 3, 4):
        window.see(batch)
        loss(batch).backward()  # not divided, either
    window.judge()
    found = window.audit
    assert found is not None
    assert (found.exact, found.cause, found.is_random) == (False, None, True)
    assert "fix that first" in (found.remedy or "")
