"""BatchwrightCallback in real Lightning runs: what it measures is right, where it is told, and that it changes nothing."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from batchwright.errors import InvalidInputError
from batchwright.integrations.lightning import BatchwrightCallback
from batchwright.integrations.trackers import effective_batch_text
from tests.integrations.event_files import scalars, texts
from tests.integrations.watched_training import Module, parts, trained_by_lightning
from tests.noise.regression import expected, seen_by
from tests.torchrun import told_by_ranks

WORKER = Path(__file__).with_name("workers") / "watched_worker.py"
pytestmark = pytest.mark.filterwarnings("ignore")


def callback_of(**options: Any) -> tuple[BatchwrightCallback, list[str]]:
    said: list[str] = []
    return BatchwrightCallback(window=10**9, say=said.append, **options), said


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
    modules = [Module(number, dropout=dropout) for _ in range(2)]
    numbers = []
    for module, callbacks in zip(modules, ([callback], []), strict=True):
        trained_by_lightning(tmp_path, module, number, callbacks)
        numbers.append(torch.random.get_rng_state())
    watched, alone = modules
    assert watched.losses == alone.losses
    assert len(alone.losses) == 3 * number
    assert torch.equal(*numbers)
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.critical_batch is not None


@pytest.mark.parametrize("clip", [None, pytest.param(1e9, marks=pytest.mark.slow)])
def test_it_measures_the_observations_by_hand_and_leaves_no_hook(tmp_path: Path, clip: float | None) -> None:
    callback, _ = callback_of(audit=False)
    module = Module(4)
    trained_by_lightning(tmp_path, module, 4, [callback], gradient_clip_val=clip)
    assert callback.noise is not None
    # The first window is looked at example by example.
    for found, wanted in zip(seen_by(callback.noise)[1:], expected([4] * 4)[1:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)
    assert callback.noise.skipped == {}
    assert not any(each._forward_pre_hooks for each in module.modules())
    assert not any(parameter._backward_hooks for parameter in module.parameters())


def test_the_first_window_is_audited_where_that_changes_nothing(tmp_path: Path) -> None:
    callback, said = callback_of()
    trained_by_lightning(tmp_path, Module(4), 4, [callback])
    assert callback.audit is not None
    assert callback.audit.exact
    assert len(said) == 1
    # What the audit itself ran is not measured.
    assert callback.noise is not None
    assert callback.noise.observations == 2
    for dropout, accumulation, reason in ((0.1, 4, "dropout is on"), (0.0, 1, "nothing to add up")):
        callback, said = callback_of()
        trained_by_lightning(tmp_path, Module(4, dropout=dropout), accumulation, [callback])
        assert callback.audit is None
        assert reason in said[0]


class Found(Module):
    """Has the size of its batches from outside, as BatchSizeFinder wants it."""

    def train_dataloader(self) -> Any:
        return DataLoader(torch.cat(self.batches), batch_size=self.batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_works_beside_lightnings_own_batch_size_finder(tmp_path: Path, is_first: bool) -> None:
    callback, _ = callback_of()
    modules = []
    for with_callback in (True, False):
        finder = BatchSizeFinder(max_trials=3, init_val=2, steps_per_trial=1)
        module = Found(4, steps=8)
        both: list[Any] = [callback, finder] if is_first else [finder, callback]
        trained_by_lightning(tmp_path, module, 2, both if with_callback else [finder])
        assert finder.optimal_batch_size == 8
        modules.append(module)
    assert modules[0].losses == modules[1].losses
    assert callback.metrics.items() >= {"batch/micro": 8, "batch/accumulation": 2, "batch/effective": 16}.items()
    assert callback.noise is not None
    # Eight steps, the first of them audited.
    assert (callback.noise.observations, callback.noise.skipped) == (7, {})


def test_a_finder_that_runs_between_epochs_is_followed(tmp_path: Path) -> None:
    class Later(BatchSizeFinder):
        def on_fit_start(self, *_: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.scale_batch_size(trainer, pl_module)

    callback, _ = callback_of(audit=False)
    module = Found(4, steps=8)
    trained_by_lightning(
        tmp_path, module, 2, [Later(max_trials=3, init_val=4, steps_per_trial=1), callback], max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    assert callback.metrics["batch/micro"] == module.batch_size == 16
    assert callback.noise is not None
    # 32 steps of 2 x 2 samples in the first epoch, 4 of 2 x 16 in the last: none is lost to the change.
    assert callback.noise.observations >= 36
    assert callback.noise.skipped == {}


def test_metrics_go_to_the_loggers_and_the_product_as_text(tmp_path: Path) -> None:
    table = CSVLogger(str(tmp_path), version=0)
    loggers = [TensorBoardLogger(str(tmp_path), name="board", version=0), table]
    callback, _ = callback_of()
    trained_by_lightning(tmp_path, Module(4, steps=9), 4, [callback], logger=loggers, log_every_n_steps=3)
    folder = tmp_path / "board" / "version_0"
    found = scalars(folder)
    assert found["batch/effective"] == {2: 16, 5: 16, 8: 16}
    assert list(found["loss"]) == [2, 5, 8]
    assert list(found["batch/critical_low"]) == [5, 8]
    assert texts(folder) == {"Config/effective_batch_size": [effective_batch_text(4, 4)]}
    with Path(str(table.log_dir), "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["batch/effective"]]
    assert [(row["step"], row["batch/micro"]) for row in rows] == [("2", "4"), ("5", "4"), ("8", "4")]


def test_two_optimizers_are_not_measured_and_said(tmp_path: Path) -> None:
    class Two(Module):
        def __init__(self) -> None:
            super().__init__(2)
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).pow(2).mean()
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.net if isinstance(layer, nn.Linear)]

    callback, _ = callback_of()
    trained_by_lightning(tmp_path, Two(), 1, [callback])
    assert callback.critical_batch is None
    assert any("2 optimizers" in note for note in callback.notes)
    assert callback.metrics["batch/micro"] == 4


def test_what_cannot_be_used_is_refused_before_training() -> None:
    with pytest.raises(InvalidInputError, match="metrics cannot be logged to 7"):
        BatchwrightCallback(tracker=7)
    with pytest.raises(InvalidInputError, match="micro_batch must be a whole number"):
        BatchwrightCallback(micro_batch=0)


def test_batches_without_a_size_are_counted_by_what_is_told(tmp_path: Path) -> None:
    class Opaque:
        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows

    class Wrapped(Module):
        def train_dataloader(self) -> Any:
            return DataLoader([Opaque(rows) for rows in parts(4)], batch_size=None)  # type: ignore[arg-type]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch.rows, batch_idx)

    callback, _ = callback_of(audit=False)
    trained_by_lightning(tmp_path, Wrapped(4), 4, [callback])
    assert callback.critical_batch is None
    assert "how many samples" in callback.notes[0]
    callback, _ = callback_of(audit=False, micro_batch=4)
    trained_by_lightning(tmp_path, Wrapped(4), 4, [callback])
    assert callback.noise is not None
    assert seen_by(callback.noise)[-1] == pytest.approx(expected([4] * 4)[-1], rel=1e-11)


@pytest.mark.slow
def test_two_ranks_give_one_answer_and_the_first_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = (told["lightning"] for told in told_by_ranks(WORKER, tmp_path_factory))
    for found, wanted in zip(first["seen"], expected([4] * 4, steps=8), strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["batch/effective"] == 16
    assert (len(first["logged"]), second["logged"]) == (8, [])
    assert (len(first["said"]), second["said"]) == (1, [])
    assert first["same losses"]
    assert second["same losses"]
