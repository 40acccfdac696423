"""`fit` end to end, on real processes and real limits where the claim is about these."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import BatchwrightError, InvalidInputError, NothingFitsError, StepFailedError
from batchwright.fitting.probe_process import Child, Job
from tests.fitting import targets

TARGETS = Path(targets.__file__)
MIB = 2**20


def raises_above(limit: int) -> Any:
    def step(n: int) -> None:
        if n > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return step


@pytest.mark.parametrize("limit", [1, 37, 100_000])
def test_a_step_that_merely_raises_is_searched_exactly(limit: int) -> None:
    result = bw.fit(raises_above(limit))
    assert result.micro_batch == limit
    assert result.certified
    assert len(result.trials) <= 40
    assert any("no operator of torch" in note for note in result.notes)


def test_nothing_fits_is_said_with_what_was_tried() -> None:
    with pytest.raises(NothingFitsError, match="micro-batch 1 does not fit on cpu"):
        bw.fit(raises_above(0))


def test_a_step_under_a_real_budget_is_certified_and_its_state_comes_back() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]

    def step(n: int) -> None:
        model(torch.randn(n, 512)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    result = bw.fit(step, memory=64 * MIB, state=[model, optimizer])
    assert result.micro_batch is not None
    assert result.next_size is not None
    assert (result.next_size.micro_batch, result.next_size.outcome) == (result.micro_batch + 1, "out_of_memory")
    assert result.headroom_bytes is not None
    assert result.headroom_bytes >= 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert any("Sequential" in words for words in result.restored.covered)


def test_a_live_workload_is_predicted_then_certified() -> None:
    model = targets.build()
    optimizer = torch.optim.Adam(model.parameters())
    workload = bw.Workload(model=model, batch=targets.batch, loss=targets.loss, optimizer=lambda _: optimizer)
    before = torch.random.get_rng_state()
    result = bw.fit(workload, memory=64 * MIB, cache=False)
    assert result.certified
    assert result.next_size is not None
    assert result.next_size.outcome == "out_of_memory"
    assert result.line is not None
    # Nine rows of 512 floats for each sample: what the trace counts alive when the loss is differentiated.
    assert (result.line.bytes_per_sample, result.line.source) == (9 * 4 * 512, "predicted")
    assert torch.equal(before, torch.random.get_rng_state())
    assert not optimizer.state


def test_a_target_runs_in_children() -> None:
    lines: list[str] = []
    result = bw.fit(f"{TARGETS}:mlp", memory=64 * MIB, limit=40, progress=lines.append)
    assert (result.micro_batch, len(result.trials)) == (40, 1)
    assert result.reason == "the limit is 40"
    assert result.peak is not None
    assert "trying micro-batch 40" in lines


def test_an_interrupt_in_a_child_ends_the_search() -> None:
    with pytest.raises(KeyboardInterrupt):
        bw.fit(f"{TARGETS}:interrupted", memory=64 * MIB, limit=4, cache=False)


def test_a_bug_in_a_child_keeps_its_traceback() -> None:
    with pytest.raises(StepFailedError, match="a bug of mine") as caught:
        bw.fit(f"{TARGETS}:with_bug", memory=64 * MIB, limit=4, cache=False)
    assert "targets.py" in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_child_that_is_killed_is_an_outcome() -> None:
    result = bw.fit(f"{TARGETS}:killed_above_100", memory=200 * MIB, start=100, limit=101, cache=False)
    assert result.micro_batch == 100
    assert result.trials[-1].rule == "killed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_child_that_is_told_to_end_is_no_mistake_of_the_users(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os; os.kill(os.getpid(), {number:d})"])
    process.wait()
    with pytest.raises(BatchwrightError, match=f"micro-batch 8 was ended by {number.name}") as raised:
        Child(Job(8), tmp_path, process, 0.0).outcome()
    assert raised.value.exit_code == 1


@pytest.mark.slow
def test_a_picklable_workload_can_be_isolated_and_another_says_why_not() -> None:
    result = bw.fit(targets.mlp(), memory=64 * MIB, limit=8, isolate=True, cache=False)
    assert (result.micro_batch, result.where) == (8, "each probe in a process of its own")
    workload = bw.Workload(model=lambda: nn.Linear(2, 1), batch=lambda n: torch.ones(n, 2), loss=targets.loss)
    with pytest.raises(InvalidInputError, match="cannot be handed to another process"):
        bw.fit(workload, isolate=True, limit=2)


def test_batchnorm_is_given_two_samples() -> None:
    workload = bw.Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        batch=lambda n: torch.randn(n, 8),
        loss=targets.loss,
        optimizer=targets.adam,
    )
    result = bw.fit(workload, start=1, limit=4, max_trials=3, cache=False)
    assert [trial.micro_batch for trial in result.trials][:2] == [1, 2]
    assert result.trials[0].is_too_small
    assert result.micro_batch is not None


def test_shapes_give_a_table_and_the_smallest_speaks_for_it() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if batch.shape[0] * batch.shape[1] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return targets.loss(model, batch)

    work = bw.Workload(
        model=lambda: nn.Linear(2, 1), batch=lambda n, max_crops=2: torch.ones(n, max_crops, 2), loss=loss
    )
    options: dict[str, Any] = {"limit": 64, "max_trials": 40, "cache": False, "scale": "max_crops:2=1.0,4=0.8,else=0.3"}
    result = bw.fit(work, shapes={"max_crops": [2, 4, 12]}, **options)
    assert [(f.shape["max_crops"], f.micro_batch) for f in result.shapes] == [(2, 50), (4, 25), (12, 8)]
    assert [f.trials[0].micro_batch for f in result.shapes] == [64, 51, 19]
    assert result.micro_batch == 8
    assert result.to_dict()["shapes"][0]["micro_batch"] == 50


def test_the_longest_samples_of_a_dataset_decide() -> None:
    data = [torch.zeros(10) for _ in range(50)] + [torch.zeros(1000) for _ in range(3)]
    seen: list[int] = []

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        seen.append(max(len(sample) for sample in samples))
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    work = bw.Workload(
        model=lambda: nn.Linear(1, 1), data=data, collate=collate, loss=lambda m, b: m(b[..., None]).mean()
    )
    result = bw.fit(work, cache=False)
    assert result.micro_batch == 53
    assert result.reason == "the dataset holds 53 samples"
    assert set(seen) == {1000}


def test_reading_samples_that_are_drawn_at_random_moves_no_generator() -> None:
    class Drawn(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1 + index % 2)

    work = bw.Workload(
        model=lambda: nn.Linear(1, 1),
        data=Drawn(),
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        loss=lambda m, b: m(b[..., None]).mean(),
    )
    before = torch.random.get_rng_state()
    bw.fit(work, limit=2, cache=False)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_evaluation_size_is_found_apart() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > (5 if torch.is_grad_enabled() else 9):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return targets.loss(model, batch)

    work = bw.Workload(
        model=lambda: nn.Linear(8, 1), batch=lambda n: torch.ones(n, 8), loss=loss, optimizer=targets.adam
    )
    result = bw.fit(work, limit=32, start=4, max_trials=9, evaluate=True, cache=False)
    assert result.micro_batch == 5
    assert result.evaluation is not None
    assert result.evaluation.micro_batch == 9


def test_generation_is_part_of_a_probe() -> None:
    def generate(model: nn.Module, batch: torch.Tensor) -> None:
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    work = bw.Workload(
        model=lambda: nn.Linear(8, 1),
        batch=lambda n: torch.ones(n, 8),
        loss=targets.loss,
        optimizer=targets.adam,
        generate=generate,
    )
    assert bw.fit(work, limit=8, start=4, max_trials=9, cache=False).micro_batch == 3


@pytest.mark.slow
def test_margin_keeps_headroom() -> None:
    result = bw.fit(targets.mlp(), memory=64 * MIB, margin=0.25, cache=False)
    assert result.headroom_bytes is not None
    assert result.headroom_bytes >= 16 * MIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit must be a whole number"),
        ({"margin": 1.2}, "margin must be at least 0 and below 1"),
        ({"scale": "crops:2=1,else=1"}, "no limit was given"),
        ({"start": 9, "limit": 8}, "start 9 is above limit 8"),
        ({"memory": 0}, "memory"),
        ({"max_trials": 0}, "max trials"),
        ({"on": "tpu"}, "no device and no card is called 'tpu'"),
        ({"shapes": {"seq_len": 5}}, "seq_len"),
        ({"state": [nn.Linear(1, 1)]}, "state= is for a plain step"),
    ],
)
def test_wrong_input_is_answered_with_what_was_received(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        bw.fit(targets.mlp(), **options)


def test_what_cannot_be_right_is_found_before_anything_long() -> None:
    def parts(**changes: Any) -> bw.Workload:
        fields = {"model": lambda: nn.Linear(8, 1), "batch": lambda n: torch.ones(n, 8), "loss": targets.loss}
        return bw.Workload(**{**fields, "optimizer": targets.adam, **changes})

    with pytest.raises(InvalidInputError, match="ignores its size"):
        bw.fit(parts(batch=lambda n: torch.ones(7, 8)))
    with pytest.raises(InvalidInputError, match="empty"):
        bw.fit(parts(batch=None, data=[]))
    other = nn.Linear(8, 1)
    with pytest.raises(InvalidInputError, match="trained nothing"):
        bw.fit(parts(loss=lambda model, batch: other(batch).mean()), limit=2, cache=False)
    with pytest.raises(InvalidInputError, match="received 7"):
        bw.fit(7)  # type: ignore[arg-type]


def test_a_model_spread_over_ranks_is_refused() -> None:
    class Spread(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(InvalidInputError, match="already spread over ranks"):
        bw.fit(bw.Workload(model=Spread(), batch=targets.batch, loss=targets.loss))


def test_a_live_scaler_and_what_the_functions_reach_come_back() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    generator = torch.Generator()
    workload = bw.Workload(
        model=model,
        batch=lambda n: torch.randn(n, 8, generator=generator),
        loss=lambda m, b: (m(b) - teacher(b)).pow(2).mean(),
        optimizer=lambda _: optimizer,
        scaler=lambda: scaler,
    )
    before = [generator.get_state(), *(t.clone() for t in (*teacher.buffers(), *model.parameters()))]
    scale_before = scaler.state_dict()
    for _ in range(2):
        result = bw.fit(workload, memory=200 * MIB, limit=16, cache=False)
        assert result.micro_batch == 16
        assert scaler.state_dict() == scale_before
        assert scaler._scale is None
        after = [generator.get_state(), *teacher.buffers(), *model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_step_that_ignores_its_size_is_doubted() -> None:
    result = bw.fit(lambda n: torch.ones(1000).sum(), memory=100 * MIB, limit=256)
    assert result.micro_batch == 256
    assert any("does the step use its size?" in note for note in result.notes)


def test_a_step_that_crashes_at_every_size_is_not_called_out_of_memory() -> None:
    with pytest.raises(StepFailedError, match="ended by SIGSEGV under its limit, at micro-batch 1"):
        bw.fit(f"{TARGETS}:crashing", memory=64 * MIB, start=1, limit=4, cache=False)


@pytest.mark.parametrize("memory", [None, "2GiB"])
@pytest.mark.parametrize("largest", [0, 1, 3, 37, 100])
def test_a_workload_that_raises_above_a_size_is_searched_to_the_sample(largest: int, memory: str | None) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > largest:  # in a trace as well as in a run
            raise torch.OutOfMemoryError("CUDA out of memory")
        squares: torch.Tensor = model(batch).square()
        return squares.mean()

    workload = bw.Workload(
        model=lambda: nn.Linear(16, 1), batch=lambda n: torch.randn(n, 16), loss=loss, optimizer=torch.optim.SGD
    )
    if largest == 0:
        with pytest.raises(bw.BatchwrightError, match="does not fit"):
            bw.fit(workload, cache=False, memory=memory)
        return
    result = bw.fit(workload, cache=False, memory=memory)
    assert result.micro_batch == largest
    assert result.next_size is not None
    assert (result.next_size.micro_batch, result.next_size.outcome) == (largest + 1, "out_of_memory")
