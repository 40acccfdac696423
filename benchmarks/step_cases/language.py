"""Transformers of DeepLearningExamples, NeuSight, llm-foundry, vTrain and nanoGPT, as their sources describe them.

Rebuilt, not original: sizes that a source does not print are those of the papers (MPT, GPT-3), and vTrain's heads and
vocabulary are assumed (128 to a head, 51,200).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import batchwright as bw
from step_cases.vision import NoUpdate

if TYPE_CHECKING:
    from step_cases.published import Row


@dataclass(frozen=True)
class Shape:
    """The size of a transformer."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int = 2048
    is_causal: bool = True
    dropout: float = 0.1
    bias: bool = True
    attention: str = "plain"
    """plain: products and a softmax; flash: torch's fused kernel."""
    checkpoints: bool = False
    learned_positions: bool = True
    plain_in_fp32: bool = False


class Block(nn.Module):
    """One layer, its norms before (GPT) or after (BERT) what they belong to."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.first = nn.LayerNorm(shape.width)
        self.second = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        dropout = self.shape.dropout if self.training else 0.0
        if self.shape.is_causal:
            x = x + functional.dropout(self.attend(self.first(x)), dropout)
            last: torch.Tensor = x + functional.dropout(self.down(functional.gelu(self.up(self.second(x)))), dropout)
            return last
        x = self.first(x + functional.dropout(self.attend(x), dropout))
        out: torch.Tensor = self.second(x + functional.dropout(self.down(functional.gelu(self.up(x))), dropout))
        return out

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return what attention makes of it."""
        shape = self.shape
        batch, length, width = x.shape
        dropout = shape.dropout if self.training else 0.0
        q, k, v = (
            part.view(batch, length, shape.heads, width // shape.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        if shape.attention == "flash":
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=shape.is_causal)
        else:
            scores = (q @ k.transpose(-2, -1)) * (width // shape.heads) ** -0.5
            mask = torch.zeros(length, length, dtype=scores.dtype, device=x.device)
            weights = functional.dropout(functional.softmax(scores + mask, dim=-1), dropout)
            mixed = weights.to(v.dtype) @ v
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Transformer(nn.Module):
    """An embedding, layers, and a head of so many outputs for each token."""

    def __init__(self, shape: Shape, *, outputs: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.positions, shape.width) if shape.learned_positions else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, outputs or shape.vocabulary, bias=False)
        if outputs is None:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the head's outputs."""
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = functional.dropout(x, self.shape.dropout if self.training else 0.0)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.checkpoints and self.training else block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def _shape_of(row: Row) -> Shape:
    sizes = {
        "BERT base SQuAD fine-tune": Shape(12, 768, 12, 30528, 512, is_causal=False),
        "BERT large SQuAD fine-tune": Shape(24, 1024, 16, 30528, 512, is_causal=False),
        "bert_large": Shape(24, 1024, 16, 30522, 512, is_causal=False),
        "gpt2_large": Shape(36, 1280, 20, 50257),
        "gpt3_xl": Shape(24, 2048, 16, 50257),
        "gpt3_27": Shape(32, 2560, 32, 50257),
        "opt_13": Shape(24, 2048, 32, 50272, 2050),
        "gpt2-124m": Shape(12, 768, 12, 50304, dropout=0.0, bias=False),
        **{
            f"mpt-{name}": Shape(
                *sizes, 50368, 65536, dropout=0.0, bias=False, attention="flash", checkpoints=row.checkpointing
            )
            for name, sizes in {
                "125m": (12, 768, 12),
                "350m": (24, 1024, 16),
                "760m": (24, 1536, 12),
                "1b": (24, 2048, 16),
                "3b": (32, 2560, 20),
                "7b": (32, 4096, 32),
                "13b": (40, 5120, 40),
                "30b": (48, 7168, 56),
                "70b": (80, 8192, 64),
            }.items()
        },
    }
    if row.model in sizes:
        return sizes[row.model]
    layers, width = map(int, row.model.removeprefix("gpt ").split("x"))
    return Shape(layers, width, max(width // 128, 1), 51200, checkpoints=True)


class MasterWeights(torch.optim.Optimizer):
    """Adam over fp32 copies of half-precision weights, as apex and DeepSpeed run it: a few fused kernels."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner: Any = None
        self.masters: list[torch.Tensor] = []
        self.models: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copy the gradients out, update the masters, copy them back."""
        if self.inner is None:
            self.models = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.masters = [nn.Parameter(p.detach().float()) for p in self.models]
            self.inner = torch.optim.Adam(self.masters, lr=1e-4, fused=True)
        gradients: Any = [p.grad for p in self.models]
        wide = [torch.empty_like(master) for master in self.masters]
        torch._foreach_copy_(wide, gradients)
        torch._foreach_mul_(wide, 0.001)
        for master, gradient in zip(self.masters, wide, strict=True):
            master.grad = gradient
        with torch.enable_grad():
            self.inner.step()
        for master in self.masters:
            master.grad = None
        torch._foreach_copy_(self.models, self.masters)


class LoopedAdam(torch.optim.AdamW):
    """AdamW tensor by tensor, as it was before torch 2.0."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-4, foreach=False)


@contextlib.contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Let products of matrices use TF32, as NVIDIA's containers do, or neither them nor convolutions."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def language_model(row: Row) -> bw.Workload:
    """Return the transformer of a row."""
    shape = _shape_of(row)
    answers = 2 if "SQuAD" in row.model else None
    is_half = row.source == "vtrain" or (row.source == "lambda" and row.precision == "amp-fp16")
    is_pure = row.settings.endswith("PURE")

    def build() -> nn.Module:
        model = Transformer(shape, outputs=answers)
        return model.half() if is_half else model

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        casts = row.precision in ("bf16", "amp-bf16") and not is_pure
        with torch.autocast("cuda", torch.bfloat16) if casts else contextlib.nullcontext():
            out = model(tokens)
            if answers:
                return functional.cross_entropy(out.transpose(1, 2)[..., 0].float(), tokens[:, 0] % 2)
            # vocab-parallel losses of Megatron and fused ones of llm-foundry read the logits in fp32 as well
            return functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())

    def optimizer(params: Any) -> Any:
        if row.source == "neusight":
            return NoUpdate(params, zeroes=False)
        if is_half:
            return MasterWeights(params)
        if row.source == "lambda":
            return LoopedAdam(params)
        return torch.optim.AdamW(params, lr=1e-4, fused=row.source == "nanogpt")

    return bw.Workload(
        model=build,
        batch=lambda n: torch.zeros(n, row.length, dtype=torch.int64),
        loss=loss,
        optimizer=optimizer if row.trains else None,
        wrap=(lambda model: _sharded(model, is_pure=is_pure)) if row.settings.startswith("FSDP") else None,
        name=row.model,
    )


def replicated(model: nn.Module) -> nn.Module:
    """Spread a model as DDP does."""
    return DistributedDataParallel(model)


def _sharded(model: nn.Module, *, is_pure: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reduced = torch.bfloat16 if is_pure else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    sharded: Any = fully_shard(model, mp_policy=policy)
    whole: nn.Module = sharded
    return whole
