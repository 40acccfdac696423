"""MMSegmentation's transformers and ConvNeXt on ADE20K: SegFormer, UPerNet, SETR (configs/*/README.md).

Eight V100s, two crops each, 150 classes, AdamW (SGD for SETR). Attention is nn.MultiheadAttention of torch 1.x: the
scores are made in full, and kept as their softmax is (see operators_of_the_time.py).
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from gpu_cases.operators_of_the_time import softmax_before_1_11
from gpu_cases.recipes import Recipe
from gpu_cases.segmentation_parts import DOUBT, ConvBlock, FCNHead, Head, Segmenter, UPerHead, segmentation

if TYPE_CHECKING:
    from collections.abc import Callable

_CLASSES = 150
_DOUBT = "evaluation may be in the figure"


class Attention(nn.Module):
    """Attention written out; keys and values from a reduced map where there is a ratio."""

    def __init__(self, width: int, heads: int, ratio: int = 1) -> None:
        super().__init__()
        self.heads, self.ratio = heads, ratio
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        if ratio > 1:
            self.reduce, self.norm = nn.Conv2d(width, width, ratio, ratio), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, size: tuple[int, int] | None = None) -> torch.Tensor:
        """Return the attended tokens."""
        batch, length, width = x.shape
        source = x
        if self.ratio > 1 and size is not None:
            source = self.norm(self.reduce(to_map(x, size)).flatten(2).transpose(1, 2))
        k, v = self.kv(source).view(batch, -1, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2) * (width // self.heads) ** -0.5
        weights = softmax_before_1_11(q @ k.transpose(-2, -1))
        out: torch.Tensor = self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return out


def to_map(tokens: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return tokens as a feature map."""
    return tokens.transpose(1, 2).reshape(tokens.size(0), -1, *size).contiguous()


def dropout(x: torch.Tensor, training: bool, rate: float) -> torch.Tensor:
    """Drop elements, as the kernel of a card does it: with a mask of one byte per element."""
    return torch.native_dropout(x, rate, True)[0] if training and rate > 0.0 else x


def drop_path(x: torch.Tensor, training: bool, rate: float) -> torch.Tensor:
    """Drop whole samples of a residual branch."""
    if not training or rate == 0.0:
        return x
    keep = torch.rand((x.size(0),) + (1,) * (x.dim() - 1), dtype=x.dtype, device=x.device).add_(1 - rate).floor_()
    return x.div(1 - rate) * keep


class MixBlock(nn.Module):
    """A layer of SegFormer's encoder: reduced attention, and a feed-forward part with a depthwise convolution."""

    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, ratio)
        self.mix = nn.Sequential(
            nn.Conv2d(width, 4 * width, 1),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )

    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Return the layer's tokens."""
        x = x + drop_path(self.attn(self.norm_1(x), size), self.training, 0.1)
        mixed = self.mix(to_map(self.norm_2(x), size)).flatten(2).transpose(1, 2)
        return x + drop_path(mixed, self.training, 0.1)


class MixTransformer(nn.Module):
    """SegFormer's encoder."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        widths, heads, ratios = (64, 128, 320, 512), (1, 2, 5, 8), (8, 4, 2, 1)
        kernels, strides = (7, 3, 3, 3), (4, 2, 2, 2)
        self.patches = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2) for a, b, k, s in zip((3, *widths), widths, kernels, strides, strict=False)
        )
        self.patch_norms = nn.ModuleList(nn.LayerNorm(w) for w in widths)
        self.stages = nn.ModuleList(
            nn.ModuleList(MixBlock(w, h, r) for _ in range(d))
            for d, w, h, r in zip(depths, widths, heads, ratios, strict=True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in widths)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the features of the four stages."""
        features = []
        for patch, patch_norm, stage, norm in zip(self.patches, self.patch_norms, self.stages, self.norms, strict=True):
            x = patch(x)
            size = (x.size(2), x.size(3))
            tokens = patch_norm(x.flatten(2).transpose(1, 2))
            for block in stage:  # type: ignore[attr-defined]
                tokens = block(tokens, size)
            x = to_map(norm(tokens), size)
            features.append(x)
        return features


class SegFormerHead(Head):
    """A projection per level, all at a quarter of the image, fused."""

    def __init__(self) -> None:
        super().__init__(256, _CLASSES)
        self.project = nn.ModuleList(ConvBlock(w, 256) for w in (64, 128, 320, 512))
        self.fuse = ConvBlock(4 * 256, 256)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits."""
        levels = [project(x) for project, x in zip(self.project, features, strict=True)]
        return self.classify(self.fuse(torch.cat([self.resize(level, features[0]) for level in levels], dim=1)))


class ViT(nn.Module):
    """A plain vision transformer; feature maps after four of its layers."""

    def __init__(self, width: int, depth: int, heads: int, taken: tuple[int, ...], rate: float) -> None:
        super().__init__()
        self.taken, self.rate = taken, rate
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.cls = nn.Parameter(torch.empty(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, 1 + 32 * 32, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.attns = nn.ModuleList(Attention(width, heads) for _ in range(depth))
        self.widen = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return the features of four layers."""
        x = self.patch(images)
        size = (x.size(2), x.size(3))
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x.flatten(2).transpose(1, 2)], dim=1) + self.position
        x = dropout(x, self.training, self.rate)
        features = []
        for i, (attn, widen, narrow) in enumerate(zip(self.attns, self.widen, self.narrow, strict=True)):
            x = x + dropout(attn(self.norms[2 * i](x)), self.training, self.rate)
            hidden = dropout(F.gelu(widen(self.norms[2 * i + 1](x))), self.training, self.rate)
            x = x + dropout(narrow(hidden), self.training, self.rate)
            if i in self.taken:
                features.append(to_map(x[:, 1:], size))
        return features


class MultiLevelNeck(nn.Module):
    """Features of one size, brought to four sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))

    def forward(self, features: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the features at 4, 2, 1 and 1/2 times their size."""
        levels = [lateral(x) for lateral, x in zip(self.laterals, features, strict=True)]
        scales = (4.0, 2.0, 1.0, 0.5)
        resized = [F.interpolate(x, scale_factor=s, mode="bilinear") for x, s in zip(levels, scales, strict=True)]
        return [conv(x) for conv, x in zip(self.convs, resized, strict=True)]


class SETRHead(Head):
    """SETR's naive head: one projection, four times larger."""

    def __init__(self, index: int) -> None:
        super().__init__(256, _CLASSES)
        self.index = index
        self.norm = nn.LayerNorm(1024)
        self.conv = ConvBlock(1024, 256)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits."""
        x = features[self.index]
        size = (x.size(2), x.size(3))
        normed = to_map(self.norm(x.flatten(2).transpose(1, 2)), size)
        return self.classify(F.interpolate(self.conv(normed), scale_factor=4.0, mode="bilinear"))


class ConvNeXtBlock(nn.Module):
    """A ConvNeXt block, its pointwise part on channels-last tensors."""

    def __init__(self, width: int, path: float) -> None:
        super().__init__()
        self.path = path
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        out = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + drop_path(out.mul(self.gamma.view(1, -1, 1, 1)), self.training, self.path)


class ConvNeXt(nn.Module):
    """ConvNeXt-S: features of its four stages."""

    def __init__(self) -> None:
        super().__init__()
        widths, depths = (96, 192, 384, 768), (3, 3, 27, 3)
        self.downs = nn.ModuleList([nn.Conv2d(3, 96, 4, 4)])
        self.downs.extend(nn.Conv2d(a, b, 2, 2) for a, b in pairwise(widths))
        self.down_norms = nn.ModuleList(nn.LayerNorm(w) for w in (96, 96, 192, 384))
        rates = iter(torch.linspace(0, 0.3, sum(depths), device="cpu").tolist())
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(w, next(rates)) for _ in range(d)))
            for w, d in zip(widths, depths, strict=True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in widths)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the features of the four stages."""
        features = []
        for i, stage in enumerate(self.stages):
            # The first norm follows the first convolution; the others come before theirs.
            x = (
                _norm_map(self.down_norms[i], self.downs[i](x))
                if i == 0
                else self.downs[i](_norm_map(self.down_norms[i], x))
            )
            x = stage(x)
            features.append(_norm_map(self.norms[i], x))
        return features


def _norm_map(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()
    return normed


def segformer(depths: tuple[int, ...]) -> Segmenter:
    """Return SegFormer with an encoder of these depths."""
    return Segmenter(MixTransformer(depths), [SegFormerHead()])


def upernet_vit(neck: bool) -> Segmenter:
    """Return UPerNet over ViT-B, with or without the multi-level neck."""
    heads: list[Head] = [UPerHead([768] * 4, 512, _CLASSES), FCNHead(3, 768, 256, _CLASSES, convs=1, concat=False)]
    backbone = ViT(768, 12, 12, (2, 5, 8, 11), 0.0)
    return Segmenter(backbone, heads, MultiLevelNeck(768) if neck else None)


def upernet_convnext() -> Segmenter:
    """Return UPerNet over ConvNeXt-S."""
    widths = [96, 192, 384, 768]
    heads: list[Head] = [UPerHead(widths, 512, _CLASSES), FCNHead(2, 384, 256, _CLASSES, convs=1, concat=False)]
    return Segmenter(ConvNeXt(), heads)


def setr() -> Segmenter:
    """Return SETR over ViT-L, with its three auxiliary heads."""
    return Segmenter(ViT(1024, 24, 16, (9, 14, 19, 23), 0.1), [SETRHead(3), SETRHead(0), SETRHead(1), SETRHead(2)])


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the ADE20K models."""
    made: dict[str, tuple[Callable[[], Segmenter], int, str]] = {
        "segformer-mit-b2512x5122": (partial(segformer, (3, 4, 6, 3)), 512, "adamw"),
        "segformer-mit-b5512x5122": (partial(segformer, (3, 6, 40, 3)), 512, "adamw"),
        "segformer-mit-b5640x6402": (partial(segformer, (3, 6, 40, 3)), 640, "adamw"),
        "upernet-vit-b-mln512x5122": (partial(upernet_vit, True), 512, "adamw"),
        "upernet-deit-b512x5122": (partial(upernet_vit, False), 512, "adamw"),
        "upernet-convnext-s512x5122": (upernet_convnext, 512, "adamw"),
        "setr-naive-vit-l512x5122": (setr, 512, "sgd"),
    }
    return {
        f"mmseg-ade-{case}": Recipe(
            partial(
                segmentation,
                build,
                classes=_CLASSES,
                size=(size, size),
                optimizer=optimizer,
                fp16="convnext" in case,
                name=case,
            ),
            2,
            options={"cudnn_benchmark": False, "doubt": f"{DOUBT}; {_DOUBT}"},
        )
        for case, (build, size, optimizer) in made.items()
    }
