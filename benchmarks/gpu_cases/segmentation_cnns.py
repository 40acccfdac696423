"""MMSegmentation's convolutional models on Cityscapes: FCN, PSPNet, DeepLabV3(+), UNet (configs/*/README.md).

Four V100s, two crops each (four for UNet), SGD with momentum. "D8": the last two stages keep their resolution and are
dilated instead, the first block of a stage by half. ResNets have the stem of three small convolutions (V1c).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpu_cases.recipes import Recipe
from gpu_cases.segmentation_parts import DOUBT, ConvBlock, FCNHead, Head, PSPHead, Segmenter, segmentation

if TYPE_CHECKING:
    from collections.abc import Callable

_CLASSES = 19
_OPTIONS = {"cudnn_benchmark": False, "doubt": DOUBT}


class Bottleneck(nn.Module):
    """A ResNet block, with the stride on its 3x3."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            ConvBlock(inputs, width),
            ConvBlock(width, width, 3, stride=stride, dilation=dilation),
            ConvBlock(width, 4 * width, act=None),
        )
        self.shortcut = (
            ConvBlock(inputs, 4 * width, stride=stride, act=None)
            if stride > 1 or inputs != 4 * width
            else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        out = self.body(x)
        out += self.shortcut(x)
        activated: torch.Tensor = self.relu(out)
        return activated


class DilatedResNet(nn.Module):
    """ResNet V1c with an output stride of eight."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvBlock(3, 32, 3, stride=2), ConvBlock(32, 32, 3), ConvBlock(32, 64, 3), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.ModuleList()
        inputs = 64
        for depth, width, stride, dilation in zip(depths, (64, 128, 256, 512), (1, 2, 1, 1), (1, 1, 2, 4), strict=True):
            blocks = [Bottleneck(inputs, width, stride, max(dilation // 2, 1))]
            blocks += [Bottleneck(4 * width, width, 1, dilation) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(*blocks))
            inputs = 4 * width

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the features of the four stages."""
        x = self.stem(x)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class _ClampInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        clamped = torch.clamp_(x, 0.0, 6.0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(clamped)
        return clamped

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (clamped,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(gradient, clamped, 0.0, 6.0)  # type: ignore[no-any-return]


class ReLU6(nn.Module):
    """ReLU6 in place, whose backward reads its result, as in torch 1.x; today's keeps a copy of its input."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        assert inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, clamped."""
        clamped: torch.Tensor = _ClampInPlace.apply(x)  # type: ignore[no-untyped-call]
        return clamped


class InvertedResidual(nn.Module):
    """A MobileNetV2 block."""

    def __init__(self, inputs: int, outputs: int, stride: int, dilation: int, expand: int) -> None:
        super().__init__()
        self.adds = stride == 1 and inputs == outputs
        hidden = inputs * expand
        layers = [] if expand == 1 else [ConvBlock(inputs, hidden, act=ReLU6)]
        layers.append(ConvBlock(hidden, hidden, 3, stride=stride, dilation=dilation, groups=hidden, act=ReLU6))
        self.conv = nn.Sequential(*layers, ConvBlock(hidden, outputs, act=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        out: torch.Tensor = self.conv(x)
        return x + out if self.adds else out


class DilatedMobileNetV2(nn.Module):
    """MobileNetV2 with an output stride of eight; features of stages 1, 2, 4 and 6."""

    _STAGES = (
        (1, 16, 1, 1, 1),
        (6, 24, 2, 2, 1),
        (6, 32, 3, 2, 1),
        (6, 64, 4, 1, 2),
        (6, 96, 3, 1, 2),
        (6, 160, 3, 1, 4),
        (6, 320, 1, 1, 4),
    )

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBlock(3, 32, 3, stride=2, act=ReLU6)
        self.stages = nn.ModuleList()
        inputs = 32
        for expand, outputs, depth, stride, dilation in self._STAGES:
            blocks = []
            for number in range(depth):
                blocks.append(InvertedResidual(inputs, outputs, stride if number == 0 else 1, dilation, expand))
                inputs = outputs
            self.stages.append(nn.Sequential(*blocks))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the features of four stages."""
        x = self.stem(x)
        features = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number in (1, 2, 4, 6):
                features.append(x)
        return features


def separable(inputs: int, outputs: int, dilation: int = 1) -> nn.Module:
    """Return a depthwise and a pointwise convolution."""
    return nn.Sequential(ConvBlock(inputs, inputs, 3, dilation=dilation, groups=inputs), ConvBlock(inputs, outputs))


class ASPPHead(Head):
    """Dilated convolutions side by side; with `skip`, DeepLabV3+: separable ones and early features joined."""

    def __init__(self, inputs: int, channels: int, classes: int, *, skip: int = 0) -> None:
        super().__init__(channels, classes)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvBlock(inputs, channels))
        self.branches = nn.ModuleList([ConvBlock(inputs, channels)])
        for dilation in (12, 24, 36):
            wide = ConvBlock(inputs, channels, 3, dilation=dilation)
            self.branches.append(separable(inputs, channels, dilation) if skip else wide)
        self.bottleneck = ConvBlock(5 * channels, channels, 3)
        self.skip = ConvBlock(skip, 48) if skip else None
        self.join = nn.Sequential(separable(channels + 48, channels), separable(channels, channels)) if skip else None

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits."""
        x = features[-1]
        outs = [self.resize(self.pool(x), x), *(branch(x) for branch in self.branches)]
        out = self.bottleneck(torch.cat(outs, dim=1))
        if self.skip is not None and self.join is not None:
            early = self.skip(features[0])
            out = self.join(torch.cat([self.resize(out, early), early], dim=1))
        return self.classify(out)


def double_conv(inputs: int, outputs: int) -> nn.Module:
    """Return UNet's two convolutions."""
    return nn.Sequential(ConvBlock(inputs, outputs, 3), ConvBlock(outputs, outputs, 3))


class UNet(nn.Module):
    """UNet of five stages; upsampling by interpolation and a 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 * 2**i for i in range(5)]
        self.encoder = nn.ModuleList(double_conv(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), ConvBlock(2 * w, w))
            for w in widths[:-1]
        )
        self.decoder = nn.ModuleList(double_conv(2 * w, w) for w in widths[:-1])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the features from the deepest to the full resolution."""
        skips = []
        for number, stage in enumerate(self.encoder):
            x = stage(x if number == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        outs = [x]
        for number in reversed(range(4)):
            x = self.decoder[number](torch.cat([skips[number], self.up[number](x)], dim=1))
            outs.append(x)
        return outs


def resnet_segmenter(depths: tuple[int, ...], head: str, align: bool) -> Segmenter:
    """Return a dilated ResNet with a head and the auxiliary one on its third stage."""
    decode: Head
    if head == "fcn":
        decode = FCNHead(3, 2048, 512, _CLASSES, convs=2, concat=True, align=align)
    else:
        decode = PSPHead(2048, 512, _CLASSES, align) if head == "psp" else ASPPHead(2048, 512, _CLASSES)
    auxiliary = FCNHead(2, 1024, 256, _CLASSES, convs=1, concat=False, align=align)
    return Segmenter(DilatedResNet(depths), [decode, auxiliary])


def mobilenet_segmenter(head: str) -> Segmenter:
    """Return a dilated MobileNetV2 with a head and the auxiliary one."""
    fcn = head == "fcn"
    decode = FCNHead(3, 320, 512, _CLASSES, convs=2, concat=True) if fcn else ASPPHead(320, 512, _CLASSES, skip=24)
    return Segmenter(DilatedMobileNetV2(), [decode, FCNHead(2, 96, 256, _CLASSES, convs=1, concat=False)])


def unet_segmenter() -> Segmenter:
    """Return UNet with its two small heads."""
    heads: list[Head] = [
        FCNHead(4, 64, 64, _CLASSES, convs=1, concat=False),
        FCNHead(3, 128, 64, _CLASSES, convs=1, concat=False),
    ]
    return Segmenter(UNet(), heads)


_R50, _R101 = (3, 4, 6, 3), (3, 4, 23, 3)
_WIDE, _SQUARE = (512, 1024), (769, 769)


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the Cityscapes models."""
    made: dict[str, tuple[Callable[[], Segmenter], tuple[int, int], int]] = {
        "fcn-r-50-d8512x1024fp32": (partial(resnet_segmenter, _R50, "fcn", False), _WIDE, 2),
        "fcn-r-101-d8512x1024fp32": (partial(resnet_segmenter, _R101, "fcn", False), _WIDE, 2),
        "fcn-r-50-d8769x769fp32": (partial(resnet_segmenter, _R50, "fcn", True), _SQUARE, 2),
        "pspnet-r-50-d8512x1024fp32": (partial(resnet_segmenter, _R50, "psp", False), _WIDE, 2),
        "pspnet-r-101-d8512x1024fp32": (partial(resnet_segmenter, _R101, "psp", False), _WIDE, 2),
        "pspnet-r-101-d8512x1024fp16-amp": (partial(resnet_segmenter, _R101, "psp", False), _WIDE, 2),
        "deeplabv3-r-101-d8512x1024fp32": (partial(resnet_segmenter, _R101, "aspp", False), _WIDE, 2),
        "fcn-m-v2-d8512x1024fp32": (partial(mobilenet_segmenter, "fcn"), _WIDE, 2),
        "deeplabv3-m-v2-d8512x1024fp32": (partial(mobilenet_segmenter, "aspp"), _WIDE, 2),
        "unet-s5-d16-fcn512x1024fp32": (unet_segmenter, _WIDE, 4),
    }
    return {
        f"mmseg-{case}": Recipe(
            partial(segmentation, build, classes=_CLASSES, size=size, optimizer="sgd", fp16="fp16" in case, name=case),
            batch,
            options=_OPTIONS,
        )
        for case, (build, size, batch) in made.items()
    }
