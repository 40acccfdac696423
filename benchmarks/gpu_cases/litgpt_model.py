"""A decoder that allocates as litgpt's does, with LoRA or adapters on its linear layers.

Written from the facts of litgpt/model.py, lora.py, adapter.py and adapter_v2.py (0.4, and lit_gpt of 2023): one matrix
for query, key and value, read by head groups; keys and values expanded to every query head before SDPA; rotary tables
in fp32, so that a rotation is in fp32 before it is cast back; RMSNorm in fp32; head and embedding never tied; the
head applied in chunks of 128 positions, each with its own cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from gpu_cases.nf4_linear import FourBitLinear

LORA_DROPOUT = 0.05
_ADAPTER_PROMPT = 10
_FIRST_ADAPTED_LAYER = 2


@dataclass(frozen=True)
class Decoder:
    """The sizes of a model, as litgpt's config.py has them."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    mlp: int
    groups: int = 0
    head_size: int = 0
    rotary: float = 1.0
    gated: str = ""
    rms_norm: bool = False
    unit_offset: bool = False
    parallel: bool = False
    shared_norm: bool = False
    bias: bool = False
    head_bias: bool = False
    scaled_embedding: bool = False
    post_norms: bool = False
    softcapping: bool = False
    sliding_layers: int = 0
    # Until 2024 the weight was applied in fp32, before the cast: a trained weight then keeps an fp32 input.
    wide_norm_product: bool = False

    @property
    def per_head(self) -> int:
        """Elements of one head."""
        return self.head_size or self.width // self.heads

    @property
    def key_groups(self) -> int:
        """Heads of keys and values."""
        return self.groups or self.heads


@dataclass(frozen=True)
class Tuning:
    """What is trained: LoRA of a rank on some layers, an adapter ("v1", "v2"), or everything ("full")."""

    rank: int = 0
    on: frozenset[str] = frozenset()
    adapter: str = ""
    quantized: str = ""

    @property
    def full(self) -> bool:
        """Whether every weight is trained."""
        return not self.rank and not self.adapter


def dropout(x: torch.Tensor, training: bool) -> torch.Tensor:
    """Drop some of LoRA's input, as the kernel of a card does it: with a mask of one byte per element."""
    return torch.native_dropout(x, LORA_DROPOUT, True)[0] if training else x


class TunedLinear(nn.Module):
    """A frozen linear layer and what is trained beside it."""

    def __init__(self, inputs: int, outputs: int, bias: bool, tuning: Tuning, name: str) -> None:
        super().__init__()
        self.linear: nn.Module
        if tuning.quantized:
            self.linear = FourBitLinear(inputs, outputs, bias=bias, double=tuning.quantized == "nf4-dq")
        else:
            self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.lora = tuning.rank > 0 and name in tuning.on
        self.second_adapter = tuning.adapter == "v2"
        if self.lora:
            self.lora_a = nn.Parameter(torch.empty(tuning.rank, inputs))
            self.lora_b = nn.Parameter(torch.empty(outputs, tuning.rank))
        if self.second_adapter:
            self.adapter_bias = nn.Parameter(torch.empty(outputs))
            self.adapter_scale = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with what is trained added."""
        if self.second_adapter:
            scaled: torch.Tensor = self.adapter_scale * (self.linear(x) + self.adapter_bias)
            return scaled
        frozen: torch.Tensor = self.linear(x)
        if not self.lora:
            return frozen
        return frozen + (dropout(x, self.training) @ self.lora_a.transpose(0, 1) @ self.lora_b.transpose(0, 1)) * 2.0


class TunedQKV(nn.Module):
    """Query, key and value in one frozen matrix, with LoRA on some of the three."""

    indices: torch.Tensor

    def __init__(self, model: Decoder, tuning: Tuning) -> None:
        super().__init__()
        sizes = {"query": model.heads * model.per_head}
        sizes["key"] = sizes["value"] = model.key_groups * model.per_head
        self.outputs = sum(sizes.values())
        self.linear = TunedLinear(model.width, self.outputs, model.bias, tuning, "qkv")
        self.parts = [sizes[name] for name in ("query", "key", "value") if name in tuning.on] if tuning.rank else []
        self.grouped = model.heads == model.key_groups
        if self.parts:
            self.lora_a = nn.Parameter(torch.empty(tuning.rank * len(self.parts), model.width))
            self.lora_b = nn.Parameter(torch.empty(sum(self.parts), tuning.rank))
            self.register_buffer("indices", torch.arange(sum(self.parts)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return query, key and value side by side."""
        frozen: torch.Tensor = self.linear(x)
        if not self.parts:
            return frozen
        low = F.linear(dropout(x, self.training), self.lora_a).transpose(-2, -1)
        kernel = self.lora_b.unsqueeze(-1)
        if self.grouped:
            update = F.conv1d(low, kernel, groups=len(self.parts))
        else:
            pairs = zip(low.chunk(len(self.parts), dim=1), kernel.split(self.parts), strict=True)
            update = torch.cat([F.conv1d(part, weight) for part, weight in pairs], dim=1)
        update = update.transpose(-2, -1)
        if sum(self.parts) < self.outputs:
            padded = update.new_zeros(*update.shape[:-1], self.outputs)
            update = padded.index_copy_(-1, self.indices, update)
        return frozen + update * 2.0


class Norm(nn.Module):
    """RMSNorm as litgpt writes it: in fp32, cast back before the weight or after it."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model.width))
        self.unit_offset, self.wide_product = model.unit_offset, model.wide_norm_product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed input."""
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        if self.wide_product:
            return (self.weight * normed).to(x.dtype)
        return normed.to(x.dtype) * (1 + self.weight if self.unit_offset else self.weight)


class Attention(nn.Module):
    """Causal attention through SDPA, or written out where scores are capped."""

    def __init__(self, model: Decoder, tuning: Tuning, layer: int) -> None:
        super().__init__()
        self.model = model
        self.qkv = TunedQKV(model, tuning)
        self.proj = TunedLinear(model.heads * model.per_head, model.width, model.bias, tuning, "projection")
        self.adapted = bool(tuning.adapter) and layer >= _FIRST_ADAPTED_LAYER
        self.sliding = bool(model.sliding_layers) and layer % model.sliding_layers == 0
        if self.adapted:
            self.adapter_wte = nn.Embedding(_ADAPTER_PROMPT, model.width)
            self.gating_factor = nn.Parameter(torch.empty(1, 1, model.heads, 1))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the attended input."""
        batch, length, _ = x.shape
        size = self.model.per_head
        q, k, v = self._split(self.qkv(x))
        rotated = cos.size(-1)
        q = torch.cat((_rotate(q[..., :rotated], cos, sin), q[..., rotated:]), dim=-1)
        k = torch.cat((_rotate(k[..., :rotated], cos, sin), k[..., rotated:]), dim=-1)
        attended = self._capped(q, k, v) if self.model.softcapping else _attend(q, k, v)
        if self.adapted:
            _, prompt_k, prompt_v = self._split(self.qkv(self.adapter_wte.weight.reshape(1, _ADAPTER_PROMPT, -1)))
            mask = torch.ones(length, _ADAPTER_PROMPT, dtype=torch.bool, device=x.device)
            attended = attended + self.gating_factor * _attend(q, prompt_k, prompt_v, mask)
        projected: torch.Tensor = self.proj(attended.reshape(batch, length, self.model.heads * size))
        return projected

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, length, _ = qkv.shape
        groups, size = self.model.key_groups, self.model.per_head
        each = self.model.heads // groups
        q, k, v = qkv.view(batch, length, groups, each + 2, size).permute(0, 2, 3, 1, 4).split((each, 1, 1), dim=2)
        if each > 1:
            k = k.expand(batch, groups, each, length, size)
            v = v.expand(batch, groups, each, length, size)
        return tuple(part.reshape(batch, -1, length, size) for part in (q, k, v))

    def _capped(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Gemma 2: tanh on the scores, which SDPA cannot do.
        scores = torch.tanh(q @ k.mT * 0.06 / 50.0) * 50.0
        mask = torch.ones(q.size(2), q.size(2), dtype=q.dtype, device=q.device).triu(diagonal=1)
        mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
        if self.sliding:
            mask += torch.ones_like(mask).tril(diagonal=-4096)
        weights = F.softmax(scores + mask, dim=-1, dtype=torch.float).to(q.dtype)
        return (weights @ v).transpose(1, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return attended.transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).to(x.dtype)


class MLP(nn.Module):
    """The feed-forward part: gated ("silu", "gelu") or not."""

    def __init__(self, model: Decoder, tuning: Tuning) -> None:
        super().__init__()
        self.gated = model.gated
        self.fc_1 = TunedLinear(model.width, model.mlp, model.bias, tuning, "mlp")
        self.fc_2 = TunedLinear(model.width, model.mlp, model.bias, tuning, "mlp") if model.gated else None
        self.proj = TunedLinear(model.mlp, model.width, model.bias, tuning, "mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the transformed input."""
        if self.fc_2 is None:
            hidden = F.gelu(self.fc_1(x))
        else:
            gate, value = self.fc_1(x), self.fc_2(x)
            hidden = (F.silu(gate) if self.gated == "silu" else F.gelu(gate, approximate="tanh")) * value
        projected: torch.Tensor = self.proj(hidden)
        return projected


class Block(nn.Module):
    """One layer, its two halves in turn or side by side."""

    def __init__(self, model: Decoder, tuning: Tuning, layer: int) -> None:
        super().__init__()
        self.parallel = model.parallel
        self.norm_1 = make_norm(model)
        self.attn = Attention(model, tuning, layer)
        self.after_attn = make_norm(model) if model.post_norms else nn.Identity()
        self.norm_2 = None if model.shared_norm else make_norm(model)
        self.mlp = MLP(model, tuning)
        self.after_mlp = make_norm(model) if model.post_norms else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        normed = self.norm_1(x)
        attended = self.after_attn(self.attn(normed, cos, sin))
        if self.parallel:
            normed = normed if self.norm_2 is None else self.norm_2(x)
            both: torch.Tensor = self.mlp(normed) + attended + x
            return both
        assert self.norm_2 is not None
        x = attended + x
        added: torch.Tensor = self.after_mlp(self.mlp(self.norm_2(x))) + x
        return added


def make_norm(model: Decoder) -> nn.Module:
    """Return a norm of the model's kind."""
    return Norm(model) if model.rms_norm else nn.LayerNorm(model.width)


class GPT(nn.Module):
    """The whole decoder."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, model: Decoder, tuning: Tuning) -> None:
        super().__init__()
        self.model = model
        self.lm_head = TunedLinear(model.width, model.vocabulary, model.head_bias, tuning, "head")
        self.wte = nn.Embedding(model.vocabulary, model.width)
        self.h = nn.ModuleList(Block(model, tuning, layer) for layer in range(model.layers))
        self.ln_f = make_norm(model)

    def forward(self, tokens: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """Return the logits, in chunks of so many positions."""
        length = tokens.size(1)
        x = self.wte(tokens)
        if self.model.scaled_embedding:
            x = x * self.model.width**0.5
        for block in self.h:
            x = block(x, self.cos[:length], self.sin[:length])
        x = self.ln_f(x)
        logits = [self.lm_head(part) for part in x.split(chunk, dim=1)]
        return [torch.tanh(part / 30.0) * 30.0 for part in logits] if self.model.softcapping else logits


def build_gpt(model: Decoder, tuning: Tuning, *, length: int) -> GPT:
    """Return the model in bf16, with rotary tables for a length, and frozen but for what is tuned."""
    gpt = GPT(model, tuning).to(torch.bfloat16)
    for name in ("cos", "sin"):
        # fp32: made anew for the longest sample after the model was cast.
        gpt.register_buffer(name, torch.empty(length, int(model.rotary * model.per_head)), persistent=False)
    if not tuning.full:
        trained: tuple[Any, ...] = ("lora_",) if tuning.rank else ("adapter_", "gating_factor")
        if tuning.adapter == "v2":
            trained += ("norm_1", "norm_2", "ln_f")
        for name, parameter in gpt.named_parameters():
            parameter.requires_grad = any(part in name for part in trained)
    return gpt
