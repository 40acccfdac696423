"""The moments of a step at which memory can be at its largest, each with its parts.

Promises:
- the peak is the largest of these moments; between them memory only falls or changes evenly from layer to layer;
- a part counts what is alive at that moment, so the parts of a moment sum to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.memory.held_states import hold_states
from batchwright.memory.numerics import OPTIMIZERS
from batchwright.memory.saved_tensors import layer_tensors, outer_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchwright.catalogue.models import ModelShape
    from batchwright.memory.held_states import HeldStates
    from batchwright.memory.numerics import Setup


@dataclass(frozen=True)
class Moment:
    """Bytes alive at one moment of the step, by part."""

    phase: str
    module: str
    operator: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    inputs: int

    @property
    def total(self) -> int:
        """All bytes alive."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporaries + self.inputs


@dataclass(frozen=True)
class _Step:
    shape: ModelShape
    setup: Setup
    held: HeldStates
    samples: int
    seq_len: int
    has_vocabulary: bool

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_len

    def at(
        self, phase: str, module: str, operator: str, *, gradients: int, activations: int, temporaries: int
    ) -> Moment:
        held = self.held
        return Moment(
            phase,
            module,
            operator,
            held.weights,
            # A rank of ZeRO-2 keeps its share only.
            min(gradients, held.gradients),
            held.optimizer,
            activations,
            temporaries + held.gathered,
            # Token numbers and labels, 8 bytes each.
            16 * self.tokens,
        )


def step_moments(
    shape: ModelShape,
    setup: Setup,
    *,
    micro_batch: int,
    seq_len: int,
    has_vocabulary: bool = True,
    zero: int = 0,
    devices: int = 1,
) -> list[Moment]:
    """List the moments at which a steady step, the second or any later, can peak."""
    held = hold_states(shape, setup, has_vocabulary=has_vocabulary, zero=zero, devices=devices)
    step = _Step(shape, setup, held, micro_batch, seq_len, has_vocabulary)
    return [*_of_forward_and_loss(step), *_of_backward(step), _of_optimizer(step)]


def _of_forward_and_loss(step: _Step) -> Iterator[Moment]:
    shape, setup = step.shape, step.setup
    size = setup.precision.compute
    kept, casts = _kept_after_forward(step), _casts(step)
    if setup.copies_inputs and not setup.trains_all:
        # The last adapter at work: what down multiplies, and its copy in fp32 on the way to the bf16 one.
        inner = step.tokens * shape.intermediate * (2 + 4)
        yield step.at(
            "forward", f"layers.{shape.layers - 1}", "adapter", gradients=0, activations=kept + casts, temporaries=inner
        )
    if not step.has_vocabulary:
        cache = _cache_in_fp32(step)
        yield step.at("forward", "head", "loss", gradients=0, activations=kept + casts, temporaries=cache)
        return
    logits = step.tokens * shape.vocab
    # A causal language model raises its logits to fp32 for the loss; a masked one leaves them as they are.
    loss_size = 4 if not shape.mask_head or setup.precision.name == "mixed" else size
    # tanh of the capped logits, kept until they are differentiated.
    cap = logits * size if shape.family == "gemma2" else 0
    raised = logits * loss_size if loss_size != size else 0
    yield step.at(
        "forward",
        "lm_head",
        "log_softmax",
        gradients=0,
        # Under checkpointing autocast's cache of weights still lives here, though nothing will read it.
        activations=kept + casts + cap + logits * loss_size,
        temporaries=logits * size + raised + _cache_in_fp32(step),
    )
    # The head is never checkpointed: the copy of its weight is kept in any case.
    kept += 2 * shape.vocab * shape.hidden if setup.checkpointing and casts else casts
    yield step.at(
        "backward",
        "loss",
        "log_softmax_backward",
        gradients=0,
        activations=kept + cap + logits * loss_size,
        # The gradient that enters log_softmax and the one that leaves it.
        temporaries=2 * logits * loss_size,
    )
    # The gradient of the head's weight is as large as the embedding; under autocast it is made in bf16 first.
    first_made = step.held.head_gradient // 2 if setup.precision.name == "mixed" else 0
    yield step.at(
        "backward",
        "lm_head",
        "mm",
        gradients=step.held.head_gradient,
        activations=kept,
        temporaries=first_made + logits * size + step.tokens * shape.hidden * size,
    )


def _of_backward(step: _Step) -> Iterator[Moment]:
    shape, setup, held = step.shape, step.setup, step.held
    layer = step.samples * sum(tensor.num_bytes(step.seq_len) for tensor in layer_tensors(shape, setup))
    casts = _casts(step) // shape.layers
    stream = step.tokens * shape.hidden * setup.precision.stream
    transient = _layer_transient(step)
    if shape.norm == "rms":
        # An RMS norm is differentiated in fp32: the gradient, its two products, and that of the square.
        kept = _kept_after_forward(step) + (0 if setup.checkpointing else _casts(step))
        fp32 = 4 * step.tokens * shape.hidden * 4
        yield step.at("backward", "norm", "mul", gradients=held.head_gradient, activations=kept, temporaries=fp32)
    # Below a layer that is being differentiated each layer still keeps its tensors, or its input alone.
    below = stream if setup.checkpointing else layer + casts
    first, last = layer + casts, layer + casts + (shape.layers - 1) * below
    # Of its own gradients a layer has only that of its last matrix at its worst moment.
    started, missing = held.last_matrix_gradient, held.layer_gradient - held.last_matrix_gradient
    yield step.at(
        "backward",
        f"layers.{shape.layers - 1}",
        "mlp",
        gradients=held.head_gradient + started,
        activations=last,
        temporaries=transient,
    )
    # A tied embedding has its gradient from the head already.
    missing += 0 if shape.tied and step.has_vocabulary else held.embedding_gradient
    yield step.at(
        "backward",
        "layers.0",
        "mlp",
        gradients=held.gradients - min(missing, held.gradients),
        activations=first,
        temporaries=transient,
    )
    # A tied embedding is differentiated twice; both gradients and then their sum are alive.
    tied = held.embedding_gradient if shape.tied and step.has_vocabulary else 0
    yield step.at(
        "backward",
        "embedding",
        "embedding_dense_backward",
        gradients=held.gradients,
        activations=0,
        temporaries=tied + stream,
    )


def _of_optimizer(step: _Step) -> Moment:
    _, copies = OPTIMIZERS[step.setup.optimizer]
    # One weight at a time: the root of its second moment, and that divided, before the update.
    one_by_one = 2 * step.held.largest_trained if step.setup.optimizer == "adamw" else 0
    return step.at(
        "optimizer",
        "optimizer",
        "step",
        gradients=step.held.gradients,
        activations=0,
        temporaries=max(one_by_one, copies * step.held.trained),
    )


def _kept_after_forward(step: _Step) -> int:
    shape, setup = step.shape, step.setup
    outer = sum(tensor.num_bytes(step.seq_len) for tensor in outer_tensors(shape, setup))
    if setup.checkpointing:
        # A checkpointed layer keeps its input alone.
        layer = step.seq_len * shape.hidden * setup.precision.stream
    else:
        layer = sum(tensor.num_bytes(step.seq_len) for tensor in layer_tensors(shape, setup))
    return step.samples * (shape.layers * layer + outer)


def _casts(step: _Step) -> int:
    """Bytes of the bf16 copies that autocast makes of fp32 weights and that the backward pass reads."""
    if step.setup.precision.name != "mixed":
        return 0
    head = step.shape.vocab * step.shape.hidden if step.has_vocabulary else 0
    return 2 * (step.shape.layers * step.held.layer_weights + head)


def _cache_in_fp32(step: _Step) -> int:
    """Bytes of the cache of keys and values where it is none of the tensors that the backward pass keeps.

    Under autocast a rotation leaves keys in fp32, the cache takes its type from them, and attention reads bf16
    copies. The cache itself goes when the forward pass returns; with checkpointing there is none.
    """
    shape, setup = step.shape, step.setup
    if setup.precision.name != "mixed" or not shape.rotary_dim or setup.checkpointing:
        return 0
    return step.tokens * shape.layers * 2 * shape.key_width * 4


def _layer_transient(step: _Step) -> int:
    """Bytes that the backward pass of a layer adds to what the layer keeps, at its worst."""
    shape, setup = step.shape, step.setup
    size = setup.precision.compute
    # Gradients of the inner width alive at once, less the tensors of that width freed by then.
    inner = size * (1 if shape.activation in ("gelu", "gelu_tanh") and not shape.gated else 2)
    if setup.copies_inputs and not setup.trains_all:
        # Through the base in bf16, through the adapter in bf16 and then fp32, less the copy that is freed.
        inner = 2 + 2 + 4 - 2
    # The gradient that comes in; and while a layer with adapters is run again, what none of its frozen matrices
    # keeps but its code still holds: the norm's output, the residual, the output of down.
    wide = 4 if setup.checkpointing and not setup.trains_all else 1
    mlp = step.tokens * (inner * shape.intermediate + wide * shape.hidden * setup.precision.stream)
    tensors = layer_tensors(shape, setup)
    if not any(tensor.per_pair for tensor in tensors):
        return mlp
    # Unfused attention: the gradients before and after the softmax; what the MLP kept is free by then.
    pairs = shape.heads * step.samples * step.seq_len**2 * (8 if size == 4 else 6)
    freed = step.tokens * sum(tensor.per_token for tensor in tensors if tensor.block == "mlp")
    return max(mlp, pairs - freed)
