"""Why a published case has no workload, in words that can be checked against its source."""

from __future__ import annotations

from typing import Any

_COMPILED_NF4 = "torchao's NF4 weights, dequantized inside of compiled layers: no workload was written"
_FLOAT8 = "whether weights are gathered in float8 is not stated in the table"
_MXFP8 = "MXFP8 linear layers of a prototype of torchao's of that date: no workload was written"
_CONTEXT = "context parallelism over all cards, and float8 layers of unstated settings: no workload was written"
_MEGATRON = "Megatron Core: its gradient buffers and optimizer over several ranks have not been written out"

# The start of an id, in order: the first that fits gives the reason.
_REASONS: tuple[tuple[str, str], ...] = (
    ("titan-t1-fsdp-torch-compile-float8", _FLOAT8),
    ("titan-t4", "FSDP, tensor parallelism, torch.compile and 8-bit products over 256 cards at once"),
    ("titan-t5", "pipeline, tensor and data parallelism over 512 cards: a schedule of stages is not traced"),
    ("titan-t6", "pipeline, tensor and context parallelism over 512 cards: a schedule of stages is not traced"),
    ("titan-t2", _CONTEXT),
    ("titan-", _FLOAT8),
    ("ao-titan-b200", _MXFP8),
    ("ao-llama2-7b", "micro-batch, checkpointing and the length of the longest batch are not in the table"),
    ("ao-llama2-1b-bf16-compile", "the whole data set lies on the card, and how many tokens it has is not published"),
    ("ao-llama2-1b-int8-qt-eager", "int8 weights in a tensor subclass of torchao: no workload was written"),
    ("ao-llama4", "torch.compile, MXFP8 and expert parallelism over four cards"),
    ("tune-l31-llama-3-1-8bfull", "torch.compile, and the settings of this row are not stated"),
    ("tune-l31-llama-3-1-8blora1x-a6000", "torch.compile, and the settings of this row are not stated"),
    ("tune-l31-llama-3-1-405b", "QLoRA sharded by FSDP2 over eight cards"),
    ("tune-l31-llama-3-1-8bqlora", _COMPILED_NF4),
    ("tune-l32-3b-baseline", "unpacked Alpaca: the length of the longest batch of that run is not known"),
    ("tune-l32-3b-init", "no step: the memory after the model was built"),
    ("tune-l32-3b-activation-offloading", "activations are offloaded to the host: no workload was written"),
    ("tune-l2-7b-qlora", "the peak is that of building the model (9.13 of 9.29 GB), in torchao's NF4 conversion"),
    ("tune-2024h1-2x", "FSDP1 with torchtune's wrap policy of that date for LoRA: no workload was written"),
    ("tune-2024h1-8x", "FSDP1 with torchtune's wrap policy of that date over eight cards: no workload was written"),
    ("tune-202404", "FSDP over several cards, and Alpaca samples of unknown length"),
    ("litgpt-cfg-llama-3-2-1b-full", "suspect row: below the weights, gradients and moments that one card must hold"),
    ("litgpt-cfg-llama-3-2-3b-full", "suspect row: below the weights, gradients and moments that one card must hold"),
    ("peft-metamath", "99th percentile over batches of varying length: the length behind it is not published"),
    ("peft-imagegen", "FLUX.2 through diffusers, which we do not have here: no workload was written"),
    ("megatron-gpt-gpt3_mcore_te_tp1_pp1_dist", _MEGATRON),
    ("megatron-t5-t5_mcore_tp1", _MEGATRON),
    ("megatron-bert", _MEGATRON),
    ("megatron-", "Megatron Core with Transformer Engine: fused kernels whose kept tensors we have not written out"),
    ("gpumemnet-", "the optimizer is not stated, and it decides a large part of the figure"),
    ("mmdet-retinanet-r-50-fpnfp16", "mixed precision by MMCV's own hooks of the time, which were not written out"),
    ("mmdet-", "images and boxes of varying size: the peak is that of the largest batch seen, which is not published"),
    ("d2-retinanet", "a loss compiled by torch.jit, whose fused kernels are not simulated"),
    ("d2-", "images and boxes of varying size: the peak is that of the largest batch seen, which is not published"),
)


def reason_to_exclude(row: dict[str, Any]) -> str | None:
    """Return the reason why a case is not traced; none where there is no reason."""
    return next((reason for start, reason in _REASONS if row["id"].startswith(start)), None)
