"""`fit_trainer` on a real Trainer: the sizes it sets, and that the trainer is otherwise as if never probed."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import batchwright as bw
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.integrations.transformers import fit_trainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def collect_only_what_is_new() -> Iterator[None]:
    """Each probe collects garbage several times, and looking through all of torch for it takes most of a test's time."""
    import torch._dynamo  # noqa: F401 - the first probe would

    gc.freeze()
    yield
    gc.unfreeze()


class Model(nn.Module):
    """The mean of embeddings under dropout, with a normalisation that counts; a loss that is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.dropout(self.norm(self.embedding(tokens).mean(1)))
        return {"loss": (self.head(hidden).squeeze(1) - labels).pow(2).mean()}


class LimitedTrainer(Trainer):
    """Runs out of memory above a size, and remembers what it was fed and what it appended to."""

    limit = 10**9
    most_inputs = 10**9

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        size, length = inputs["tokens"].shape
        fed.append((size, length, self.args.gradient_accumulation_steps))
        self.__dict__.setdefault("metrics", {"train": []})["train"].append(size)
        if size > self.limit or size * self.args.gradient_accumulation_steps > self.most_inputs:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss


fed: list[tuple[int, int, int]] = []


def samples(count: int = 60) -> list[dict[str, Any]]:
    lengths = random.Random(0).choices(range(3, 20), k=count)
    return [{"tokens": torch.arange(length) % 50, "labels": float(length)} for length in lengths]


def pad(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in chosen], batch_first=True)
    # Draws, as a collator that masks tokens does.
    return {"tokens": tokens, "labels": torch.tensor([s["labels"] for s in chosen]) + torch.rand(len(chosen))}


def make(
    folder: Path,
    batch_size: int,
    accumulation: int,
    *,
    data: Any = None,
    optimizers: Any = (None, None),
    **options: Any,
) -> Any:
    torch.manual_seed(5)
    fed.clear()
    model = options.pop("model", None) or Model()
    callbacks = options.pop("callbacks", [])
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **{"save_strategy": "no", "logging_steps": 1, **options},
    )
    trainer = LimitedTrainer(
        model,
        args,
        train_dataset=samples() if data is None else data,
        data_collator=pad,
        optimizers=optimizers,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_probed_trainer_trains_as_a_twin_that_was_set_by_hand(tmp_path: Path) -> None:
    probed = make(tmp_path / "a", 32, 1)
    probed.limit = 11
    found = fit_trainer(probed)
    assert (probed.args.per_device_train_batch_size, probed.args.gradient_accumulation_steps) == (8, 4)
    assert found.micro_batch == 11
    assert found.next_size is not None
    assert (found.next_size.micro_batch, found.next_size.outcome) == (12, "out_of_memory")
    assert found.plan is not None
    assert found.plan.effective_batch == 32
    assert any("8 x accumulation 4 keeps the effective batch at 32" in note for note in found.notes)

    results = []
    for trainer in (probed, make(tmp_path / "b", 8, 4)):
        fed.clear()
        torch.manual_seed(9)
        output = trainer.train()
        results.append((list(fed), output.global_step, output.training_loss, weights(trainer)))
    assert results[0][:3] == results[1][:3]
    assert equal(results[0][3], results[1][3])
    assert {size for size, _, _ in results[0][0]} == {8, 4}


def test_nothing_but_the_sizes_is_changed(tmp_path: Path) -> None:
    class Writing(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("a probe must not call it")

    # Each of these would write, or evaluate without data to.
    options = {"save_strategy": "steps", "save_steps": 1, "gradient_checkpointing": False, "callbacks": [Writing()]}
    trainer = make(tmp_path / "out", 16, 2, **options)
    trainer.limit = 5
    trainer.metrics = {"train": [1.0]}
    trainer.model.eval()
    attributes = {name: value for name, value in vars(trainer).items() if name != "_train_batch_size"}
    args, control = dict(vars(trainer.args)), dict(vars(trainer.control))
    accelerator, handler = dict(vars(trainer.accelerator)), dict(vars(trainer.callback_handler))
    shared = dict(vars(trainer.accelerator.gradient_state))
    before, modules = weights(trainer), [dict(vars(module)) for module in trainer.model.modules()]
    drawn = torch.get_rng_state()

    found = fit_trainer(trainer)

    assert torch.equal(drawn, torch.get_rng_state())
    assert equal(before, weights(trainer))
    assert [dict(vars(module)) for module in trainer.model.modules()] == modules
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    now = dict(vars(trainer))
    assert now.pop("_train_batch_size") == 4
    assert now.keys() == attributes.keys()
    assert all(now[name] is value for name, value in attributes.items())
    assert trainer.metrics == {"train": [1.0]}
    assert vars(trainer.control) == control
    assert vars(trainer.callback_handler) == handler
    assert vars(trainer.accelerator.gradient_state) == shared
    assert all(vars(trainer.accelerator)[name] is value for name, value in accelerator.items())
    changed = {name for name, value in vars(trainer.args).items() if value != args[name]}
    assert changed == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert list((tmp_path / "out").iterdir()) == []
    assert any("Writing" in note for note in found.notes)


def test_the_longest_samples_are_probed_at_every_size(tmp_path: Path) -> None:
    trainer = make(tmp_path, 16, 1)
    trainer.limit = 6
    fit_trainer(trainer)
    longest = sorted((len(sample["tokens"]) for sample in samples()), reverse=True)
    assert {length for _, length, _ in fed} == {longest[0]}
    # Two optimizer steps, and two micro-batches in each, at a size that accumulates.
    assert fed.count((6, longest[0], 2)) == 4


def test_an_optimizer_that_was_handed_in_comes_back_with_its_state(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    trainer = make(tmp_path, 8, 1, model=model, optimizers=(optimizer, scheduler))
    trainer.limit = 5
    entries = {id(p): {name: value.clone() for name, value in entry.items()} for p, entry in optimizer.state.items()}
    fit_trainer(trainer)
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is scheduler
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.09)
    for parameter, entry in optimizer.state.items():
        assert equal(entries[id(parameter)], entry)
    trainer.train()


@pytest.mark.slow
def test_a_trainer_that_has_trained_goes_on_as_a_twin_does(tmp_path: Path) -> None:
    results = []
    for probe in (True, False):
        trainer = make(tmp_path, 8, 1)
        trainer.train()
        if probe:
            trainer.limit = 5
            fit_trainer(trainer)
        else:
            trainer.args.per_device_train_batch_size = trainer._train_batch_size = 4
            trainer.args.gradient_accumulation_steps = 2
        trainer.train()
        results.append(weights(trainer))
    assert equal(*results)


def test_a_trainer_with_model_init_is_probed_on_models_of_its_own(tmp_path: Path) -> None:
    def trained(probe: bool) -> dict[str, torch.Tensor]:
        args = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8 if probe else 4,
            gradient_accumulation_steps=1 if probe else 2,
            max_steps=3,
            dataloader_pin_memory=False,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
            save_strategy="no",
        )
        build: Any = Model  # declared to return a PreTrainedModel, but any module will do
        trainer = LimitedTrainer(args=args, model_init=build, train_dataset=samples(), data_collator=pad)
        trainer.remove_callback(PrinterCallback)
        if probe:
            trainer.limit = 5
            assert fit_trainer(trainer).micro_batch == 5
        trainer.train()
        return weights(trainer)

    assert equal(trained(probe=True), trained(probe=False))


def test_inputs_that_are_loaded_at_once_for_a_whole_step_count(tmp_path: Path) -> None:
    trainer = make(tmp_path, 12, 1)
    trainer.limit = 5
    found = fit_trainer(trainer)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (4, 3)
    # The split itself ran, all three micro-batches of it.
    assert (found.trials[-1].micro_batch, found.trials[-1].accumulation) == (4, 3)
    assert found.trials[-1].fits

    trainer = make(tmp_path, 12, 1)
    trainer.limit, trainer.most_inputs = 5, 10
    with pytest.raises(NothingFitsError, match="beside the inputs of 12 micro-batches"):
        fit_trainer(trainer)


def test_a_split_that_is_too_small_for_the_model_says_so(tmp_path: Path) -> None:
    trainer = make(tmp_path, 7, 1)
    trainer.limit = 3
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as raised:
        fit_trainer(trainer)
    assert "1 is the largest micro-batch that divides the effective batch 7" in raised.value.__notes__[0]


def test_an_effective_batch_beyond_the_data_is_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path, 64, 4, data=samples(10))
    found = fit_trainer(trainer)
    assert found.micro_batch == 10
    assert found.reason == "the dataset holds 10 samples"
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 256
    assert trainer.train().global_step == 2


def test_a_limit_is_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path, 4, 8)
    assert fit_trainer(trainer, limit=9).micro_batch == 9
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (8, 4)
    assert max(size for size, _, _ in fed) == 9


def test_data_without_numbers_is_probed_as_it_comes(tmp_path: Path) -> None:
    class Stream(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(samples())

    trainer = make(tmp_path, 16, 1, data=Stream(), max_steps=3)
    trainer.limit = 7
    found = fit_trainer(trainer)
    assert found.micro_batch == 7
    assert any("not its longest" in note for note in found.notes)
    trainer.train()


def test_nothing_fits_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    trainer = make(tmp_path, 8, 1)
    trainer.limit = 0
    before = weights(trainer)
    with pytest.raises(NothingFitsError, match="does not fit on cpu"):
        fit_trainer(trainer)
    assert trainer.args.per_device_train_batch_size == 8
    assert equal(before, weights(trainer))
    assert trainer.optimizer is None


def test_a_bug_in_the_model_surfaces_at_once(tmp_path: Path) -> None:
    class Broken(Model):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            raise ZeroDivisionError("the user's own mistake")

    trainer = make(tmp_path, 8, 1, model=Broken())
    with pytest.raises(ZeroDivisionError, match="the user's own mistake"):
        fit_trainer(trainer)
    assert not trainer.is_in_train
    assert trainer.optimizer is None


@pytest.mark.slow
def test_a_real_budget_is_kept(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2**19))

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            # 2 MiB a sample, and as much again in backward.
            return {"loss": (labels[:, None] * self.weight).relu().mean()}

    trainer = make(tmp_path, 128, 1, model=Wide(), data=samples(128))
    found = fit_trainer(trainer, memory="224MiB")
    assert found.micro_batch is not None
    assert 4 < found.micro_batch <= 112
    assert found.next_size is not None
    assert found.next_size.outcome == "out_of_memory"
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 128


def test_what_cannot_be_probed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match=r"takes a transformers\.Trainer"):
        fit_trainer(Model())
    with pytest.raises(InvalidInputError, match="train_dataset is empty"):
        fit_trainer(make(tmp_path, 8, 1, data=[]))
    trainer = make(tmp_path, 8, 1)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(InvalidInputError, match="runs on 2 ranks"):
        fit_trainer(trainer)
    monkeypatch.undo()
    trainer.args._n_gpu = 2
    with pytest.raises(InvalidInputError, match="DataParallel"):
        fit_trainer(trainer)


def test_it_is_reached_from_the_front_door() -> None:
    assert bw.integrations.transformers.fit_trainer is fit_trainer
    assert not hasattr(bw.integrations, "no_such_framework")
    code = "import sys, batchwright as bw; bw.integrations; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
