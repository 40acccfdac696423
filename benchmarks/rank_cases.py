"""Workloads spread over ranks, for benchmarks/memory_ranks.py: small, and the same on a CPU and on a simulated card."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

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


def one_by_one(params: Any) -> torch.optim.Optimizer:
    """Where some weights are sharded and some are not, torch has no update of all at once."""
    return torch.optim.AdamW(params, foreach=False)


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


class Attention(nn.Module):
    """Causal self-attention whose heads may be shared out over ranks."""

    def __init__(self, width: int = WIDTH, head: int = 32) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.head = nn.Linear(width, width), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, over as many heads as the projections have."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """A whole layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.feed = nn.LayerNorm(WIDTH), Attention(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then the feed-forward part."""
        out: torch.Tensor = self.feed(x + self.attention(self.norm(x)))
        return out


class Model(nn.Module):
    """A small language model."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def trained(
    wrap: Any, *, loss: Any = None, optimizer: Any = adamw, model: Any = Model, length: int = LENGTH
) -> Workload:
    """A language model that a `wrap` spreads over ranks."""
    return Workload(
        model=model,
        batch=lambda n: torch.randint(0, WORDS, (n, length)),
        loss=loss or (lambda model, tokens: token_loss(model(tokens), tokens)),
        optimizer=optimizer,
        wrap=wrap,
    )


def over_tensors(device: str, *, sequence: bool = False) -> Any:
    """Tensor parallel, with activations between layers whole or cut along the sequence."""
    plan: dict[str, Any] = {}
    for name in ("attention.query", "attention.key", "attention.value", "feed.up"):
        plan[name] = ColwiseParallel()
    for name in ("attention.out", "feed.down"):
        plan[name] = RowwiseParallel()
    if sequence:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan |= {"norm": SequenceParallel(), "feed.norm": SequenceParallel(), "attention": whole}
        plan["feed.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "feed.down")}

    def wrap(model: Model) -> nn.Module:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
        if sequence:
            ends = {
                "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
            parallelize_module(model, mesh, ends)
        return model

    return wrap


class EvenRouter(nn.Module):
    """Sends as many tokens to each expert, by their place; its weights train all the same."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for every expert."""
        scores = self.gate(x)
        places = torch.arange(scores.numel(), device=x.device, dtype=scores.dtype).view_as(scores)
        first = places.div(scores.shape[-1], rounding_mode="floor").remainder(scores.shape[-1])
        wanted = (places.remainder(scores.shape[-1]) - first).remainder(scores.shape[-1])
        out: torch.Tensor = scores.softmax(-1) - wanted
        return out


class Experts(nn.Module):
    """A mixture of experts: each rank holds its share of them, and tokens travel to their expert and back."""

    def __init__(self, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.router, self.chosen, self.num = EvenRouter(experts), chosen, experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send tokens to their experts, let each work on its own, and send them back."""
        flat, size = x.flatten(0, 1), dist.get_world_size()
        group: Any = dist.group.WORLD
        weights, choice = torch.topk(self.router(flat), self.chosen, dim=-1)
        counts = torch.histc(choice.flatten().float(), bins=self.num, min=0, max=self.num).long()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent = counts.view(size, -1).sum(1).tolist()
        received = arriving.view(size, -1)
        order = choice.flatten().argsort(stable=True)
        tokens = all_to_all_single_autograd(flat[order // self.chosen], received.sum(1).tolist(), sent, group)
        weights_of: list[Any] = [self.up, self.down]
        up, down = (weight.to_local() for weight in weights_of)
        pieces = tokens.split(received.sum(0).tolist())
        worked = torch.cat([(piece @ up[number]).relu() @ down[number] for number, piece in enumerate(pieces)])
        back = all_to_all_single_autograd(worked, sent, received.sum(1).tolist(), group)
        scaled = back * weights.flatten()[order].unsqueeze(-1)
        out: torch.Tensor = x + torch.zeros_like(flat).index_add(0, order // self.chosen, scaled).view_as(x)
        return out


def over_experts(device: str) -> Any:
    """Expert parallel: the experts' weights are shared out over the ranks."""

    def wrap(model: Any) -> Any:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model.layers:
            for name, parameter in list(layer.feed.named_parameters(recurse=False)):
                layer.feed.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        return model

    return wrap


def mixture() -> Model:
    model = Model()
    for layer in model.layers:
        layer.feed = Experts()
    return model


def sharded(reshard: Any = None, *, head_reshard: Any = None, then: Any = None, **options: Any) -> Any:
    """FSDP2 over every layer and the rest; `then` does more to the model."""

    def wrap(model: Any) -> Any:
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard, **options)
        fully_shard(model.head, reshard_after_forward=reshard if head_reshard is None else head_reshard, **options)
        fully_shard(model, reshard_after_forward=reshard, **options)
        if then is not None:
            then(model)
        return model

    return wrap


def in_two_halves(device: str) -> Any:
    """Shard over one half of the ranks, and replicate over both."""

    def wrap(model: Any) -> Any:
        mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        return sharded(mesh=mesh)(model)

    return wrap


def synced_every_second(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Two micro-batches a step, whose gradients are reduced after the second."""
    model.num_micro_batches = getattr(model, "num_micro_batches", 0) + 1
    model.set_requires_gradient_sync(model.num_micro_batches % 2 == 0)
    return token_loss(model(tokens), tokens)


# Micro-batches of a step, where it is not one.
ACCUMULATION = {"FSDP2, gradients reduced every second time": 2, "FSDP2, two micro-batches": 2}


def sharded_cases() -> dict[str, Workload]:
    """FSDP2 in all its forms."""
    in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "FSDP2": trained(sharded()),
        "FSDP2, resharded after forward": trained(sharded(True)),
        "FSDP2, kept after forward": trained(sharded(False)),
        "FSDP2, kept in pairs": trained(sharded(2)),
        "FSDP2, the head kept": trained(sharded(True, head_reshard=False)),
        "FSDP2, kept after backward": trained(
            sharded(True, then=lambda model: model.set_reshard_after_backward(False))
        ),
        "FSDP2, two micro-batches": trained(sharded(True)),
        "FSDP2, gradients reduced every second time": trained(sharded(True), loss=synced_every_second),
        "FSDP2, bf16, reduced in fp32": trained(sharded(True, mp_policy=in_bf16)),
        "FSDP2, bf16, reduced in fp32, kept": trained(sharded(False, mp_policy=in_bf16)),
    }


PIPELINES: dict[str, dict[str, Any]] = {
    "1F1B": {"kind": Schedule1F1B},
    "GPipe": {"kind": ScheduleGPipe},
    "Interleaved1F1B": {"kind": ScheduleInterleaved1F1B, "per_rank": 2},
    "LoopedBFS": {"kind": ScheduleLoopedBFS, "per_rank": 2},
    "InterleavedZeroBubble": {"kind": ScheduleInterleavedZeroBubble, "per_rank": 2},
    "ZBVZeroBubble": {"kind": ScheduleZBVZeroBubble, "per_rank": 2, "is_v": True},
}


def cases_of(device: str) -> dict[str, Workload]:
    """Every case by its name. Context parallel is not among them: PyTorch's own has no attention for the CPU."""
    return {
        **{name: pipelined(device=device, **settings) for name, settings in PIPELINES.items()},
        "tensor parallel": trained(over_tensors(device), optimizer=one_by_one),
        "sequence parallel": trained(over_tensors(device, sequence=True), optimizer=one_by_one),
        "expert parallel": trained(over_experts(device), model=mixture, optimizer=one_by_one),
        **sharded_cases(),
        "FSDP2, replicated in two halves": trained(in_two_halves(device)),
        "DDP": trained(DistributedDataParallel),
        "DDP, gradients are views of buckets": trained(
            lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)
        ),
    }
