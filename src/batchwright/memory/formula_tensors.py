"""What autograd keeps of one layer, tensor by tensor, in transformers 5, and how a step is set up.

Promises:
- each entry is one tensor that a trace of the same layer shows alive at the end of the forward pass;
- bytes are per token of the micro-batch, except those marked per pair, which a token keeps for every other token;
- nothing is fitted: each entry names the tensor it counts;
- the three precisions of a `Setup` mean the same as in torch: all fp32; `model.to(bfloat16)`; fp32 weights under bf16
  autocast. Every choice that changes a number is a field of it, checked once;
- torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.units import one_of

if TYPE_CHECKING:
    from batchwright.catalogue.models import ModelShape


TUNINGS = ("full", "lora", "qlora")
ATTENTIONS = ("sdpa", "eager")
KERNELS = ("gpu", "cpu")
# Numbers that an optimizer keeps for each one it trains, and whole copies that its step makes for a moment.
OPTIMIZERS = {
    "adamw": (2, 0),
    "adamw-foreach": (2, 1),
    "sgd": (0, 0),
    "sgd-momentum": (1, 0),
}
LORA_RANK = 16


@dataclass(frozen=True)
class Precision:
    """Bytes of one number in each place of a step.

    `compute` is what matrices are multiplied in, `stream` what flows from layer to layer between them.
    """

    name: str
    weights: int
    compute: int
    stream: int


PRECISIONS = {
    "fp32": Precision("fp32", weights=4, compute=4, stream=4),
    "bf16": Precision("bf16", weights=2, compute=2, stream=2),
    # Autocast leaves the embedding and the sums between layers in fp32.
    "mixed": Precision("mixed", weights=4, compute=2, stream=4),
}


@dataclass(frozen=True)
class Setup:
    """How a named model is run, every choice checked.

    >>> Setup.of(precision="bf16", tuning="lora").copies_inputs
    True
    """

    precision: Precision
    tuning: str = "full"
    attention: str = "sdpa"
    kernels: str = "gpu"
    optimizer: str = "adamw"
    checkpointing: bool = False

    @classmethod
    def of(
        cls,
        *,
        precision: str = "bf16",
        tuning: str = "full",
        attention: str = "sdpa",
        kernels: str = "gpu",
        optimizer: str = "adamw",
        checkpointing: bool = False,
    ) -> Setup:
        """Return the set-up of these names, or say which of them is not known."""
        return cls(
            PRECISIONS[one_of("precision", precision, PRECISIONS)],
            one_of("tuning", tuning, TUNINGS),
            one_of("attention", attention, ATTENTIONS),
            one_of("kernels", kernels, KERNELS),
            one_of("optimizer", optimizer, OPTIMIZERS),
            bool(checkpointing),
        )

    @property
    def trains_all(self) -> bool:
        """Whether every weight gets a gradient, rather than adapters only."""
        return self.tuning == "full"

    @property
    def copies_inputs(self) -> bool:
        """Whether each matrix keeps its own 2-byte copy of its input.

        Autocast casts the fp32 input anew for every matrix that reads it; so do the adapters of LoRA, which peft
        holds in fp32 and runs under autocast.
        """
        return self.precision.name == "mixed" or (not self.trains_all and self.precision.name == "bf16")

    @property
    def mask_bytes(self) -> int:
        """Bytes of one entry of a dropout mask: a flag on a GPU, a number of the activations' type on a CPU."""
        return 1 if self.kernels == "gpu" else self.precision.compute


# Attention that only runs unfused in transformers, whatever is asked for; falcon broadcasts one key to all heads,
# which sends torch to its unfused path.
ALWAYS_EAGER = ("bloom", "gemma2", "gpt_neo", "falcon")
# These leave the softmax in the activations' type; the others raise it to fp32 and keep both.
_SOFTMAX_AS_IT_COMES = ("gpt2", "bert", "roberta")


@dataclass(frozen=True)
class Saved:
    """One tensor that a layer keeps for its backward pass."""

    name: str
    block: str
    per_token: int = 0
    per_pair: int = 0

    def num_bytes(self, seq_len: int) -> int:
        """Bytes for one sample of `seq_len` tokens."""
        return self.per_token * seq_len + self.per_pair * seq_len**2


def layer_tensors(shape: ModelShape, setup: Setup) -> list[Saved]:
    """List what one layer keeps.

    >>> from batchwright.catalogue.models import find_model
    >>> from batchwright.memory.formula_tensors import Setup
    >>> tensors = layer_tensors(find_model("llama-3-8b"), Setup.of(precision="bf16"))
    >>> [(tensor.name, tensor.per_token) for tensor in tensors if tensor.block == "mlp"]
    [('outputs of gate and up', 57344), ('activation', 28672), ('input of down', 28672)]
    """
    readers_of_attention = 1 if shape.fused_qkv else 3
    readers_of_mlp = 2 if shape.gated and shape.family != "phi3" else 1
    if shape.parallel and shape.norms_per_layer == 1:
        kept = norm_tensors(shape, setup, "norm", readers=readers_of_attention + readers_of_mlp)
    else:
        kept = norm_tensors(shape, setup, "attention norm", readers=readers_of_attention)
        # Side by side, both norms read the same stream, which is kept once.
        kept += norm_tensors(shape, setup, "mlp norm", readers=readers_of_mlp, keeps_input=not shape.parallel)
    if shape.norms_per_layer == 4:
        # Norms behind attention and MLP: their output is only added, so nothing keeps it.
        kept += norm_tensors(shape, setup, "norm after attention", readers=0)
        kept += norm_tensors(shape, setup, "norm after mlp", readers=0)
    kept += _attention(shape, setup)
    kept += _mlp(shape, setup)
    if shape.dropout:
        kept.append(Saved("dropout masks of both branches", "norms", 2 * shape.hidden * setup.mask_bytes))
    if not setup.trains_all:
        matrices = 4 + (3 if shape.gated else 2)
        kept.append(Saved("outputs of the low-rank halves", "adapters", matrices * LORA_RANK * setup.precision.compute))
    return kept


def outer_tensors(shape: ModelShape, setup: Setup) -> list[Saved]:
    """List what is kept outside the layers, the loss left out."""
    kept = []
    if shape.embedding_norm:
        kept += norm_tensors(shape, setup, "embedding norm", readers=0)
    if shape.mask_head:
        # Input of the first layer, and the head's own matrix, gelu and norm.
        kept.append(Saved("embedding", "norms", shape.hidden * setup.precision.stream))
        kept.append(Saved("masked-language head", "head", 3 * shape.hidden * setup.precision.compute))
    if shape.final_norm:
        kept += norm_tensors(shape, setup, "final norm", readers=1)
    if shape.dropout and shape.family != "opt":
        kept.append(Saved("dropout mask of the embedding", "norms", shape.hidden * setup.mask_bytes))
    return kept


def norm_tensors(shape: ModelShape, setup: Setup, name: str, *, readers: int, keeps_input: bool = True) -> list[Saved]:
    """List what a norm keeps, and its output for the `readers` matrices that multiply it."""
    hidden, precision = shape.hidden, setup.precision
    kept = []
    if shape.norm == "layernorm":
        kept.append(Saved(f"{name}: mean and deviation", "norms", 2 * precision.stream))
        if keeps_input:
            kept.append(Saved(f"{name}: input", "norms", hidden * precision.stream))
    else:
        # RMS norms run in fp32: a bf16 input is copied, an fp32 one kept as it is.
        kept.append(Saved(f"{name}: input in fp32", "norms", hidden * 4 + 4))
        if setup.trains_all:
            # Needed for the gradient of the norm's weight; rounded to bf16 before it, except in Gemma.
            rounded = precision.name == "bf16" and not shape.family.startswith("gemma")
            kept.append(Saved(f"{name}: normalised", "norms", hidden * (2 if rounded else 4)))
    if setup.copies_inputs:
        kept.append(Saved(f"{name}: a copy for each matrix", "norms", readers * hidden * 2))
    elif readers:
        kept.append(Saved(f"{name}: output", "norms", hidden * precision.stream))
    return kept


def _attention(shape: ModelShape, setup: Setup) -> list[Saved]:
    size = setup.precision.compute
    query, key = shape.query_width, shape.key_width
    kept = []
    if shape.qk_norm:
        # fp32 copies of queries and keys, and, for the weights of their norms, the normalised ones.
        normalised = 0 if not setup.trains_all else 4 if setup.precision.name == "fp32" else 2
        heads = shape.heads + shape.kv_heads
        kept.append(Saved("norms of queries and keys", "attention", (query + key) * (4 + normalised) + 4 * heads))
    unfused = setup.attention == "eager" or shape.family in ALWAYS_EAGER
    # On a CPU the fused kernel refuses dropout, and torch falls back to plain operations in fp32.
    falls_back = not unfused and setup.kernels == "cpu" and shape.attention_dropout > 0
    if unfused or falls_back:
        kept += _unfused(shape, setup, falls_back)
    else:
        rotates = shape.positions == "rotary"
        if shape.fused_qkv and (setup.checkpointing or not rotates):
            # What is not rotated is a view, and a view keeps the whole of what it looks at.
            kept.append(Saved("output of the joint projection", "attention", (query + 2 * key) * size))
        if rotates or not shape.fused_qkv:
            kept.append(Saved("queries", "attention", query * size))
        if not setup.checkpointing or not shape.fused_qkv:
            # The cache of keys and values, on by default in training, holds the copies that attention reads.
            kept.append(Saved("keys and values", "attention", 2 * key * size))
        elif rotates:
            kept.append(Saved("keys", "attention", key * size))
        kept.append(Saved("output of attention", "attention", query * size + 4 * shape.heads))
        if shape.rotary_dim and (shape.rotary_dim < shape.head_dim or shape.family == "phi3"):
            # Rotating a part of each head joins two pieces, laid out head by head: the output has to be copied back.
            kept.append(Saved("output of attention, in order", "attention", query * size))
    if setup.copies_inputs and not setup.trains_all:
        kept.append(Saved("input of the output projection", "adapters", query * 2))
    return kept


def _unfused(shape: ModelShape, setup: Setup, falls_back: bool) -> list[Saved]:
    size = setup.precision.compute
    query, heads = shape.query_width, shape.heads
    # Keys and values are repeated for every head that shares them.
    read = 3 * query * size
    if falls_back or shape.family == "falcon":
        read = 3 * query * 4
    elif shape.family == "gpt_neo" and setup.precision.name == "bf16":
        # It raises queries and keys to fp32 itself; autocast would lower them again.
        read = query * (4 + 4 + 2)
    kept = [
        Saved("queries, keys and values for every head", "attention", read),
        Saved("output of attention", "attention", query * size),
    ]
    if falls_back or shape.family == "falcon":
        softmax = 4
    elif shape.family in _SOFTMAX_AS_IT_COMES and setup.precision.name != "mixed":
        softmax = size
    else:
        softmax = 4 + (2 if size == 2 else 0)
    kept.append(Saved("softmax", "attention", per_pair=heads * softmax))
    if shape.attention_dropout:
        dropped = 4 if falls_back else size
        mask = 1 if setup.kernels == "gpu" else dropped
        kept.append(Saved("dropout of the softmax", "attention", per_pair=heads * (dropped + mask)))
    if shape.family == "gemma2":
        kept.append(Saved("soft cap", "attention", per_pair=heads * size))
    return kept


def _mlp(shape: ModelShape, setup: Setup) -> list[Saved]:
    size = shape.intermediate * setup.precision.compute
    if shape.gated:
        return [
            Saved("outputs of gate and up", "mlp", 2 * size),
            Saved("activation", "mlp", size),
            Saved("input of down", "mlp", size),
        ]
    if shape.activation == "relu":
        # Its derivative is read off its own output, which is the input of down unless an adapter reads a copy.
        copied = 2 * shape.intermediate if setup.copies_inputs and not setup.trains_all else 0
        return [Saved("input of down", "mlp", size + copied)]
    if shape.activation == "gelu_new":
        # Written out in plain operations: x, x / 2, tanh, 1 + tanh, and their product.
        return [Saved("five steps of gelu_new", "mlp", 5 * size)]
    return [Saved("output of up", "mlp", size), Saved("input of down", "mlp", size)]
