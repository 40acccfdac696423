"""litgpt on several cards: FSDP1 by blocks with every block checkpointed, from its tables and its config hub.

`finetune/lora.py` (2023) and `litgpt/finetune/full.py` (2024): `FSDPStrategy(auto_wrap_policy={Block},
activation_checkpointing_policy={Block}, limit_all_gathers=True)` in bf16-true. Fabric flattens with original parameters
kept (`use_orig_params`), mixed precision in bf16 throughout, and accumulates under `no_sync`, so that gradients stay
whole on every rank until the last micro-batch of a step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import batchwright as bw
from gpu_cases.litgpt_model import Block, Decoder, Tuning
from gpu_cases.litgpt_step import GEMMA_2B, LLAMA_2_7B, PHI_1_5, PHI_2, STABLELM_3B, finetuning
from gpu_cases.loop_variables import hold
from gpu_cases.recipes import Recipe

# Without and with gradients of an earlier one, and the last, which reduces them.
_MICRO_BATCHES = 3
_CHUNK = 128
_LORA = Tuning(8, frozenset({"query", "value"}))
_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

# case: model, micro-batch, tokens of the longest sample
_TABLES: dict[str, tuple[Decoder, int, int]] = {
    "1-3-bphi-1-5none1": (PHI_1_5, 1, 1044),
    "1-3-bphi-1-5none4": (PHI_1_5, 4, 1044),
    "3-bstablelm-alphanone1": (STABLELM_3B, 1, 1034),
    "3-bstablelm-alphanone2": (STABLELM_3B, 2, 1034),
    "3-bstablelm-alphanone4": (STABLELM_3B, 4, 1034),
    "7-bllama-2none2": (LLAMA_2_7B, 2, 1304),
}
# The YAML files name two cards for two of these, on a machine with four. Case: model, micro-batch, cards, accumulation.
_HUB: dict[str, tuple[Decoder, int, int, int]] = {
    "gemma-2b": (GEMMA_2B, 1, 4, 4),
    "phi-2": (PHI_2, 4, 2, 1),
    "stablelm-base-alpha-3b": (STABLELM_3B, 1, 2, 4),
}
_DOUBT = (
    "that blocks are checkpointed is read off the script of that year, not at the table's very commit; that Fabric "
    "then left logits in bf16 under FSDP was settled on two of these rows, of the calibration third"
)


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the rows for two and for four cards."""
    made = {}
    for case, (model, batch, length) in _TABLES.items():
        wide = replace(model, wide_norm_product=True)
        made[f"litgpt-rt-lora-on-multiple-gpus{case}"] = Recipe(
            partial(_sharded, finetuning(wide, _LORA, name=case, length=length, longest_alone=True, wide_logits=False)),
            batch,
            shape={"seq_len": length},
            options={"devices": 2, "accumulation": 128 // 2 // batch, "distinct": _MICRO_BATCHES, "doubt": _DOUBT},
        )
    for case, (model, batch, devices, accumulation) in _HUB.items():
        made[f"litgpt-cfg-{case}-full-4xa10g"] = Recipe(
            partial(
                _sharded,
                finetuning(model, Tuning(), name=case, length=512),
                whole_logits=True,
                micro_batches=min(accumulation, _MICRO_BATCHES),
            ),
            batch,
            shape={"seq_len": 512},
            options={"devices": devices, "accumulation": accumulation, "distinct": _MICRO_BATCHES},
        )
    return made


def _sharded(single: bw.Workload, *, whole_logits: bool = False, micro_batches: int = _MICRO_BATCHES) -> bw.Workload:
    """Return a litgpt step as one rank runs it."""

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        _synchronise_at_the_last(model, micro_batches)
        if whole_logits:
            return _loss_of_whole_logits(model, tokens)
        assert single.loss is not None
        return single.loss(model, tokens)

    return bw.Workload(
        model=single.model,
        batch=single.batch,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=3e-4),
        wrap=_shard,
        name=single.name,
    )


def _shard(model: nn.Module) -> nn.Module:
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=_BF16,
        use_orig_params=True,
        limit_all_gathers=True,
    )
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, Block))
    return wrapped


def _synchronise_at_the_last(model: Any, micro_batches: int) -> None:
    """Do what `no_sync` does, for all micro-batches of a step but the last."""
    number = model.__dict__.get("_micro_batch", 0) + 1
    model.__dict__["_micro_batch"] = number % micro_batches
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        unit._sync_gradients = number == micro_batches


def _loss_of_whole_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The full finetune computes its logits at once, and only their cross entropy in chunks."""
    logits = model(tokens, tokens.size(1))[0].float()
    hold(model, logits)
    flat, targets = logits[..., :-1, :].reshape(-1, logits.size(-1)), tokens[..., 1:].reshape(-1)
    losses = [
        F.cross_entropy(part, target, reduction="none")
        for part, target in zip(flat.split(_CHUNK), targets.split(_CHUNK), strict=True)
    ]
    counted = (targets != -100).sum()
    return torch.cat(losses).sum() / counted.maximum(torch.ones_like(counted))
