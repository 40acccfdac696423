"""torchtitan's Llama 3.1 8B over eight cards: its own table of 2024, and torchao's tables of 2025.

Facts of benchmarks/llama3_h100_202412_torchtitan.md and of train.py, parallelisms/parallelize_llama.py at 9dec370, and
for torchao's docs/source/workflows/training.md of benchmarks/float8/training/llama3.sh at torchtitan's commits that it
names: FSDP2 by layers, parameters in bf16 and gradients reduced in fp32; selective checkpointing per operator
(attention, every second matrix product and the largest value of a tensor are kept); AdamW; the loss in fp32 over
sequences of 8,192; gradients
clipped to a norm of 1. Compiled rows compile each layer, its checkpoint within, before it is sharded.

In 2024 the last layer is not resharded after forward, and the loss is never compiled. From April 2025 on the loss is
compiled too; from the end of July on embedding and head are shards of their own, and the head is not resharded.
Float8 layers are torchao's own of today; the scales of all weights, gathered at once after a step, are left out.
benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: the same over 32 cards, in June 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import batchwright as bw
from gpu_cases.outside_packages import torchao_float8
from gpu_cases.recipes import Recipe

_LAYERS, _WIDTH, _HEADS, _GROUPS, _MLP, _VOCABULARY = 32, 4096, 32, 8, 14336, 128256
_SIZE = _WIDTH // _HEADS
_LENGTH = 8192
_aten = torch.ops.aten


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the rows in bf16."""
    fused = "AdamW taken as fused, the default of the released toml"
    doubts = {"titan-t1-fsdp": fused, "titan-t1-fsdp-torch-compile": fused}
    return {
        case: Recipe(
            partial(training, run),
            samples,
            shape={"seq_len": _LENGTH},
            options={"devices": run.devices, "clip_norm": 1.0, **({"doubt": doubts[case]} if case in doubts else {})},
        )
        for case, (run, samples) in _ROWS.items()
    }


@dataclass(frozen=True)
class Run:
    """What differs between the rows."""

    compiles_layers: bool = False
    compiles_loss: bool = False
    shards_ends: bool = False
    float8: str = ""
    """torchao's recipe for the linear layers of blocks; tensor-wise ones are gathered in float8."""
    devices: int = 8


_BEFORE_2025_04, _JUNE_2025, _AUGUST_2025 = Run(True), Run(True, True), Run(True, True, True)
# case: how it was run, and samples on each card
_ROWS = {
    "titan-t1-fsdp": (Run(), 2),
    "titan-t1-fsdp-torch-compile": (_BEFORE_2025_04, 2),
    "ao-titan-h100-bfloat16": (_BEFORE_2025_04, 1),
    "ao-titan-mi300x-bfloat16": (_AUGUST_2025, 1),
    "ao-titan-h100-float8-rowwise-bf16-all-gather": (replace(_BEFORE_2025_04, float8="rowwise"), 1),
    "ao-titan-mi300x-float8-tensorwise-float8-all-gather": (replace(_AUGUST_2025, float8="tensorwise"), 1),
    "ao-titan-mi300x-float8-rowwise": (replace(_AUGUST_2025, float8="rowwise"), 1),
    "ao-titan-mi300x-float8-rowwise_with_gw_hp": (replace(_AUGUST_2025, float8="rowwise_with_gw_hp"), 1),
    "titan-h200-4nodes": (replace(_JUNE_2025, float8="tensorwise, recomputed", devices=32), 2),
}


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(_WIDTH, 1e-5), nn.RMSNorm(_WIDTH, 1e-5)
        self.wq, self.wo = _linear(_WIDTH, _WIDTH), _linear(_WIDTH, _WIDTH)
        self.wk, self.wv = (_linear(_WIDTH, _GROUPS * _SIZE) for _ in range(2))
        self.w1, self.w3 = (_linear(_WIDTH, _MLP) for _ in range(2))
        self.w2 = _linear(_MLP, _WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        h = x + self._attend(self.attention_norm(x), turns)
        normed = self.ffn_norm(h)
        out: torch.Tensor = h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return out

    def _attend(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (project(x).view(batch, length, -1, _SIZE) for project in (self.wq, self.wk, self.wv))
        q, k = _turned(q, turns), _turned(k, turns)
        k, v = (
            each[:, :, :, None, :].expand(-1, -1, -1, _HEADS // _GROUPS, -1).reshape(batch, length, _HEADS, _SIZE)
            for each in (k, v)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.wo(attended.transpose(1, 2).contiguous().view(batch, length, -1))
        return out


class _EveryOther:
    """The policy of one layer: attention is kept, and every second product."""

    def __init__(self) -> None:
        self.products = {False: 0, True: 0}

    def __call__(self, context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func is _aten.mm.default:
            self.products[context.is_recompute] += 1
            is_kept = self.products[context.is_recompute] % 2 == 1
        else:
            is_kept = func in (_aten._scaled_dot_product_flash_attention.default, _aten.max.default)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_EveryOther())


class Llama(nn.Module):
    """The decoder, its head apart from its embedding."""

    turns: torch.Tensor

    def __init__(self, float8: str = "") -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(
            checkpoint_wrapper(_layer(float8), context_fn=_contexts, preserve_rng_state=False) for _ in range(_LAYERS)
        )
        self.norm, self.output = nn.RMSNorm(_WIDTH, 1e-5), _linear(_WIDTH, _VOCABULARY)
        self.register_buffer("turns", torch.empty(_LENGTH, _SIZE // 2, dtype=torch.complex64), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tok_embeddings(tokens)
        turns = self.turns[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, turns)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def _layer(float8: str) -> nn.Module:
    layer: nn.Module = Layer()
    if float8:
        package = torchao_float8()
        config = (
            package.Float8LinearConfig(
                enable_fsdp_float8_all_gather=True, force_recompute_fp8_weight_in_bwd=float8.endswith("recomputed")
            )
            if float8.startswith("tensorwise")
            else package.Float8LinearConfig.from_recipe_name(float8)
        )
        layer = package.convert_to_float8_training(layer, config=config)
    return layer


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3)
    return turned.type_as(x)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def training(run: Run) -> bw.Workload:
    """Return a rank's step."""

    def wrap(model: Any) -> nn.Module:
        shard = partial(
            fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )
        if run.compiles_layers:
            for layer in model.layers:
                layer.compile(fullgraph=True)
        if run.shards_ends:
            shard(model.tok_embeddings, reshard_after_forward=True)
        for number, layer in enumerate(model.layers):
            shard(layer, reshard_after_forward=run.shards_ends or number < _LAYERS - 1)
        if run.shards_ends:
            shard([model.norm, model.output], reshard_after_forward=False)
        shard(model)
        whole: nn.Module = model
        return whole

    compute_loss = torch.compile(_cross_entropy) if run.compiles_loss else _cross_entropy

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        computed: torch.Tensor = compute_loss(model(tokens), tokens)
        return computed

    return bw.Workload(
        model=partial(Llama, run.float8),
        batch=lambda n, seq_len: torch.randint(0, _VOCABULARY, (n, seq_len)),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True),
        wrap=wrap,
        name="llama-3.1-8b",
    )
