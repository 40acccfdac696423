"""torchtune's recipes on one card: of 2024 without torch.compile, of its Llama 3.2 table with it too.

Facts of torchtune/modules and recipes/*_single_device.py at the time: separate projections, rotation and RMSNorm in
fp32, SDPA, weights and everything else in bf16. Until summer 2024 the logits were cast to fp32, cut by one position
and copied, and given to one cross entropy. Each layer is checkpointed (not reentrant). With samples packed to one
length, attention goes over blocks of samples in one fused kernel: traced as causal SDPA, which keeps the same tensors.

A Llama 2 was built by cloning one layer (modules/transformer.py, `_get_clones`): each clone has a table of rotations of
its own, and the memory of the layer that was cloned stays in torch's cache. With both, building the 7B with LoRA takes
13.96 GB, the figure that torchtune's tutorial prints for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchwright as bw
from gpu_cases.loop_variables import hold
from gpu_cases.optimizers_of_the_time import StateElsewhere, SteppedInBackward
from gpu_cases.recipes import Recipe


@dataclass(frozen=True)
class Llama:
    """Sizes, and where LoRA is: layers by name, with a rank."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    tied: bool = False
    rank: int = 0
    lora: frozenset[str] = frozenset()
    checkpointed: bool = True
    cloned: bool = False


class LoRALinear(nn.Module):
    """A projection with a low-rank update beside it, without dropout; plain where LoRA is not on it."""

    def __init__(self, inputs: int, outputs: int, model: Llama, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.rank = model.rank if name in model.lora else 0
        if self.rank:
            self.lora_a, self.lora_b = (
                nn.Linear(inputs, self.rank, bias=False),
                nn.Linear(self.rank, outputs, bias=False),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projected input."""
        out = F.linear(x, self.weight)
        return out + 2.0 * self.lora_b(self.lora_a(x)) if self.rank else out


class RMSNorm(nn.Module):
    """In fp32, cast back before the scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed input."""
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def rotate(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours, in fp32."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = cache[: x.size(1)].view(-1, x.size(1), 1, pairs.size(3), 2)
    turned = torch.stack(
        [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
        ],
        -1,
    )
    return turned.flatten(3).type_as(x)


class Layer(nn.Module):
    """One layer: attention and a gated feed-forward part."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model
        size = model.width // model.heads
        self.q = LoRALinear(model.width, model.width, model, "q")
        self.k = LoRALinear(model.width, model.kv_heads * size, model, "k")
        self.v = LoRALinear(model.width, model.kv_heads * size, model, "v")
        self.out = LoRALinear(model.width, model.width, model, "attn_out")
        self.w1, self.w3 = (LoRALinear(model.width, model.mlp, model, "mlp") for _ in range(2))
        self.w2 = LoRALinear(model.mlp, model.width, model, "mlp")
        self.sa_norm, self.mlp_norm = RMSNorm(model.width), RMSNorm(model.width)

    def own_table(self, length: int) -> torch.Tensor:
        """Make a table of rotations, as each clone has one, and return it."""
        table = _rotations(self.model, length)
        self.register_buffer("table", table, persistent=False)
        return table

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        hidden = self._attend(self.sa_norm(x), cache) + x
        normed = self.mlp_norm(hidden)
        out: torch.Tensor = hidden + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return out

    def _attend(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads, groups = self.model.heads, self.model.kv_heads
        size = width // heads
        q = rotate(self.q(x).view(batch, length, heads, size), cache).transpose(1, 2)
        k = rotate(self.k(x).view(batch, length, groups, size), cache)
        v = self.v(x).view(batch, length, groups, size)
        if groups != heads:
            k, v = (
                part.unsqueeze(3)
                .expand(batch, length, groups, heads // groups, size)
                .reshape(batch, length, heads, size)
                for part in (k, v)
            )
        attended = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        out: torch.Tensor = self.out(attended.transpose(1, 2).contiguous().view(batch, length, width))
        return out


class Decoder(nn.Module):
    """The whole model; its logits are cast to fp32."""

    cache: torch.Tensor
    chunks = 0

    def __init__(self, model: Llama, length: int) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = RMSNorm(model.width)
        self.output = LoRALinear(model.width, model.vocabulary, model, "output")
        if model.tied:
            self.output.weight = cast("nn.Parameter", self.embedding.weight)
        self.to(torch.bfloat16)
        if model.cloned:
            # Each in place of the one table; all are alike, so the last serves every layer here.
            self.cache = [cast("Layer", layer).own_table(length) for layer in self.layers][-1]
        else:
            self.register_buffer("cache", _rotations(model, length), persistent=False)
        if model.rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = "lora_" in name

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return the logits, in parts where they are chunked."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = (
                checkpoint(layer, x, self.cache, use_reentrant=False)
                if self.model.checkpointed
                else layer(x, self.cache)
            )
        x = self.norm(x)
        if self.chunks:
            return [self.output(part) for part in x.chunk(self.chunks, dim=1)]
        logits: torch.Tensor = self.output(x).float()
        return logits


def _rotations(model: Llama, length: int) -> torch.Tensor:
    return torch.empty(length, model.width // model.heads // 2, 2)


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    labels = tokens[..., 1:].contiguous()
    # Cut, copied and turned, all under one name: what was there before lives on only where backward needs it.
    logits = logits[..., :-1, :].contiguous().transpose(1, 2)
    hold(model, logits)
    return F.cross_entropy(logits, labels)


def _packed_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    # Late 2024: labels are shifted instead of logits, and the logits are deleted before backward.
    logits = model(tokens)
    labels = torch.hstack((tokens[..., 1:], tokens.new_full((tokens.size(0), 1), -100)))
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


def _compiled_layers(model: Llama, length: int, chunks: int) -> nn.Module:
    # torchtune's compile_model: each layer by itself.
    decoder = Decoder(model, length)
    decoder.chunks = chunks
    for layer in decoder.layers:
        layer.compile()
    return decoder


def _chunked_loss() -> Any:
    # CEWithChunkedOutputLoss, of which compile_loss compiles the loss of one chunk.
    loss_of_chunk = torch.compile(
        lambda logits, labels: F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
    )

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        labels = torch.hstack((tokens[..., 1:], tokens.new_full((tokens.size(0), 1), -100)))
        num_tokens = (labels != -100).sum()
        parts = zip(logits, labels.chunk(len(logits), dim=1), strict=True)
        total: torch.Tensor = sum(
            loss_of_chunk(part.reshape(-1, part.size(-1)), of_part.reshape(-1)) for part, of_part in parts
        )  # type: ignore[assignment]
        return total / num_tokens

    return loss


def compiled(model: Llama, *, length: int, chunks: int, optimizer: Any) -> bw.Workload:
    """Return a step with `compile=True`.

    The recipes drop what compile_loss returns, so that a plain cross entropy stays eager; of a chunked one it is the
    function within that is compiled.
    """
    loss = _chunked_loss() if chunks else _packed_loss
    workload = finetuning(model, length=length, loss=loss, optimizer=optimizer)
    return replace(workload, model=lambda: _compiled_layers(model, length, chunks))


class PagedInBackward(StateElsewhere):
    """Updates a parameter as soon as its gradient is there, and drops that; moments paged by the driver."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        for parameter in params:
            parameter.register_post_accumulate_grad_hook(self._update)

    @staticmethod
    @torch.no_grad()
    def _update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=0.0)
        parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: all is done."""


_LLAMA_2 = partial(Llama, 32, 4096, 32, 32, 11008, 32000, cloned=True)
_LLAMA_31_8B = partial(Llama, 32, 4096, 32, 8, 14336, 128256)
_LLAMA_32_3B = partial(Llama, 28, 3072, 24, 8, 8192, 128256, tied=True)
_EVERYWHERE = frozenset({"q", "k", "v", "attn_out", "mlp", "output"})
_TUTORIAL = {
    "accumulation": 64,
    "doubt": "samples vary in length: taken as the 512 at which the dataset cut them then; card not stated",
}
_README = {"kind": "reserved", "doubt": "README does not say which counter; samples taken as filled to 2,048 tokens"}
# recipes/configs/llama2/7B_full_low_memory.yaml of that date: bitsandbytes' PagedAdamW, optimizer_in_bwd.


def _clone_and_drop(model: Llama, length: int) -> None:
    """Leave in torch's cache what the layer took that was cloned: it was the first to be built, the first to go."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            layer = Layer(model)
            torch.set_default_dtype(default)
            layer.own_table(length)
    finally:
        torch.set_default_dtype(default)


def finetuning(model: Llama, *, length: int, loss: Any = _loss, optimizer: Any = torch.optim.AdamW) -> bw.Workload:
    """Return a torchtune finetuning step."""

    def build_optimizer(params: Any) -> Any:
        if model.cloned:
            _clone_and_drop(model, length)
        return optimizer(params)

    return bw.Workload(
        model=lambda: Decoder(model, length),
        batch=lambda n, seq_len: torch.randint(0, model.vocabulary, (n, seq_len)),
        loss=loss,
        optimizer=build_optimizer,
        name="torchtune llama",
    )


def recipes() -> dict[str, Recipe]:
    """Return the recipes of torchtune's eager runs on one card."""
    made = {}
    for name, lora, rank in (
        ("q-v-r8", frozenset("qv"), 8),
        ("all-layers-output-r8", _EVERYWHERE, 8),
        ("q-v-r64", frozenset("qv"), 64),
        ("all-layers-output-r64", _EVERYWHERE, 64),
    ):
        build = partial(finetuning, _LLAMA_2(rank=rank, lora=lora), length=4096)
        made[f"tune-l2-7b-lora-{name}"] = Recipe(build, 2, {"seq_len": 512}, _TUTORIAL)
    small = _LLAMA_2(rank=8, lora=frozenset("qv"))
    made["tune-2024h1-1x-rtx-4090llama2-7blora"] = Recipe(
        partial(finetuning, small, length=4096), 4, {"seq_len": 2048}, {**_README, "accumulation": 2}
    )
    made["tune-l32-3b-packed-dataset"] = Recipe(
        partial(
            finetuning,
            _LLAMA_32_3B(checkpointed=False),
            length=4096,
            loss=_packed_loss,
            optimizer=partial(torch.optim.AdamW, fused=True),
        ),
        2,
        {"seq_len": 4096},
        {"doubt": "flex attention traced as causal SDPA; fused AdamW assumed"},
    )
    # The table adds one thing after another: the chunked cross entropy comes between these two.
    fused = partial(torch.optim.AdamW, fused=True)
    for name, checkpointed, chunks, optimizer in (
        ("compile", False, 0, fused),
        ("activation-checkpointing", True, 8, fused),
        ("optimizer_in_bwd", True, 8, partial(SteppedInBackward, kind=fused)),
    ):
        made[f"tune-l32-3b-{name}"] = Recipe(
            partial(
                compiled,
                _LLAMA_32_3B(checkpointed=checkpointed),
                length=4096,
                chunks=chunks,
                optimizer=optimizer,
            ),
            2,
            {"seq_len": 4096},
            {"doubt": "flex attention traced as causal SDPA; fused AdamW assumed"},
        )
    # recipes/configs/llama3_1/8B_lora_single_device.yaml when the table was written, in September 2024.
    made["tune-l31-llama-3-1-8blora-r8-q-v1x-rtx-4090"] = Recipe(
        partial(compiled, _LLAMA_31_8B(rank=8, lora=frozenset("qv")), length=2048, chunks=8, optimizer=fused),
        2,
        {"seq_len": 2048},
        {"doubt": "README does not say which counter; layers compiled one by one, as with PyTorch from 2.5 on"},
    )
    made["tune-2024h1-1x-rtx-4090llama2-7bfull-finetune-pagedadamw8bit-"] = Recipe(
        partial(finetuning, _LLAMA_2(), length=4096, optimizer=PagedInBackward),
        4,
        {"seq_len": 2048},
        {**_README, "doubt": f"{_README['doubt']}; moments in managed memory, outside torch's counters"},
    )
    return made
