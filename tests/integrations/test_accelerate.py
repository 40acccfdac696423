"""`watch` in real accelerate loops: what it measures is right, where it is told, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import nn
from torch.utils.data import DataLoader

from batchwright.errors import InvalidInputError
from batchwright.integrations.accelerate import audit_first_window, prepare_loader, watch
from batchwright.integrations.trackers import TrackerWarning, effective_batch_text
from batchwright.sampler.token_batch_sampler import TokenBatchSampler
from tests.integrations.event_files import scalars, texts
from tests.integrations.watched_training import trained_by_accelerate
from tests.noise.regression import batches_of, expected, loss_of, make_model, seen_by
from tests.torchrun import told_by_ranks

WORKER = Path(__file__).with_name("workers") / "watched_worker.py"


@pytest.mark.parametrize(
    ("number", "dropout"),
    [
        (4, 0.3),
        pytest.param(1, 0.0, marks=pytest.mark.slow),
        pytest.param(1, 0.3, marks=pytest.mark.slow),
        pytest.param(4, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_loop_with_it_is_bit_for_bit_the_loop_without(number: int, dropout: float) -> None:
    watched, watching, losses = trained_by_accelerate(number, dropout=dropout)
    numbers = torch.random.get_rng_state()
    alone, _, bare = trained_by_accelerate(number, dropout=dropout, is_watched=False)
    assert losses == bare
    assert torch.equal(numbers, torch.random.get_rng_state())
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
    assert watching.critical_batch is not None
    assert watching.steps == 3


def test_it_measures_the_observations_by_hand_and_close_leaves_no_hook() -> None:
    model, watched, _ = trained_by_accelerate(4, window=10**9)
    # The first window is looked at example by example.
    for found, wanted in zip(seen_by(watched.noise)[1:], expected([4] * 4)[1:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)
    assert (watched.noise.skipped, watched.notes) == ({}, [])
    watched.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert watched.critical_batch is not None


def test_metrics_go_to_the_accelerators_own_trackers(tmp_path: Path) -> None:
    _, watched, _ = trained_by_accelerate(
        4, steps=8, log_every=2, log_with="tensorboard", project_dir=str(tmp_path),
        prepare=lambda accelerator: accelerator.init_trackers("run"),
    )  # fmt: skip
    found = scalars(tmp_path / "run")
    assert found["batch/effective"] == {2: 16, 4: 16, 6: 16, 8: 16}
    # A lower end needs five observations, and more where they leave room for a drift down to nothing.
    assert list(found["batch/critical_low"])[-1] == 8
    assert min(found["batch/critical_low"]) >= 5
    assert found["batch/critical_low"][8] == pytest.approx(watched.metrics["batch/critical_low"])
    assert texts(tmp_path / "run") == {"Config/effective_batch_size": [effective_batch_text(4, 4)]}


def test_a_tracker_that_fails_does_not_end_the_loop() -> None:
    def fail(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("no route")

    with pytest.warns(TrackerWarning, match=r"ConnectionError: no route") as caught:
        _, watched, _ = trained_by_accelerate(4, tracker=fail, log_every=1)
    assert len(caught) == 1
    assert watched.steps == 3


def test_it_can_be_used_beside_the_audit_of_the_first_window() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 2
    plain = make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    batches = [batch for step in range(4) for batch in batches_of(step, [4, 4])]
    with (
        audit_first_window(accelerator, model, optimizer, loss_of) as audited,
        watch(accelerator, model, optimizer, micro_batch=4) as watched,
    ):
        for batch in audited.batches(batches):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    assert audited.audit is not None
    assert audited.audit.exact
    assert watched.noise is not None
    # The audit's own passes end within the first step, so that the second is the first to be seen whole.
    seen = seen_by(watched.noise)
    assert seen[-3] == pytest.approx(expected([1] * 8, steps=4)[-3], rel=1e-11)
    for found, wanted in zip(seen[-2:], expected([4, 4], steps=4)[-2:], strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)


def test_what_cannot_be_watched_is_refused() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidInputError, match="watch takes an Accelerator"):
        watch(None, model, optimizer, micro_batch=4)
    with pytest.raises(InvalidInputError, match="watch takes an Accelerator"):
        watch(accelerator, model, [1, 2], micro_batch=4)
    with pytest.raises(InvalidInputError, match="micro_batch must be a whole number"):
        watch(accelerator, model, optimizer, micro_batch=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="metrics cannot be logged to"):
        watch(accelerator, model, optimizer, micro_batch=4, tracker="runs/")


def test_another_models_optimizer_is_noted_not_measured() -> None:
    accelerator = Accelerator(cpu=True)
    said: list[str] = []
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    watched = watch(accelerator, nn.Linear(2, 1), optimizer, micro_batch=4, say=said.append)
    assert watched.noise is None
    assert said == watched.notes
    assert "holds none of the model's weights" in said[0]
    assert watched.metrics["batch/micro"] == 4


def test_an_engine_that_steps_by_itself_is_noted_not_measured() -> None:
    class DeepSpeedEngine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 1)

    engine, said = DeepSpeedEngine(), list[str]()
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    watched = watch(Accelerator(cpu=True), engine, optimizer, micro_batch=4, say=said.append)
    assert watched.critical_batch is None
    assert said == ["DeepSpeed adds up and steps by itself: the critical batch is not measured"]


def test_batches_by_budget_are_told_by_their_padding_and_not_measured() -> None:
    sampler = TokenBatchSampler([3, 9, 4, 7, 2, 8, 5, 6] * 4, max_tokens=32, rank=0, world_size=1)
    loader = prepare_loader(Accelerator(cpu=True), DataLoader(range(32), batch_sampler=sampler))  # type: ignore[arg-type]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientState._reset_state()
    watched = watch(Accelerator(cpu=True), model, optimizer, loader=loader, say=lambda _: None)
    assert watched.metrics == {"batch/accumulation": 1, "batch/waste": sampler.stats().waste}
    assert "batches by budget differ in size" in watched.notes[0]


@pytest.mark.slow
def test_two_ranks_give_one_answer_and_the_first_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = (told["accelerate"] for told in told_by_ranks(WORKER, tmp_path_factory))
    for found, wanted in zip(first["seen"], expected([4] * 4, steps=8), strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["batch/effective"] == 16
    assert ([row[0] for row in first["logged"]], second["logged"]) == ([2, 4, 6, 8], [])
    assert first["same losses"]
    assert second["same losses"]
