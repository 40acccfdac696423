"""What MMSegmentation's models share: conv blocks, decode heads, the loss, and the step around them.

Read from its configs of 2020-2022: every head's logits are resized to the labels and given a cross entropy without
reduction; the auxiliary head counts 0.4. Each rank runs two images under DistributedDataParallel, whose buckets hold a
second copy of the gradients; SyncBN keeps what BatchNorm keeps. torch 1.x: optimizers go parameter by parameter and
gradients are set to zero in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import batchwright as bw
from gpu_cases.operators_of_the_time import softmax_before_1_11
from gpu_cases.optimizers_of_the_time import zeroing_in_place

if TYPE_CHECKING:
    from collections.abc import Callable

DOUBT = "GB may be MiB / 1000 or MiB / 1024; torch 1.x traced with today's; collectives' own buffers are not traced"


class ConvBlock(nn.Sequential):
    """Convolution, BatchNorm and an activation in place."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        act: Any = nn.ReLU,
    ) -> None:
        padding = dilation * (kernel // 2)
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False), nn.BatchNorm2d(outputs)
        )
        if act is not None:
            self.append(act(inplace=True))


class Head(nn.Module):
    """What every decode head ends with: dropout of whole channels and a classifier per pixel."""

    def __init__(self, channels: int, classes: int, align: bool = False) -> None:
        super().__init__()
        self.align = align
        self.dropout = nn.Dropout2d(0.1)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def classify(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of features."""
        logits: torch.Tensor = self.conv_seg(self.dropout(x))
        return logits

    def resize(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return features at the size of others."""
        return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=self.align)


class FCNHead(Head):
    """A few convolutions; the input joins their output where asked."""

    def __init__(
        self, index: int, inputs: int, channels: int, classes: int, *, convs: int, concat: bool, align: bool = False
    ) -> None:
        super().__init__(channels, classes, align)
        self.index = index
        self.convs = nn.Sequential(*(ConvBlock(inputs if i == 0 else channels, channels, 3) for i in range(convs)))
        self.conv_cat = ConvBlock(inputs + channels, channels, 3) if concat else None

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits."""
        x = features[self.index]
        out = self.convs(x)
        if self.conv_cat is not None:
            out = self.conv_cat(torch.cat([x, out], dim=1))
        return self.classify(out)


class Pyramid(nn.ModuleList):
    """Pooling at four scales, each projected and resized back."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__(nn.Sequential(nn.AdaptiveAvgPool2d(s), ConvBlock(inputs, channels)) for s in (1, 2, 3, 6))

    def forward(self, x: torch.Tensor, align: bool) -> list[torch.Tensor]:
        """Return the four, at the input's size."""
        return [F.interpolate(pool(x), size=x.shape[2:], mode="bilinear", align_corners=align) for pool in self]


class PSPHead(Head):
    """Pyramid pooling."""

    def __init__(self, inputs: int, channels: int, classes: int, align: bool = False) -> None:
        super().__init__(channels, classes, align)
        self.pyramid = Pyramid(inputs, channels)
        self.bottleneck = ConvBlock(inputs + 4 * channels, channels, 3)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits."""
        x = features[-1]
        return self.classify(self.bottleneck(torch.cat([x, *self.pyramid(x, self.align)], dim=1)))


class UPerHead(Head):
    """Pyramid pooling on the last features, a feature pyramid over all four."""

    def __init__(self, inputs: list[int], channels: int, classes: int) -> None:
        super().__init__(channels, classes)
        self.pyramid = Pyramid(inputs[-1], channels)
        self.bottleneck = ConvBlock(inputs[-1] + 4 * channels, channels, 3)
        self.laterals = nn.ModuleList(ConvBlock(width, channels) for width in inputs[:-1])
        self.smooth = nn.ModuleList(ConvBlock(channels, channels, 3) for _ in inputs[:-1])
        self.fuse = ConvBlock(len(inputs) * channels, channels, 3)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits."""
        levels = [lateral(x) for lateral, x in zip(self.laterals, features, strict=False)]
        last = features[-1]
        levels.append(self.bottleneck(torch.cat([last, *self.pyramid(last, False)], dim=1)))
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + self.resize(levels[i], levels[i - 1])
        outs = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=False)] + [levels[-1]]
        outs[1:] = [self.resize(out, outs[0]) for out in outs[1:]]
        return self.classify(self.fuse(torch.cat(outs, dim=1)))


class Segmenter(nn.Module):
    """A backbone, its neck, and heads, the first of which counts fully."""

    buckets: torch.Tensor

    def __init__(self, backbone: nn.Module, heads: list[Head], neck: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone, self.heads = backbone, nn.ModuleList(heads)
        self.neck = neck or nn.Identity()
        # DistributedDataParallel's buckets: as many elements as there are gradients, held throughout.
        self.register_buffer("buckets", torch.empty(sum(p.numel() for p in self.parameters())), persistent=False)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of every head."""
        features = self.neck(self.backbone(images))
        return [head(features) for head in self.heads]


def segmentation(
    build: Callable[[], Segmenter],
    *,
    classes: int,
    size: tuple[int, int],
    optimizer: str,
    fp16: bool = False,
    name: str,
) -> bw.Workload:
    """Return a segmentation step on crops of one size."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if not fp16:
            return _loss(model, batch)
        with torch.autocast("cuda", dtype=torch.float16):
            return _loss(model, batch)

    return bw.Workload(
        model=build,
        batch=lambda n: {"images": torch.randn(n, 3, *size), "labels": torch.randint(0, classes, (n, *size))},
        loss=loss,
        optimizer=sgd if optimizer == "sgd" else adamw,
        scaler=(lambda: torch.amp.GradScaler("cuda")) if fp16 else None,
        name=name,
    )


def sgd(params: Any) -> Any:
    """Return SGD with momentum, one parameter after the other."""
    kind = zeroing_in_place(torch.optim.SGD)
    return kind(params, lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=False)


def adamw(params: Any) -> Any:
    """Return AdamW, one parameter after the other."""
    return zeroing_in_place(torch.optim.AdamW)(params, lr=6e-5, weight_decay=0.01, foreach=False)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    total = torch.zeros((), device=batch["labels"].device)
    for number, (head, logits) in enumerate(zip(model.heads, model(batch["images"]), strict=True)):
        whole = F.interpolate(logits, size=batch["labels"].shape[1:], mode="bilinear", align_corners=head.align)
        of_classes = softmax_before_1_11(whole, 1, is_log=True)
        each = F.nll_loss(of_classes, batch["labels"], reduction="none", ignore_index=255)
        total = total + each.mean() * (1.0 if number == 0 else 0.4)
    return total
