"""Pipeline stages on a simulated card: every rank runs its own schedule, and the answer is of the one that holds most."""

from __future__ import annotations

from dataclasses import replace
from traceback import extract_tb
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.device.step import StepSettings
from batchwright.errors import CannotTraceError, InvalidInputError
from batchwright.memory.breakdown import break_down
from batchwright.simulated.card import SimulatedCard
from batchwright.simulated.pipelines import Pipeline, run_every_rank
from batchwright.trace.run import trace_workload
from batchwright.units import parse_bytes

RANKS, WIDTH, ROWS = 2, 256, 1024
OUTPUT_BYTES = ROWS * WIDTH * 4


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def layers(num: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num)))


def pipelined(kind: Any, *, per_rank: int = 1, micro_batches: int = 8) -> bw.Workload:
    def wrap(model: Any) -> Any:
        rank, num_stages = dist.get_rank(), per_rank * RANKS
        stages = [
            PipelineStage(model[index : index + 1], index, num_stages, torch.device("cuda"))
            for index in range(rank, num_stages, RANKS)
        ]
        return kind(stages if per_rank > 1 else stages[0], n_microbatches=micro_batches, loss_fn=mean_square)

    def loss(schedule: Any, batch: torch.Tensor) -> Any:
        rank = dist.get_rank()
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == RANKS - 1 else None)

    return bw.Workload(
        model=lambda: layers(4),
        batch=lambda n: torch.randn(n, WIDTH),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        wrap=wrap,
    )


def activations(workload: bw.Workload, rank: int) -> int:
    """Outputs of the layer that are held at most at once on a rank."""
    card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
    traced = trace_workload(workload, ROWS, StepSettings(devices=RANKS, rank=rank), card=card)
    held = most = 0
    for block, change in traced.log.changes:
        if "addmm" in block.operator and change in (OUTPUT_BYTES, -OUTPUT_BYTES):
            held += change
            most = max(most, held)
    return most // OUTPUT_BYTES


class TestSchedules:
    @pytest.mark.parametrize("rank", [0, RANKS - 1])
    def test_1f1b_holds_a_micro_batch_for_every_stage_after_it_and_one(self, rank: int) -> None:
        assert activations(pipelined(Schedule1F1B), rank) == RANKS - rank

    def test_gpipe_holds_them_all(self) -> None:
        assert activations(pipelined(ScheduleGPipe), 1) == 8


def on(memory: str | int, workload: bw.Workload) -> Any:
    card = SimulatedCard(replace(find_card("a100-40gb"), total_bytes=parse_bytes(memory)))
    return trace_workload(workload, ROWS, StepSettings(devices=RANKS), card=card)


def test_the_answer_is_of_the_rank_that_holds_the_most_and_says_so() -> None:
    traced = on("40GiB", pipelined(ScheduleInterleaved1F1B, per_rank=2))
    note = next(note for note in traced.notes if "pipeline" in note)
    assert "pipeline of 4 stages on 2 ranks, ScheduleInterleaved1F1B with 8 micro-batches" in note
    assert "which holds the most" in note
    assert not dist.is_initialized()


def test_one_rank_that_runs_out_of_memory_in_a_stage_is_an_answer_for_all() -> None:
    workload = pipelined(ScheduleGPipe)
    peak = on("40GiB", workload).on_card[0].device
    assert peak is not None
    with pytest.raises(torch.OutOfMemoryError) as raised:
        on(peak - 4 * 2**20, workload)
    assert any(line.name == "stage_backward" for line in extract_tb(raised.tb))


def test_stages_may_be_sharded_too() -> None:
    """Two stages, each over two ranks: rank 0's pipeline is of ranks 0 and 2."""

    def wrap(model: Any) -> Any:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
        index = mesh["pp"].get_local_rank()
        part = fully_shard(model[2 * index : 2 * index + 2], mesh=mesh["dp"])
        stage = PipelineStage(part, index, 2, torch.device("cuda"), group=mesh["pp"].get_group())
        return Schedule1F1B(stage, n_microbatches=4, loss_fn=mean_square)

    def loss(schedule: Any, batch: torch.Tensor) -> Any:
        is_first = dist.get_rank() < 2
        schedule.step(*([batch] if is_first else []), target=None if is_first else batch)

    workload = replace(pipelined(Schedule1F1B), wrap=wrap, loss=loss)
    card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
    traced = trace_workload(workload, 8, StepSettings(devices=4), card=card)
    assert break_down(traced.log).parts["weights"] == pytest.approx(2 * (WIDTH * WIDTH + WIDTH) * 4 / 2, rel=0.01)
    assert any("reserved by rank: 0: " in note and ", 2: " in note for note in traced.notes)


class TestBadInput:
    def test_a_schedule_whose_ranks_wait_for_each_other(self) -> None:
        def run(rank: int, pipeline: Pipeline) -> Any:
            pipeline.ranks = (0, 1)
            return pipeline.receive(1 - rank, rank)

        with pytest.raises(CannotTraceError, match="wait for each other: rank 0 for rank 1, rank 1 for rank 0"):
            run_every_rank(run)

    def test_a_wrap_that_returns_the_stage(self) -> None:
        workload = replace(
            pipelined(Schedule1F1B),
            wrap=lambda model: PipelineStage(model, dist.get_rank(), RANKS, torch.device("cuda")),
        )
        with pytest.raises(InvalidInputError, match=r"(?s)received PipelineStage.*Schedule1F1B"):
            bw.estimate(workload, micro_batch=8, on="a100-40gb", devices=RANKS)

    def test_a_scaler(self) -> None:
        workload = replace(pipelined(Schedule1F1B), scaler=lambda: torch.amp.GradScaler("cuda"))
        with pytest.raises(InvalidInputError, match="the schedule's loss_fn"):
            bw.estimate(workload, micro_batch=8, on="a100-40gb", devices=RANKS)
