"""The shapes of public models, and how many parameters a shape has.

Promises:
- every row names its source, and the formula gives exactly the parameters that transformers' own model has;
- a name is found whatever its case, with or without the organisation; an unknown one lists the nearest;
- nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from batchwright.catalogue.cards import alternatives
from batchwright.errors import InvalidInputError
from batchwright.units import shortened


@dataclass(frozen=True)
class ModelShape:
    """What of a transformer decides its parameters and the memory of its step.

    >>> find_model("llama-3-8b").layers, find_model("llama-3-8b").kv_heads
    (32, 8)
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    rotary_dim: int
    parameters: int
    source: str
    aliases: tuple[str, ...] = ()
    positions: str = "rotary"
    position_rows: int = 0
    token_types: int = 0
    tied: bool = False
    gated: bool = False
    activation: str = "gelu"
    norm: str = "layernorm"
    norms_per_layer: int = 2
    embedding_norm: bool = False
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    mask_head: bool = False
    fused_qkv: bool = False
    parallel: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0

    @property
    def query_width(self) -> int:
        """Numbers in the queries of one token."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers in the keys of one token, and in its values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by the place they sit in; `head` leaves out what it shares with the embedding."""

    embedding: int
    layer_matrices: int
    layer_vectors: int
    layers: int
    final: int
    head: int

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return self.layer_matrices + self.layer_vectors

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.embedding + self.layers * self.layer + self.final + self.head


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Count the parameters of a shape.

    >>> count_parameters(find_model("gpt2")).total
    124439808
    """
    hidden, inner = shape.hidden, shape.intermediate
    query, key = shape.query_width, shape.key_width
    norm = hidden * (2 if shape.norm == "layernorm" else 1)
    up_projections = 2 if shape.gated else 1
    biases = (
        (query + 2 * key) * shape.qkv_bias
        + hidden * shape.out_bias
        + (up_projections * inner + hidden) * shape.mlp_bias
    )
    return ParameterCount(
        embedding=(shape.vocab + shape.position_rows + shape.token_types) * hidden + norm * shape.embedding_norm,
        layer_matrices=hidden * (2 * query + 2 * key) + (up_projections + 1) * hidden * inner,
        layer_vectors=biases + shape.norms_per_layer * norm + 2 * shape.head_dim * shape.qk_norm,
        layers=shape.layers,
        final=norm * shape.final_norm,
        head=(
            shape.vocab * hidden * (not shape.tied)
            + shape.vocab * shape.head_bias
            # The head of a masked language model transforms each position once more before the vocabulary.
            + (hidden * hidden + hidden + norm) * shape.mask_head
        ),
    )


def find_model(name: str) -> ModelShape:
    """Return the shape of this name.

    >>> find_model("Meta-Llama/Llama-3.2-1B").name
    'llama-3.2-1b'
    >>> find_model("lama-3-8b")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: no model is named 'lama-3-8b' in the catalogue.
      try: llama-3-8b, llama-3.1-8b or llama-3-70b
    """
    names = _names()
    key = _key(name) if isinstance(name, str) else ""
    # A checkpoint's full name is often typed with an organisation that the catalogue does not know.
    row = names.get(key) or names.get(key.rsplit("/", 1)[-1])
    if row is not None:
        return load_models()[row]
    near = list(dict.fromkeys(names[match] for match in difflib.get_close_matches(key, names, n=9, cutoff=0.5)))[:3]
    remedy = alternatives(near or ["llama-3-8b", "gpt2", "qwen2.5-7b"])
    raise InvalidInputError(f"no model is named {shortened(name)} in the catalogue.", remedy=remedy)


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@cache
def load_models() -> dict[str, ModelShape]:
    """Return every model of the catalogue by its name, in the order of the file."""
    text = files("batchwright.catalogue").joinpath("models.json").read_text(encoding="utf-8")
    rows = json.loads(text)["models"]
    return {row["name"]: ModelShape(**{**row, "aliases": tuple(row.get("aliases", ()))}) for row in rows}


@cache
def _names() -> dict[str, str]:
    """Every way to write a name, to the name of its row."""
    return {_key(alias): shape.name for shape in load_models().values() for alias in (*shape.aliases, shape.name)}
