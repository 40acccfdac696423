"""`estimate_named`: the memory of a step of a public model, by formula, at once and without torch.

Promises:
- every byte comes from a tensor that transformers 5 and torch 2 hold; no constant is fitted to a measurement;
- the peak is the largest of the step's moments: the loss, the head, a layer, the embedding, the optimizer. Between them
  memory only falls or changes evenly from layer to layer; the parts of a moment sum to it;
- full training holds every weight; LoRA freezes them and adds adapters; QLoRA stores the frozen matrices in 4 bits;
- ZeRO divides the optimizer's state (1), also the gradients (2), also the weights (3) by the devices;
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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from batchwright.catalogue.models import ModelShape, count_parameters, find_model
from batchwright.errors import InvalidInputError
from batchwright.memory.estimate_result import PARTS, Estimate, Owner, PeakMoment, PhasePeak
from batchwright.memory.formula_tensors import ALWAYS_EAGER, LORA_RANK, OPTIMIZERS, Setup, layer_tensors, outer_tensors
from batchwright.units import PeakBytes, format_bytes, whole_number

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
    >>> from batchwright.memory.formula_tensors import Setup
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


@dataclass(frozen=True)
class Moment:
    """Bytes alive at one moment of the step, by part."""

    phase: str
    module: str
    operator: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All bytes alive."""
        return sum(self.parts.values())


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
        parts = {
            "weights": held.weights,
            # A rank of ZeRO-2 keeps its share only.
            "gradients": min(gradients, held.gradients),
            "optimizer": held.optimizer,
            "activations": activations,
            "temporaries": temporaries + held.gathered,
            # Token numbers and labels, 8 bytes each.
            "inputs": 16 * self.tokens,
        }
        return Moment(phase, module, operator, parts)


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
    layer = (
        # A checkpointed layer keeps its input alone.
        step.seq_len * shape.hidden * setup.precision.stream
        if setup.checkpointing
        else sum(tensor.num_bytes(step.seq_len) for tensor in layer_tensors(shape, setup))
    )
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

    - `precision`: "fp32", "bf16" (weights, gradients and moments too) or "mixed" (fp32 weights under bf16 autocast).
    - `tuning`: "full", "lora" (rank 16 on every matrix of attention and MLP) or "qlora" (those matrices in 4-bit NF4).
    - `zero`: the ZeRO stage, 0 to 3, over `devices` ranks.
    - `attention`: "sdpa" or "eager".
    - `kernels`: "gpu" or "cpu": they differ in the masks of dropout, and a CPU has no fused attention with dropout.
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
    upper = moments(samples, replace(setup, optimizer="adamw-foreach")) if setup.optimizer == "adamw" else steps
    return Estimate(
        name=shape.name,
        micro_batch=samples,
        on="formula",
        peak_bytes=PeakBytes(top.total),
        upper_bytes=PeakBytes(),  # a formula knows nothing of workspaces, segments and contexts
        parts={part: top.parts.get(part) for part in PARTS},
        grows_with_batch={part: more.parts[part] - top.parts[part] if part in top.parts else None for part in PARTS},
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
        Owner(top.parts[part], 1, part, "model", part, "training") for part in ("weights", "gradients", "optimizer")
    ]
    if top.parts["activations"] and not setup.checkpointing:
        layers = 1 if top.module == "layers.0" else shape.layers
        owners += [
            Owner(layers * samples * tensor.num_bytes(length), layers, "activations", "layers", tensor.name, "forward")
            for tensor in layer_tensors(shape, setup)
        ]
    if top.parts["temporaries"]:
        owners.append(Owner(top.parts["temporaries"], 1, "temporaries", top.module, top.operator, top.phase))
    return tuple(sorted((owner for owner in owners if owner.num_bytes), key=lambda o: -o.num_bytes)[:10])


def _notes(shape: ModelShape, setup: Setup, length: int, zero: int, top: Moment, upper: list[Moment]) -> Iterator[str]:
    yield (
        f"formula for the implementation of transformers, all {length:,} tokens of every sample counted; "
        "no allocator, no workspaces, no context, so no bound"
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
