"""`fit` on a card that is not there: the same search, and an answer that is predicted, not certified."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import batchwright as bw
from batchwright.catalogue.cards import context_of, find_card
from batchwright.device.step import StepSettings
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import trace_workload
from tests.device.workloads import make_linear, mean_square
from tests.fitting import targets

CARD = "t4-16gb"
MIB = 2**20
WIDTH = 2048


def room(mib: int) -> int:
    return context_of(find_card(CARD)).typical_bytes + mib * MIB


def make_rows(**changes: Any) -> bw.Workload:
    """A sample is `rows` times 2 MiB, for input and output each; the weights are small."""
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(64, 64, bias=False),
        "batch": lambda n, rows=1: torch.randn(n, rows * 8192, 64),
    }
    return make_linear(**{**fields, **changes})


def runs(workload: bw.Workload, micro_batch: int, total_bytes: int, **settings: Any) -> bool:
    card = SimulatedCard(replace(find_card(CARD), total_bytes=total_bytes))
    try:
        trace_workload(workload, micro_batch, StepSettings(**settings), card=card)
    except torch.OutOfMemoryError:
        return False
    return True


class TestTheAnswer:
    def test_it_runs_on_the_card_and_one_more_runs_out_of_memory(self) -> None:
        result = bw.fit(make_rows(), on=CARD, memory=room(128))
        assert result.micro_batch == bw.estimate(make_rows(), on=CARD, memory=room(128), find_max=True).max_micro_batch
        assert result.micro_batch is not None
        assert result.next_size is not None
        assert (result.next_size.micro_batch, result.next_size.outcome) == (result.micro_batch + 1, "out_of_memory")
        assert runs(make_rows(), result.micro_batch, room(128))
        assert not runs(make_rows(), result.micro_batch + 1, room(128))

    def test_it_is_predicted_and_nothing_needed_to_be_given_back(self) -> None:
        model = nn.Linear(64, 64, bias=False)
        before = model.weight.detach().clone()
        result = bw.fit(make_rows(model=model), on="Tesla T4", memory=room(96), limit=4)
        assert (result.on, result.source, result.certified) == (CARD, "predicted", False)
        assert (result.restored.covered, result.restored.not_covered) == (("everything",), ())
        assert result.where == "on a simulated card: traced, not run"
        assert torch.equal(model.weight, before)
        assert (model.weight.device.type, model.weight.grad) == ("cpu", None)
        assert result.to_dict()["certified"] is False

    def test_seconds_are_predicted_and_the_answer_says_so(self) -> None:
        result = bw.fit(make_rows(), on=CARD, memory=room(96), limit=4)
        assert all(trial.step_seconds for trial in result.trials if trial.verdict == "fits")
        assert result.source == "predicted"
        assert any(note.startswith("seconds are predicted") for note in result.notes)

    def test_the_budget_is_the_card_without_its_context(self) -> None:
        result = bw.fit(make_rows(), on=CARD, memory=room(96), limit=2)
        assert result.limit_bytes == 96 * MIB
        assert any("of which a CUDA context takes" in note for note in result.notes)
        assert result.peak_bytes is not None
        assert result.peak_bytes.reserved is not None
        assert result.peak_bytes.reserved <= 96 * MIB

    def test_nothing_is_remembered_nor_recalled(self) -> None:
        trials = [len(bw.fit(make_rows(), on=CARD, memory=room(96), limit=3).trials) for _ in range(2)]
        assert trials[0] == trials[1]


class TestWhatItIsToldToDo:
    def test_a_limit(self) -> None:
        result = bw.fit(make_rows(), on=CARD, memory=room(128), limit=3)
        assert (result.micro_batch, result.limit) == (3, 3)

    def test_the_end_of_the_data(self) -> None:
        data = [torch.ones(8192, 64) for _ in range(5)]
        result = bw.fit(make_rows(batch=None, data=data), on=CARD, memory="2GiB")
        assert (result.micro_batch, result.limit) == (5, 5)
        assert result.next_size is not None
        assert result.next_size.outcome is None

    def test_powers_of_two(self) -> None:
        result = bw.fit(make_rows(), on=CARD, memory=room(128), powers_of_two=True)
        assert result.micro_batch is not None
        assert result.micro_batch & (result.micro_batch - 1) == 0
        assert not runs(make_rows(), 2 * result.micro_batch, room(128))

    def test_accumulation_is_traced(self) -> None:
        result = bw.fit(make_rows(), on=CARD, memory=room(96), accumulation=2, limit=64)
        assert result.micro_batch is not None
        assert {trial.accumulation for trial in result.trials} == {2}
        assert runs(make_rows(), result.micro_batch, room(96), accumulation=2)
        assert not runs(make_rows(), result.micro_batch + 1, room(96), accumulation=2)

    def test_shapes_give_a_table(self) -> None:
        result = bw.fit(make_rows(), on=CARD, memory=room(128), shapes={"rows": [1, 2, 4]})
        sizes = [row.micro_batch or 0 for row in result.shapes]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == 3
        assert {row.source for row in result.shapes} == {"predicted"}
        assert not any(row.certified for row in result.shapes)
        assert result.micro_batch == min(sizes)

    def test_evaluation_takes_more_samples(self) -> None:
        result = bw.fit(make_rows(evaluate=lambda model, batch: model(batch)), on=CARD, memory=room(96), evaluate=True)
        assert result.evaluation is not None
        assert (result.evaluation.source, result.evaluation.certified) == ("predicted", False)
        assert result.micro_batch is not None
        assert result.evaluation.micro_batch is not None
        assert result.evaluation.micro_batch > result.micro_batch

    def test_a_target_is_traced_in_this_process(self) -> None:
        result = bw.fit(f"{targets.__file__}:mlp", on=CARD, memory="2GiB", limit=4)
        assert (result.micro_batch, result.source) == (4, "predicted")


class TestWhatIsRefused:
    def test_a_plain_step(self) -> None:
        with pytest.raises(InvalidInputError, match="a plain step cannot be traced on a simulated card"):
            bw.fit(lambda n: None, on=CARD)

    def test_a_card_that_nobody_knows(self) -> None:
        with pytest.raises(InvalidInputError, match="no device and no card is called 't5-16gb'"):
            bw.fit(make_rows(), on="t5-16gb")

    def test_no_room_for_one_sample(self) -> None:
        with pytest.raises(NothingFitsError, match="micro-batch 1 does not fit on t4-16gb"):
            bw.fit(make_rows(), on=CARD, memory=room(20))

    def test_less_than_the_context_is_told_as_such(self) -> None:
        with pytest.raises(NothingFitsError) as no:
            bw.fit(make_rows(), on=CARD, memory="64MiB")
        assert "its CUDA context alone takes" in str(no.value)

    def test_a_mistake_in_the_step_is_the_users(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            bw.fit(make_rows(loss=loss), on=CARD)


def test_a_model_under_activation_checkpointing_is_fitted() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(512, WIDTH), nn.GELU(), nn.Linear(WIDTH, 512)) for _ in range(3)
            )

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return hidden

    workload = make_linear(model=Checkpointed, batch=lambda n: torch.randn(n, 512), loss=mean_square)
    result = bw.fit(workload, on=CARD, memory=room(100), start=2048)
    assert result.micro_batch is not None


@pytest.mark.slow
def test_one_of_several_ranks_holds_its_shard_and_fits_more() -> None:
    def sharded(model: Any) -> nn.Module:
        for layer in model:
            fully_shard(layer)
        whole: nn.Module = fully_shard(model)
        return whole

    workload = bw.Workload(
        model=lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))),
        batch=lambda n: torch.randn(n, 2048),
        loss=lambda model, x: model(x).mean(),
        optimizer=lambda params: torch.optim.AdamW(params),
        wrap=sharded,
    )
    options: dict[str, Any] = {"on": "t4-16gb", "memory": "900MiB", "limit": 2**16}
    alone, one_of_four = bw.fit(workload, **options), bw.fit(workload, **options, devices=4)
    assert alone.micro_batch is not None
    assert one_of_four.micro_batch is not None
    assert one_of_four.micro_batch > alone.micro_batch
    assert one_of_four.ranks == 4


def test_settings_of_the_allocator_count() -> None:
    result = bw.fit(make_linear(), on="t4-16gb", limit=8, allocator="expandable_segments:True")
    assert result.micro_batch == 8
    for options in ({"allocator": "expandable_segments:True"}, {"devices": 2}):
        with pytest.raises(InvalidInputError, match="simulated card"):
            bw.fit(make_linear(), limit=8, **options)


def test_the_three_peaks_are_told() -> None:
    result = bw.fit(make_linear(), on="t4-16gb", limit=8)
    assert result.peak_bytes is not None
    assert result.peak_bytes.device is not None
    assert any("allocated" in note and "reserved" in note and "device" in note for note in result.notes)
