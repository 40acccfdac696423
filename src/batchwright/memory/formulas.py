"""`estimate_named`: the memory of a step of a public model, by formula, at once and without torch.

Promises:
- every byte comes from a tensor that transformers 5 and torch 2 hold; no constant is fitted to a measurement;
- the peak is the largest of the step's moments: the loss, the head, a layer, the embedding, the optimizer;
- what is assumed is listed in the notes.

Checked against traces of the same model (fake tensors, AdamW, the second step) at 1 x 128 and 4 x 1024:

| traced | worst error |
|---|---|
| gpt2, llama-3.2-1b, qwen2.5-0.5b, opt-1.3b, pythia-410m (fp32, bf16, mixed), llama-3-8b (bf16) | 0.2 % |
| the same with checkpointing | 0.3 % |
| the other families of the catalogue cut to 3 layers, 16 x 512, three precisions | 0.7 % |
| eager attention, and dropout on a CPU, in fp32 and bf16 | 0.4 % |
| a classification head, 4 layers, with and without checkpointing | 1.2 % |
| LoRA as peft writes it, 4 layers, in bf16 | 4 % |

QLoRA has no trace: its 4-bit kernels exist on GPUs only. ZeRO is arithmetic on the above.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchwright.catalogue.models import find_model
from batchwright.device.peak_bytes import PeakBytes
from batchwright.errors import InvalidInputError
from batchwright.memory.numerics import LORA_RANK, Setup
from batchwright.memory.result import PARTS, Estimate, Owner, PeakMoment, PhasePeak
from batchwright.memory.saved_tensors import ALWAYS_EAGER, layer_tensors
from batchwright.memory.step_moments import Moment, step_moments
from batchwright.units import format_bytes, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchwright.catalogue.models import ModelShape

_COUNTED = ("weights", "gradients", "optimizer", "activations", "temporaries", "inputs")


def estimate_named(
    name: str,
    *,
    micro_batch: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    checkpointing: bool = False,
    zero: int = 0,
    devices: int = 1,
    tuning: str = "full",
    attention: str = "sdpa",
    kernels: str = "gpu",
) -> Estimate:
    """Estimate the peak of one training step of a model of the catalogue.

    >>> estimate = estimate_named("llama-3-8b", micro_batch=1, seq_len=4096)
    >>> estimate.peak_at.module, f"{estimate.peak_bytes.allocated / 2**30:.1f} GiB"
    ('loss', '75.4 GiB')

    `precision` is "fp32", "bf16" (weights, gradients and moments too) or "mixed" (fp32 weights under bf16 autocast).
    `tuning` is "full", "lora" (rank 16 on every matrix of attention and MLP) or "qlora" (those matrices in 4-bit NF4).
    `kernels` is "gpu" or "cpu": they differ in the masks of dropout, and a CPU has no fused attention with dropout.
    """
    shape = find_model(name)
    setup = Setup.of(
        precision=precision,
        tuning=tuning,
        attention=attention,
        kernels=kernels,
        optimizer=optimizer,
        checkpointing=checkpointing,
    )
    samples, length = whole_number(micro_batch, "micro-batch"), checked_length(shape, seq_len)
    stage, ranks = whole_number(zero, "ZeRO stage", least=0), whole_number(devices, "devices")
    if stage > 3:
        raise InvalidInputError(f"ZeRO stage must be 0, 1, 2 or 3; received {stage}.")

    def moments(num_samples: int, chosen: Setup) -> list[Moment]:
        return step_moments(shape, chosen, micro_batch=num_samples, seq_len=length, zero=stage, devices=ranks)

    steps = moments(samples, setup)
    top = max(steps, key=lambda moment: moment.total)
    # The same moment with one sample more: what really grows, also where the peak would move elsewhere.
    more = moments(samples + 1, setup)[steps.index(top)]
    upper = steps
    if setup.optimizer == "adamw":
        upper = moments(samples, replace(setup, optimizer="adamw-foreach"))
    return Estimate(
        name=shape.name,
        micro_batch=samples,
        on="formula",
        peak_bytes=PeakBytes(top.total),
        upper_bytes=PeakBytes(max(top.total, *(moment.total for moment in upper))),
        parts={part: getattr(top, part) if part in _COUNTED else None for part in PARTS},
        grows_with_batch={
            part: getattr(more, part) - getattr(top, part) if part in _COUNTED else None for part in PARTS
        },
        peak_at=PeakMoment(top.phase, top.module, top.operator),
        largest=_largest(shape, setup, samples, length, top),
        phases=tuple(
            PhasePeak(phase, max(moment.total for moment in steps if moment.phase == phase))
            for phase in dict.fromkeys(moment.phase for moment in steps)
        ),
        source="formula",
        notes=tuple(_notes(shape, setup, length, stage, top, upper)),
    )


def checked_length(shape: ModelShape, seq_len: int) -> int:
    """Return a sequence length that this model can take, or say what it can."""
    length = whole_number(seq_len, "sequence length")
    if length > shape.max_positions:
        raise InvalidInputError(
            f"{shape.name} takes sequences of up to {shape.max_positions:,} tokens; received {length:,}."
        )
    return length


def _largest(shape: ModelShape, setup: Setup, samples: int, length: int, top: Moment) -> tuple[Owner, ...]:
    owners = [
        Owner(getattr(top, part), 1, part, "model", part, "training") for part in ("weights", "gradients", "optimizer")
    ]
    if top.activations and not setup.checkpointing:
        layers = 1 if top.module == "layers.0" else shape.layers
        owners += [
            Owner(layers * samples * tensor.num_bytes(length), layers, "activations", "layers", tensor.name, "forward")
            for tensor in layer_tensors(shape, setup)
        ]
    if top.temporaries:
        owners.append(Owner(top.temporaries, 1, "temporaries", top.module, top.operator, top.phase))
    return tuple(sorted((owner for owner in owners if owner.num_bytes), key=lambda o: -o.num_bytes)[:10])


def _notes(shape: ModelShape, setup: Setup, length: int, zero: int, top: Moment, upper: list[Moment]) -> Iterator[str]:
    yield (
        f"formula for the implementation of transformers, all {length:,} tokens of every sample counted; "
        "no allocator, no workspaces, no context"
    )
    if shape.family in ALWAYS_EAGER and setup.attention == "sdpa":
        yield f"transformers runs no fused attention for {shape.family}: counted as eager"
    if shape.attention_dropout and setup.attention == "sdpa" and setup.kernels == "gpu":
        yield "attention dropout inside a fused kernel, as on a GPU; a CPU runs it unfused and stores every pair"
    if setup.tuning != "full":
        yield (
            f"adapters of rank {LORA_RANK} in fp32 on every matrix of attention and MLP, run under bf16 autocast "
            "as peft does"
        )
    if setup.tuning == "qlora":
        yield "4-bit NF4 with double quantisation: 4 + 8/64 + 32/(64 x 256) = 4.127 bits a weight of a matrix"
    if setup.precision.name == "mixed":
        yield "autocast as on a CPU; the lists of CUDA raise a few more operations to fp32"
    if zero:
        yield "ZeRO shares are equal; one layer (or the embedding) is held whole while it is gathered or reduced"
    largest = max(moment.total for moment in upper)
    if largest > top.total:
        yield (
            "AdamW as fused or one weight at a time; torch's default on CUDA (foreach) copies one moment of every "
            f"weight during the step: peak {format_bytes(largest)}"
        )
