"""What a model holds all through training: weights, gradients and the optimizer's state.

Promises:
- full training holds every weight; LoRA freezes them and adds adapters; QLoRA stores the frozen matrices in 4 bits;
- ZeRO divides the optimizer's state (1), also the gradients (2), also the weights (3) by the devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from batchwright.catalogue.models import count_parameters
from batchwright.memory.numerics import LORA_RANK, OPTIMIZERS

if TYPE_CHECKING:
    from batchwright.catalogue.models import ModelShape
    from batchwright.memory.numerics import Setup

# NF4 with double quantisation (Dettmers et al. 2023, arXiv:2305.14314): 4 bits a weight, an 8-bit scale for each
# block of 64, and an fp32 scale for each 256 of those: 4 + 8/64 + 32/(64 * 256) = 4.127 bits.
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
# peft keeps adapters in fp32 whatever the base is in, so their gradients and moments are fp32 too.
_ADAPTER_BYTES = 4


@dataclass(frozen=True)
class HeldStates:
    """Bytes held on one device, and the sizes that the moments of a step are made from."""

    weights: int
    gradients: int
    optimizer: int
    head_gradient: int
    embedding_gradient: int
    layer_gradient: int
    last_matrix_gradient: int
    largest_trained: int
    trained: int
    layer_weights: int
    gathered: int


def hold_states(
    shape: ModelShape, setup: Setup, *, has_vocabulary: bool, zero: int = 0, devices: int = 1
) -> HeldStates:
    """Count what one device holds; without `has_vocabulary` the head is a small one for a task.

    >>> from batchwright.catalogue.models import find_model
    >>> from batchwright.memory.numerics import Setup
    >>> held = hold_states(find_model("llama-3-8b"), Setup.of(precision="bf16"), has_vocabulary=True)
    >>> held.weights, held.gradients, held.optimizer
    (16060522496, 16060522496, 32121044992)
    """
    count = count_parameters(shape)
    size = setup.precision.weights
    head = count.head if has_vocabulary else 0
    base = count.embedding + count.layers * count.layer + count.final + head
    vocabulary = shape.vocab * shape.hidden
    if setup.trains_all:
        trained, trained_size, weights = base, size, base * size
        layer_trained, last_trained = count.layer, shape.hidden * shape.intermediate
        largest = max(vocabulary, shape.hidden * shape.intermediate)
    else:
        layer_trained, last_trained = count_adapters(shape), LORA_RANK * (shape.hidden + shape.intermediate)
        trained, trained_size = count.layers * layer_trained, _ADAPTER_BYTES
        matrices = count.layers * count.layer_matrices
        stored = ceil(matrices * NF4_BITS / 8) if setup.tuning == "qlora" else matrices * size
        weights = (base - matrices) * size + stored + trained * trained_size
        largest = LORA_RANK * shape.intermediate
    kept, _ = OPTIMIZERS[setup.optimizer]
    share = devices if zero else 1
    return HeldStates(
        weights=ceil(weights / (share if zero >= 3 else 1)),
        gradients=ceil(trained * trained_size / (share if zero >= 2 else 1)),
        optimizer=ceil(kept * trained * trained_size / share),
        head_gradient=vocabulary * size if setup.trains_all and has_vocabulary else 0,
        embedding_gradient=vocabulary * size if setup.trains_all else 0,
        layer_gradient=layer_trained * trained_size,
        last_matrix_gradient=last_trained * trained_size,
        largest_trained=largest * trained_size,
        trained=ceil(trained * trained_size / share),
        layer_weights=count.layer_matrices,
        # What is held whole for a moment: the layer whose weights were gathered or whose gradient is reduced, and
        # the matrix that was unpacked from 4 bits to be multiplied.
        gathered=(max(count.layer, vocabulary) * size if zero >= 3 else 0)
        + (layer_trained * trained_size if zero >= 2 else 0)
        + (shape.hidden * shape.intermediate * setup.precision.compute if setup.tuning == "qlora" else 0),
    )


def count_adapters(shape: ModelShape) -> int:
    """Count the adapter weights of one layer: two low-rank halves for each matrix of attention and MLP."""
    hidden, query, key, inner = shape.hidden, shape.query_width, shape.key_width, shape.intermediate
    matrices = [(hidden, query + 2 * key)] if shape.fused_qkv else [(hidden, query), (hidden, key), (hidden, key)]
    matrices += [(query, hidden), (inner, hidden)]
    matrices += [(hidden, inner)] * (2 if shape.gated else 1)
    return sum(LORA_RANK * (rows + columns) for rows, columns in matrices)
