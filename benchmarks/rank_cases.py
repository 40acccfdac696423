"""Workloads spread over ranks, for benchmarks/memory_ranks.py: small, and the same on a CPU and on a simulated card."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from batchwright import Workload

WIDTH, LENGTH, LAYERS, WORDS = 256, 64, 8, 2000


class Block(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to what comes in."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=True)


def stage_parts(num_stages: int, index: int) -> nn.Sequential:
    """The layers of one stage: the first also embeds, the last has the head."""
    parts: list[nn.Module] = [Block() for _ in range(LAYERS // num_stages)]
    if index == 0:
        parts.insert(0, nn.Embedding(WORDS, WIDTH))
    if index == num_stages - 1:
        parts.append(nn.Linear(WIDTH, WORDS))
    return nn.Sequential(*parts)


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def own_stages(per_rank: int, *, is_v: bool = False) -> list[int]:
    """The stages of this rank: every so many, or of a V the first from the front and the first from the back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [rank, 2 * size - 1 - rank] if is_v else [rank + size * number for number in range(per_rank)]


def pipelined(kind: Any, device: str, *, per_rank: int = 1, micro_batches: int = 8, is_v: bool = False) -> Workload:
    """A pipeline, written as PyTorch's tutorial writes it."""

    def build() -> nn.Module:
        num_stages = per_rank * dist.get_world_size()
        return nn.ModuleList(stage_parts(num_stages, index) for index in own_stages(per_rank, is_v=is_v))

    def wrap(model: Any) -> Any:
        num_stages = per_rank * dist.get_world_size()
        stages = [
            PipelineStage(part, index, num_stages, torch.device(device))
            for part, index in zip(model, own_stages(per_rank, is_v=is_v), strict=True)
        ]
        return kind(stages if per_rank > 1 else stages[0], n_microbatches=micro_batches, loss_fn=token_loss)

    def loss(schedule: Any, tokens: torch.Tensor) -> Any:
        own = own_stages(per_rank, is_v=is_v)
        inputs = (tokens,) if 0 in own else ()
        is_last = per_rank * dist.get_world_size() - 1 in own
        losses: list[torch.Tensor] | None = [] if is_last else None
        schedule.step(*inputs, target=tokens if is_last else None, losses=losses)

    return Workload(
        model=build, batch=lambda n: torch.randint(0, WORDS, (n, LENGTH)), loss=loss, optimizer=adamw, wrap=wrap
    )


def cases_of(device: str) -> dict[str, Workload]:
    """Every case by its name."""
    return {
        "1F1B": pipelined(Schedule1F1B, device),
        "GPipe": pipelined(ScheduleGPipe, device),
        "Interleaved1F1B": pipelined(ScheduleInterleaved1F1B, device, per_rank=2),
        "LoopedBFS": pipelined(ScheduleLoopedBFS, device, per_rank=2),
        "InterleavedZeroBubble": pipelined(ScheduleInterleavedZeroBubble, device, per_rank=2),
        "ZBVZeroBubble": pipelined(ScheduleZBVZeroBubble, device, per_rank=2, is_v=True),
    }
