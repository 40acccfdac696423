"""The two tasks of benchmarks/noise_pays.py: real data that comes with Python, small models, a target loss.

docs-lm       The next character of Python's own reference manual (pydoc_data.topics, 465,000 characters): a causal
              transformer of one block over 16 characters, AdamW. A sample is 16 characters.
highlighter   What kind of token (comment, string, keyword, ...) a character of the standard library's source belongs
              to, from the 16 characters to either side: a perceptron over embedded characters, SGD with momentum. A
              sample is one character; the truth is that of the `tokenize` module.

Every tenth block of the manual and every tenth module of the library is held out; a fixed draw from it is the
evaluation set. Samples are drawn with replacement, and a seed draws the same order of samples whatever the batch size.
"""

from __future__ import annotations

import io
import keyword
import pydoc_data.topics
import sysconfig
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = tuple[torch.Tensor, torch.Tensor]
# Printable ASCII, the line feed, and one for everything else.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(ALPHABET)


@dataclass(frozen=True)
class Task:
    """One task as it stands before anything is trained."""

    name: str
    data: Callable[[bool], Data]
    """The training data, or what is held out."""
    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    first_rate: float
    """Where the tuning at a batch of 32 begins; every other batch begins at its neighbour's."""
    target: float
    """Nats on the evaluation set."""
    evaluation_samples: int
    training_seconds: float = 20.0
    """Of CPU time, evaluation included, after which a training ends."""


@dataclass(frozen=True)
class Data:
    """Coded characters, where a sample may begin, and the classes of the characters if these are the targets."""

    codes: torch.Tensor
    starts: torch.Tensor
    width: int
    classes: torch.Tensor | None = None

    def draw(self, generator: torch.Generator, size: int) -> Batch:
        """Return the next samples; where the draw is cut into batches does not change their order."""
        starts = self.starts[torch.randint(len(self.starts), (size,), generator=generator)]
        windows = self.codes[starts[:, None] + torch.arange(self.width)]
        if self.classes is None:
            return windows[:, :-1], windows[:, 1:]
        return windows, self.classes[starts + self.width // 2]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _coded(text: str) -> torch.Tensor:
    codes = {character: code for code, character in enumerate(ALPHABET)}
    return torch.tensor([codes.get(character, UNKNOWN) for character in text])


# --- docs-lm


CONTEXT, WIDTH, HEADS = 16, 32, 2
BLOCK = 2000


@cache
def manual(is_held_out: bool) -> Data:
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    starts = torch.arange(0, len(text) - CONTEXT)
    # A sample lies in one block, so that nothing held out is ever trained on.
    inside = starts % BLOCK < BLOCK - CONTEXT
    own = (starts // BLOCK % 10 == 9) == is_held_out
    return Data(_coded(text), starts[inside & own], CONTEXT + 1)


class Transformer(nn.Module):
    """One causal block."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(UNKNOWN + 1, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, UNKNOWN + 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return logits of the character after each."""
        embedded = self.characters(codes) + self.positions.weight
        logits: torch.Tensor = self.head(self.norm(self.block(embedded, src_mask=self.mask, is_causal=True)))
        return logits


# --- highlighter


SIDE, EMBEDDED, HIDDEN = 16, 8, 128
CLASSES = ("space", "comment", "string", "keyword", "name", "number", "operator")
KINDS = {
    tokenize.COMMENT: "comment",
    tokenize.STRING: "string",
    tokenize.NUMBER: "number",
    tokenize.OP: "operator",
}


def _classes_of(source: str) -> torch.Tensor:
    """Return the class of each character."""
    found = torch.zeros(len(source), dtype=torch.int64)
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = KINDS.get(token.type)
        if token.type == tokenize.NAME:
            kind = "keyword" if keyword.iskeyword(token.string) else "name"
        if kind is not None:
            start, end = (line_starts[row - 1] + column for row, column in (token.start, token.end))
            found[start:end] = CLASSES.index(kind)
    return found


@cache
def library(is_held_out: bool) -> Data:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    sources = [module.read_text("utf-8") for module in modules[9::10]]
    if not is_held_out:
        sources = [module.read_text("utf-8") for number, module in enumerate(modules) if number % 10 != 9]
    # Other ends of a line would shift what `tokenize` counts by.
    sources = [source for source in sources if source.splitlines() == source.split("\n")[:-1]]
    codes = torch.cat([_coded(source) for source in sources])
    classes = torch.cat([_classes_of(source) for source in sources])
    return Data(codes, torch.arange(len(codes) - 2 * SIDE), 2 * SIDE + 1, classes)


class Perceptron(nn.Module):
    """Two hidden layers over the embedded characters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(UNKNOWN + 1, EMBEDDED)
        self.layers = nn.Sequential(
            nn.Linear((2 * SIDE + 1) * EMBEDDED, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, len(CLASSES)),
        )

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return logits of the classes."""
        logits: torch.Tensor = self.layers(self.characters(codes).flatten(1))
        return logits


TASKS = (
    Task(
        name="docs-lm",
        data=manual,
        model=Transformer,
        optimizer=lambda weights, rate: torch.optim.AdamW(weights, lr=rate),
        first_rate=8e-3,
        target=2.1,
        evaluation_samples=512,
    ),
    Task(
        name="highlighter",
        data=library,
        model=Perceptron,
        optimizer=lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9),
        first_rate=0.02,
        target=0.6,
        evaluation_samples=4096,
    ),
)
