"""The tasks of benchmarks/recommendation.py: small models on data that is made or comes with Python.

Those on which constants were chosen stand apart from those that are judged: other data, other models, other widths. How
long each runs was set before its grid was, so that its late loss lies above the floor that its noise leaves.

| judged | what is learnt | model |
|---|---|---|
| teacher | regression on a random network's output, inputs of uneven scale, with noise | perceptron, 2 hidden layers |
| kinds | the kind of token that a character of the standard library belongs to | perceptron on embedded characters |
| manual | the next character of Python's reference manual | causal transformer, 1 block |
| shapes | which of ten outlines a noisy 12 x 12 image shows | patches and one attention block |
| denoise | the noise that was added to such an image, at a random level (diffusion) | perceptron with skips |

| for constants | what is learnt | model |
|---|---|---|
| ridges | regression on products of a few directions | perceptron, 1 hidden layer |
| logits | labels drawn from a linear model, uneven features | linear |
| source | the next character of the standard library's source from the last 12 | perceptron on embedded characters |
| rebuild | a noisy outline's clean image | perceptron with a narrow middle |
"""

from __future__ import annotations

import io
import itertools
import keyword
import math
import pydoc_data.topics
import sysconfig
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

HELD_OUT = 512
SAMPLES = 200_000


@dataclass(frozen=True)
class Data:
    """Inputs and targets of samples; the last ones are held out."""

    inputs: Tensor
    targets: Tensor

    @property
    def num_training(self) -> int:
        """How many samples are trained on."""
        return len(self.inputs) - HELD_OUT


@dataclass(frozen=True)
class Task:
    """What is learnt, by which optimizer, and for how long."""

    name: str
    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    optimizer: str
    first_rate: float
    """Where the tuning at the default batch begins."""
    steps: int
    """Optimizer steps of the default batch until the late loss."""


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return functional.mse_loss(outputs, targets)
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


# --- data

# Printable ASCII, the line feed, and one for everything else.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(ALPHABET)
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


def _coded(text: str) -> torch.Tensor:
    codes = {character: code for code, character in enumerate(ALPHABET)}
    return torch.tensor([codes.get(character, UNKNOWN) for character in text])


def _noise(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@cache
def teacher() -> Data:
    inputs = _noise(1, SAMPLES, 24) * torch.arange(1, 25).pow(-0.5)
    hidden = torch.tanh(inputs @ _noise(2, 24, 16))
    outputs = torch.tanh(hidden @ _noise(3, 16, 8) / 2) @ _noise(4, 8, 1)
    return Data(inputs, outputs + 0.1 * _noise(5, SAMPLES, 1))


@cache
def ridges() -> Data:
    inputs = _noise(11, SAMPLES, 16)
    turned = inputs @ torch.linalg.qr(_noise(12, 16, 16)).Q
    outputs = turned[:, :1] * turned[:, 1:2] + turned[:, 2:3].clamp(min=0) + 0.5 * turned[:, 3:4]
    return Data(inputs, outputs + 0.2 * _noise(13, SAMPLES, 1))


@cache
def logits() -> Data:
    inputs = _noise(21, SAMPLES, 64) * torch.arange(1, 65).pow(-0.8)
    chances = functional.softmax(3 * inputs @ _noise(22, 64, 8), dim=1)
    return Data(inputs, torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(23)))


def _library_text() -> str:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return "".join(module.read_text("utf-8") for module in modules[::2])


@cache
def kinds() -> Data:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    sources = [module.read_text("utf-8") for module in modules]
    sources = [source for source in sources if source.splitlines() == source.split("\n")[:-1]]
    codes, classes = torch.cat(list(map(_coded, sources))), torch.cat(list(map(_classes_of, sources)))
    starts = torch.randint(len(codes) - 17, (SAMPLES,), generator=torch.Generator().manual_seed(31))
    return Data(codes[starts[:, None] + torch.arange(17)], classes[starts + 8][:, None])


@cache
def manual() -> Data:
    codes = _coded("".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)))
    starts = torch.randint(len(codes) - 17, (SAMPLES,), generator=torch.Generator().manual_seed(41))
    windows = codes[starts[:, None] + torch.arange(9)]
    return Data(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


@cache
def source() -> Data:
    codes = _coded(_library_text())
    starts = torch.randint(len(codes) - 13, (SAMPLES,), generator=torch.Generator().manual_seed(51))
    windows = codes[starts[:, None] + torch.arange(13)]
    return Data(windows[:, :-1].contiguous(), windows[:, -1:].contiguous())


def _outlines(seed: int) -> tuple[Tensor, Tensor]:
    """Images of 12 x 12: a polygon or star of 3 to 7 corners, turned, moved and scaled; and which it is."""
    generator = torch.Generator().manual_seed(seed)
    number = SAMPLES // 2
    kind = torch.randint(10, (number,), generator=generator)
    turn, x, y, size = torch.rand(4, number, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    across, down = columns - 0.5 * (x - 0.5), rows - 0.5 * (y - 0.5)
    angle, radius = torch.atan2(down, across) + 2 * math.pi * turn, (across**2 + down**2).sqrt()
    corners, is_star = (kind % 5 + 3)[:, None, None], (kind >= 5)[:, None, None]
    wave = torch.cos(corners * angle)
    edge = (0.45 + 0.3 * size) * torch.where(is_star, 1 + 0.45 * wave, 1 + 0.12 * wave)
    return torch.exp(-(((radius - edge) / 0.12) ** 2)), kind


@cache
def shapes() -> Data:
    images, kind = _outlines(61)
    return Data(images + 0.4 * _noise(62, *images.shape), kind[:, None])


@cache
def denoise() -> Data:
    images, _ = _outlines(71)
    level = torch.rand(len(images), 1, generator=torch.Generator().manual_seed(72))
    noise = _noise(73, len(images), 144)
    mixed = (1 - level**2).sqrt() * (2 * images.flatten(1) - 1) + level * noise
    return Data(torch.cat([mixed, level], dim=1), noise)


@cache
def rebuild() -> Data:
    images, _ = _outlines(81)
    return Data((images + 0.3 * _noise(82, *images.shape)).flatten(1), images.flatten(1))


# --- models


class Perceptron(nn.Module):
    """Hidden layers of rectified sums; characters are embedded first."""

    def __init__(self, *widths: int, embedded: int = 0) -> None:
        super().__init__()
        self.characters = nn.Embedding(UNKNOWN + 1, embedded) if embedded else None
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.is_class = bool(embedded) or widths[-1] == 8

    def forward(self, inputs: Tensor) -> Tensor:
        """Return numbers, or logits with a dimension of places."""
        hidden = inputs if self.characters is None else self.characters(inputs).flatten(-2)
        for layer in list(self.layers)[:-1]:
            hidden = functional.relu(layer(hidden))
        outputs: Tensor = self.layers[-1](hidden)
        return outputs.unsqueeze(-2) if self.is_class else outputs


class Block(nn.Module):
    """Attention and a perceptron, in plain products, so that many models run as one."""

    def __init__(self, width: int, heads: int, length: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.hidden = torch.full((length, length), -math.inf).triu(1) if is_causal else torch.zeros(length, length)

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream after the block."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for part in self.mixed(self.before(stream)).chunk(3, dim=-1)
        )
        weights = functional.softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + self.hidden, dim=-1)
        stream = stream + self.joined((weights @ value).transpose(-3, -2).flatten(-2))
        changed: Tensor = stream + self.down(functional.gelu(self.up(self.between(stream))))
        return changed


class Language(nn.Module):
    """Logits of the next character at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(UNKNOWN + 1, 32), nn.Parameter(0.02 * torch.randn(8, 32))
        self.block, self.norm = Block(32, 2, 8, is_causal=True), nn.LayerNorm(32)
        self.head = nn.Linear(32, UNKNOWN + 1)

    def forward(self, codes: Tensor) -> Tensor:
        """Return them."""
        logits: Tensor = self.head(self.norm(self.block(self.characters(codes) + self.places)))
        return logits


class Vision(nn.Module):
    """Four patches of 6 x 6, mixed by attention, and the logits of their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(36, 32), nn.Parameter(0.02 * torch.randn(4, 32))
        self.block, self.norm, self.head = Block(32, 2, 4, is_causal=False), nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return them."""
        patches = images.unflatten(-2, (2, 6)).unflatten(-1, (2, 6)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
        logits: Tensor = self.head(self.norm(self.block(self.patches(patches) + self.places)).mean(-2, keepdim=True))
        return logits


class Denoiser(nn.Module):
    """Two hidden layers with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(145, 96), nn.Linear(96, 96), nn.Linear(96, 96)
        self.last, self.skip = nn.Linear(96, 144), nn.Linear(145, 144)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the noise."""
        hidden = functional.silu(self.first(inputs))
        hidden = hidden + functional.silu(self.second(hidden))
        hidden = hidden + functional.silu(self.third(hidden))
        noise: Tensor = self.last(hidden) + self.skip(inputs)
        return noise


# --- pairs of task and optimizer


def _kinds_model() -> nn.Module:
    return Perceptron(17 * 8, 96, 96, len(CLASSES), embedded=8)


def _source_model() -> nn.Module:
    return Perceptron(12 * 12, 128, UNKNOWN + 1, embedded=12)


def _teacher_model() -> nn.Module:
    return Perceptron(24, 64, 64, 1)


JUDGED = (
    Task("teacher-sgd", teacher, _teacher_model, "sgd", 0.1, 2000),
    Task("teacher-adamw", teacher, _teacher_model, "adamw", 2e-3, 2000),
    Task("teacher-momentum", teacher, _teacher_model, "momentum", 0.01, 2000),
    Task("kinds-momentum", kinds, _kinds_model, "momentum", 0.03, 2500),
    Task("kinds-adamw", kinds, _kinds_model, "adamw", 2e-3, 2500),
    Task("kinds-muon", kinds, _kinds_model, "muon", 4e-3, 1500),
    Task("manual-adamw", manual, Language, "adamw", 6e-3, 1200),
    Task("manual-muon", manual, Language, "muon", 8e-3, 1000),
    Task("shapes-momentum", shapes, Vision, "momentum", 0.05, 1500),
    Task("shapes-adamw", shapes, Vision, "adamw", 4e-3, 1500),
    Task("denoise-adamw", denoise, Denoiser, "adamw", 2e-3, 2000),
    Task("denoise-sgd", denoise, Denoiser, "sgd", 0.5, 2000),
)
FOR_CONSTANTS = (
    Task("ridges-sgd", ridges, lambda: Perceptron(16, 96, 1), "sgd", 0.1, 2000),
    Task("ridges-adamw", ridges, lambda: Perceptron(16, 96, 1), "adamw", 4e-3, 2000),
    Task("ridges-momentum", ridges, lambda: Perceptron(16, 96, 1), "momentum", 0.02, 2000),
    Task("ridges-muon", ridges, lambda: Perceptron(16, 96, 1), "muon", 8e-3, 2000),
    Task("logits-sgd", logits, lambda: Perceptron(64, 8), "sgd", 4.0, 600),
    Task("logits-adamw", logits, lambda: Perceptron(64, 8), "adamw", 6e-2, 600),
    Task("logits-momentum", logits, lambda: Perceptron(64, 8), "momentum", 0.5, 600),
    Task("source-momentum", source, _source_model, "momentum", 0.03, 2500),
    Task("source-adamw", source, _source_model, "adamw", 2e-3, 2500),
    Task("source-muon", source, _source_model, "muon", 4e-3, 1500),
    Task("rebuild-momentum", rebuild, lambda: Perceptron(144, 64, 24, 64, 144), "momentum", 0.3, 2500),
    Task("rebuild-adamw", rebuild, lambda: Perceptron(144, 64, 24, 64, 144), "adamw", 4e-3, 2500),
)
