"""One-stage detectors on COCO: MMDetection's RetinaNets and detectron2's RPN, at the largest batch of an epoch.

Eight V100s, two images each, SGD with momentum, DistributedDataParallel. Images are resized to 1333x800 by keeping
their ratio (shorter side up to 800 in detectron2) and padded to a multiple of 32, so the largest batch is two of
800x1344: COCO has thousands of such images, and batches are grouped by ratio. What boxes are in them changes labels
and not sizes. BatchNorm runs on its kept statistics (in MMDetection its weights are trained, in detectron2 nothing of
it is); the stem and the first stage are frozen.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw
from gpu_cases.optimizers_of_the_time import zeroing_in_place
from gpu_cases.outside_packages import torchvision_models
from gpu_cases.recipes import Recipe

_HEIGHT, _WIDTH = 800, 1344
_WIDE = 256
_DOUBT = "the largest image of an epoch taken as 800x1344; how anchors are matched to boxes, many or few, is left out"
_OPTIONS = {"devices": 8, "cudnn_benchmark": False, "doubt": _DOUBT}


def recipes() -> dict[str, Recipe]:
    """Return the recipes of both sources."""
    made = {
        f"mmdet-retinanet-{case}": Recipe(partial(detection, name, anchors=9, outputs=80), 2, options=_OPTIONS)
        for case, name in (("r-18-fpnfp32", "resnet18"), ("r-50-fpnfp32", "resnet50"))
    }
    made["d2-rpn-r50-fpn"] = Recipe(partial(detection, "resnet50", anchors=3, outputs=1, first=2), 2, options=_OPTIONS)
    return made


class Backbone(nn.Module):
    """A ResNet that runs BatchNorm on its kept statistics, with its first two parts frozen."""

    def __init__(self, name: str, *, norm_is_trained: bool) -> None:
        super().__init__()
        models = torchvision_models()
        norm: Any = nn.BatchNorm2d if norm_is_trained else import_module("torchvision.ops.misc").FrozenBatchNorm2d
        self.body = getattr(models, name)(weights=None, norm_layer=norm)
        del self.body.fc
        for part in (self.body.conv1, self.body.bn1, self.body.layer1):
            part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the features of the four stages."""
        for module in self.body.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        body = self.body
        x = body.maxpool(body.relu(body.bn1(body.conv1(x))))
        features = []
        for stage in (body.layer1, body.layer2, body.layer3, body.layer4):
            x = stage(x)
            features.append(x)
        return features


class Detector(nn.Module):
    """A feature pyramid from a stage on, and one head for all of its levels."""

    def __init__(self, name: str, anchors: int, outputs: int, first: int) -> None:
        super().__init__()
        self.first, self.outputs = first, outputs
        self.backbone = Backbone(name, norm_is_trained=first == 3)
        widths = (64, 128, 256, 512) if name == "resnet18" else (256, 512, 1024, 2048)
        self.lateral = nn.ModuleList(nn.Conv2d(width, _WIDE, 1) for width in widths[first - 2 :])
        self.smooth = nn.ModuleList(nn.Conv2d(_WIDE, _WIDE, 3, padding=1) for _ in widths[first - 2 :])
        # RetinaNet makes its two coarsest levels by strided convolutions, an RPN its one by pooling.
        extra = 2 if first == 3 else 0
        sources = (widths[-1], _WIDE)
        self.extra = nn.ModuleList(nn.Conv2d(sources[i], _WIDE, 3, stride=2, padding=1) for i in range(extra))
        self.towers = nn.ModuleList(_tower(4 if first == 3 else 1) for _ in range(2 if first == 3 else 1))
        kernel = 3 if first == 3 else 1
        self.classes = nn.Conv2d(_WIDE, anchors * outputs, kernel, padding=kernel // 2)
        self.boxes = nn.Conv2d(_WIDE, anchors * 4, kernel, padding=kernel // 2)

    def forward(self, images: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return class scores and boxes of every level."""
        features = self.backbone(images)[self.first - 2 :]
        levels = [lateral(x) for lateral, x in zip(self.lateral, features, strict=True)]
        for finer, coarser in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
            finer += F.interpolate(coarser, size=finer.shape[2:], mode="nearest")
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=True)]
        last = features[-1]
        for number, conv in enumerate(self.extra):
            last = conv(last if number == 0 else last.relu())
            levels.append(last)
        if not self.extra:
            levels.append(F.max_pool2d(levels[-1], 1, stride=2))
        return [(self.classes(self.towers[0](x)), self.boxes(self.towers[-1](x))) for x in levels]


def _tower(depth: int) -> nn.Sequential:
    return nn.Sequential(
        *(part for _ in range(depth) for part in (nn.Conv2d(_WIDE, _WIDE, 3, padding=1), nn.ReLU(inplace=True)))
    )


def detection(name: str, *, anchors: int, outputs: int, first: int = 3) -> bw.Workload:
    """Return a rank's step of a detector; `first` is the finest stage of its pyramid."""

    def loss(model: Any, images: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for scores, boxes in model(images):
            # One row per anchor, written out; a weight for each; boxes count by their absolute difference.
            flat = scores.permute(0, 2, 3, 1).reshape(-1, outputs)
            weights = torch.ones(flat.size(0), device="cuda")
            labels = torch.zeros_like(flat)
            each = F.binary_cross_entropy_with_logits(flat, labels, reduction="none")
            total = total + (each * weights[:, None]).sum()
            offsets = boxes.permute(0, 2, 3, 1).reshape(-1, 4)
            total = total + ((offsets - torch.zeros_like(offsets)).abs() * weights[:, None]).sum()
        return total

    return bw.Workload(
        model=lambda: Detector(name, anchors, outputs, first),
        batch=lambda n: torch.randn(n, 3, _HEIGHT, _WIDTH),
        loss=loss,
        optimizer=lambda params: zeroing_in_place(torch.optim.SGD)(
            [p for p in params if p.requires_grad], lr=0.01, momentum=0.9, foreach=False
        ),
        wrap=lambda model: DistributedDataParallel(model),
        name=name,
    )
