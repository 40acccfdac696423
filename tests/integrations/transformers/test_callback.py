"""BatchwrightCallback in real Trainer runs: what it measures is right, where it is told, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

from batchwright.errors import InvalidInputError
from batchwright.integrations.trackers import TrackerWarning, effective_batch_text
from batchwright.integrations.transformers import BatchwrightCallback, use_batch_sampler
from batchwright.sampler.token_batch_sampler import TokenBatchSampler
from tests.integrations.event_files import scalars, texts
from tests.integrations.test_audit_of_frameworks import padded, sentences, small
from tests.integrations.watched_training import WithLoss, trained_by_transformers
from tests.noise.regression import expected, seen_by
from tests.torchrun import told_by_ranks

WORKER = Path(__file__).parents[1] / "workers" / "watched_worker.py"


def callback_of(**options: Any) -> tuple[BatchwrightCallback, list[str]]:
    said: list[str] = []
    return BatchwrightCallback(window=10**9, say=said.append, **options), said


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    ("number", "dropout"),
    [
        (4, 0.3),
        pytest.param(1, 0.0, marks=pytest.mark.slow),
        pytest.param(1, 0.3, marks=pytest.mark.slow),
        pytest.param(4, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_it_is_bit_for_bit_the_run_without(tmp_path: Path, number: int, dropout: float) -> None:
    callback, _ = callback_of()
    watched = trained_by_transformers(tmp_path, number, [callback], dropout=dropout)
    numbers = torch.random.get_rng_state()
    alone = trained_by_transformers(tmp_path, number, [], dropout=dropout)
    assert losses_of(watched) == losses_of(alone)
    assert len(losses_of(alone)) == 3
    assert torch.equal(numbers, torch.random.get_rng_state())
    for one, other in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.critical_batch is not None


def test_it_measures_the_observations_by_hand_and_leaves_no_hook(tmp_path: Path) -> None:
    callback, _ = callback_of(audit=False)
    trainer = trained_by_transformers(tmp_path, 4, [callback])
    assert callback.noise is not None
    # The first window is looked at example by example.
    for found, wanted in zip(seen_by(callback.noise)[1:], expected([4] * 4)[1:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)
    assert callback.noise.skipped == {}
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())
    assert not any(parameter._backward_hooks for parameter in trainer.model.parameters())


def test_the_accumulation_is_audited_once_and_said(tmp_path: Path) -> None:
    callback, said = callback_of()
    trained_by_transformers(tmp_path, 4, [callback])
    assert callback.audit is not None
    assert callback.audit.exact
    assert len(said) == 1
    assert "is that of the big batch" in said[0]
    callback, said = callback_of(audit=False)
    trained_by_transformers(tmp_path, 4, [callback])
    assert (callback.audit, said) == (None, [])


def llama_trained(folder: Path, callbacks: list[Any], *, bf16: bool) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, logging_steps=1,
        use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", bf16=bf16,
    )  # fmt: skip
    model, rows = small(transformers.LlamaForCausalLM), sentences(per_token=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=padded, callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.slow
def test_autocast_is_off_for_the_audit_and_on_for_the_run(tmp_path: Path) -> None:
    callback, _ = callback_of()
    watched = llama_trained(tmp_path, [callback], bf16=True)
    assert callback.audit is not None
    assert callback.audit.exact
    assert losses_of(watched) == losses_of(llama_trained(tmp_path, [], bf16=True))
    assert losses_of(watched) != losses_of(llama_trained(tmp_path, [], bf16=False))


def test_metrics_stand_in_the_trainers_logs_and_in_its_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    told: list[tuple[int, dict[str, float]]] = []
    callback, _ = callback_of(audit=False, tracker=lambda metrics, step: told.append((step, metrics)))
    trainer = trained_by_transformers(tmp_path, 4, [callback], steps=8, report_to=["tensorboard"])
    rows = [row for row in trainer.state.log_history if "loss" in row]
    settings = {"batch/micro": 4, "batch/accumulation": 4, "batch/effective": 16}
    assert all(row.items() >= settings.items() for row in rows)
    # An interval needs five observations, and more where they leave room for a drift down to nothing; until then there
    # is no number, rather than one that is none.
    bounded = [row for row in rows if "batch/critical_low" in row]
    assert bounded[-1]["step"] == 8
    assert bounded[0]["step"] >= 5
    assert rows[-1]["batch/critical_low"] <= rows[-1].get("batch/critical", float("inf"))
    assert [step for step, _ in told] == list(range(1, 9))
    assert told[-1][1] == {name: value for name, value in rows[-1].items() if name.startswith("batch/")}
    found = scalars(tmp_path / "board")["train/batch/critical_low"]
    assert found == pytest.approx({row["step"]: row["batch/critical_low"] for row in bounded})
    assert texts(tmp_path / "board")["Config/effective_batch_size"] == [effective_batch_text(4, 4)]


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    def fail(metrics: dict[str, float], step: int) -> None:
        raise OSError("disk full")

    callback, _ = callback_of(tracker=fail, audit=False)
    with pytest.warns(TrackerWarning, match=r"did not take log at step 1 \(OSError: disk full\)") as caught:
        trainer = trained_by_transformers(tmp_path, 4, [callback])
    assert len(caught) == 1
    assert trainer.state.global_step == 3


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = iter({"x": row} for row in torch.randn(48, 5, dtype=torch.float64))

    def __iter__(self) -> Any:
        return self.rows


def test_a_stream_is_not_audited_since_its_samples_would_be_missing(tmp_path: Path) -> None:
    callback, _ = callback_of()
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=3, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(WithLoss(), arguments, train_dataset=Stream(), callbacks=[callback])
    trainer.train()
    assert callback.audit is None
    assert ["stream" in note for note in callback.notes] == [True]
    assert callback.noise is not None
    assert callback.noise.observations == 3


def test_an_audit_that_fails_is_noted_and_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trainer: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("batchwright.integrations.transformers.callback.audit_trainer", fail)
    callback, said = callback_of()
    trainer = trained_by_transformers(tmp_path, 4, [callback])
    assert trainer.state.global_step == 3
    assert said == callback.notes == ["the accumulation was not audited: RuntimeError: out of memory"]


def test_what_cannot_be_used_is_refused_before_training() -> None:
    with pytest.raises(InvalidInputError, match="metrics cannot be logged to 7"):
        BatchwrightCallback(tracker=7)
    with pytest.raises(InvalidInputError, match="audit must be True or False; received 'yes'"):
        BatchwrightCallback(audit="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="every must be a whole number"):
        BatchwrightCallback(every=0)
    with pytest.raises(InvalidInputError, match="window must be above 0, in samples; received -3"):
        BatchwrightCallback(window=-3)


def test_batches_by_budget_are_told_by_their_padding_and_not_measured(tmp_path: Path) -> None:
    lengths = [3, 9, 4, 7, 2, 8, 5, 6] * 4
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]
    callback, said = callback_of(audit=False)
    arguments = transformers.TrainingArguments(
        str(tmp_path), gradient_accumulation_steps=2, num_train_epochs=1, logging_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = small(transformers.LlamaForCausalLM)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=padded, callbacks=[callback])
    sampler = TokenBatchSampler(lengths, max_tokens=32, rank=0, world_size=1)
    use_batch_sampler(trainer, sampler)
    waste = sampler.stats().waste
    trainer.train()
    assert trainer.state.log_history[0].items() >= {"batch/accumulation": 2, "batch/waste": waste}.items()
    assert not {"batch/micro", "batch/effective"} & set(trainer.state.log_history[0])
    assert callback.critical_batch is None
    assert ["batches by budget differ in size" in text for text in said] == [True]


@pytest.mark.slow
def test_two_ranks_give_one_answer_and_the_first_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = (told["transformers"] for told in told_by_ranks(WORKER, tmp_path_factory))
    for found, wanted in zip(first["seen"], expected([4] * 4, steps=8), strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["batch/effective"] == 16
    assert (len(first["logged"]), second["logged"]) == (8, [])
    assert (len(first["said"]), second["said"]) == (1, [])
    assert first["same losses"]
    assert second["same losses"]
