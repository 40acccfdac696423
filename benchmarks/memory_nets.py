"""The networks of benchmarks/memory_cpu.py that no library at hand brings: convolutional, U-Net, recurrent."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """A residual block of ResNet: 1x1, 3x3 (strided where the picture shrinks), 1x1, and a 1x1 shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = conv_norm(inputs, width, 1)
        self.look = conv_norm(width, width, 3, stride)
        self.expand = conv_norm(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take pictures."""
        inner = F.relu(self.look(F.relu(self.reduce(x), inplace=True)), inplace=True)
        out: torch.Tensor = self.expand(inner)
        return F.relu(out + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Strided 7x7, max pooling and three stages of bottlenecks, at any width."""

    def __init__(self, width: int = 20, classes: int = 100) -> None:
        super().__init__()
        self.stem = conv_norm(3, width, 7, 2)
        stages: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            for block in range(2):
                outputs = width * 4 * 2**stage
                stages.append(Bottleneck(inputs, width * 2**stage, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take pictures."""
        x = F.max_pool2d(F.relu(self.stem(x), inplace=True), 3, 2, 1)
        out: torch.Tensor = self.head(self.stages(x).mean((2, 3)))
        return out


class UNet(nn.Module):
    """Down by strided convolutions, up by transposed ones or by interpolation, with skip connections."""

    def __init__(self, width: int = 24, depth: int = 3, classes: int = 5, *, upsample: bool = False) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.first = self._double(3, width)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(sizes))
        self.after_down = nn.ModuleList(self._double(b, b) for b in sizes[1:])
        self.up = nn.ModuleList(self._up(b, a, upsample) for a, b in itertools.pairwise(sizes))
        self.after_up = nn.ModuleList(self._double(2 * a, a) for a in sizes[:-1])
        self.last = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Module:
        first, second = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        norms = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        return nn.Sequential(first, norms[0], nn.SiLU(), second, norms[1], nn.SiLU())

    @staticmethod
    def _up(inputs: int, outputs: int, upsample: bool) -> nn.Module:
        if upsample:
            return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(inputs, outputs, 1))
        return nn.ConvTranspose2d(inputs, outputs, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take pictures."""
        x = self.first(x)
        skips = []
        for down, after in zip(self.down, self.after_down, strict=True):
            skips.append(x)
            x = after(down(x))
        for up, after, skip in reversed(list(zip(self.up, self.after_up, skips, strict=True))):
            x = after(torch.cat([up(x), skip], 1))
        out: torch.Tensor = self.last(x)
        return out


class RecurrentLM(nn.Module):
    """Embedding, recurrent layers and a head: a language model of 2016."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, vocab: int = 4000, width: int = 256, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = kind(width, width, **options)
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take tokens of [batch, time]; without batch_first the layers are given [time, batch]."""
        x = self.embed(tokens)
        if self.layers.batch_first:
            out: torch.Tensor = self.head(self.layers(x)[0])
            return out
        by_time: torch.Tensor = self.head(self.layers(x.transpose(0, 1))[0])
        return by_time.transpose(0, 1)
