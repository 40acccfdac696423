"""Image models of timm, torchvision and DeepLearningExamples, in the layout and precision of each source."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from gpu_cases.outside_packages import timm, torchvision_models
from torch import nn
from torch.nn import functional

import batchwright as bw

if TYPE_CHECKING:
    from step_cases.published import Row

_CLASSES = 1000


class LoopedSGD(torch.optim.SGD):
    """SGD as it was before torch 2.0: tensor by tensor, its gradients set to zero in place where `zeroes`."""

    def __init__(self, params: Any, *, momentum: float = 0.9, zeroes: bool = True) -> None:
        super().__init__(params, lr=1e-3, momentum=momentum, foreach=False)
        self.zeroes = zeroes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to zero as the torch of the time did."""
        zero_in_place(self) if self.zeroes else super().zero_grad(True)


def zero_in_place(optimizer: torch.optim.Optimizer) -> None:
    """Fill every gradient with zeros."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        parameter.grad.zero_()


class NoUpdate(torch.optim.Optimizer):
    """Forward and backward alone: nothing is updated; gradients are set to zero in place, or dropped."""

    def __init__(self, params: Any, *, zeroes: bool) -> None:
        super().__init__(params, {})
        self.zeroes = zeroes

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to zero, or drop them."""
        zero_in_place(self) if self.zeroes else super().zero_grad(True)


def _cast(precision: str) -> Any:
    if precision == "amp-fp16":
        return torch.autocast("cuda", torch.float16)
    return contextlib.nullcontext()


def classifier(row: Row) -> bw.Workload:
    """Return one of timm's, torchvision's or DeepLearningExamples' classifiers."""
    is_half = row.precision == "fp16"
    is_last = row.layout == "nhwc"

    def build() -> nn.Module:
        if row.source == "timm":
            model: nn.Module = timm().create_model(row.model, num_classes=_CLASSES)
        else:
            name = "resnet50" if row.model.startswith("ResNet50") else row.model
            model = getattr(torchvision_models(), name)()
        model = model.half() if is_half else model
        if is_last:
            in_layout: Any = model
            in_layout.to(memory_format=torch.channels_last)
        return model

    def batch(n: int) -> Any:
        images = torch.empty(n, 3, row.length, row.length, dtype=torch.float16 if is_half else torch.float32)
        if is_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, torch.zeros(n, dtype=torch.int64)

    def loss(model: nn.Module, data: Any) -> torch.Tensor:
        with _cast(row.precision):
            out = model(data[0])
            return functional.cross_entropy(out if isinstance(out, torch.Tensor) else out[0], data[1])

    def optimizer(params: Any) -> Any:
        return NoUpdate(params, zeroes=True) if row.source == "ryujaehun" else LoopedSGD(params)

    return bw.Workload(model=build, batch=batch, loss=loss, optimizer=optimizer, name=row.model)


_ANCHORS, _LABELS, _BOXES = (4, 6, 6, 6, 4, 4), 81, 8732
_MAPS = (1024, 512, 512, 256, 256, 256)


class SSD300(nn.Module):
    """SSD300 on ResNet50 up to its third stage, whose stride is taken out."""

    def __init__(self) -> None:
        super().__init__()
        whole = torchvision_models().resnet50()
        self.features = nn.Sequential(*list(whole.children())[:7])
        first: Any = next(iter(whole.layer3))
        for part in (first.conv2, first.downsample[0]):
            part.stride = (1, 1)
        self.further = nn.ModuleList(
            _further(inner, outer, between, strided=index < 3)
            for index, (inner, outer, between) in enumerate(
                zip(_MAPS[:-1], _MAPS[1:], (256, 256, 128, 128, 128), strict=True)
            )
        )
        heads = [(maps, count) for maps, count in zip(_MAPS, _ANCHORS, strict=True)]
        self.places = nn.ModuleList(nn.Conv2d(maps, 4 * count, 3, padding=1) for maps, count in heads)
        self.labels = nn.ModuleList(nn.Conv2d(maps, _LABELS * count, 3, padding=1) for maps, count in heads)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return places and labels of all boxes."""
        maps = [self.features(x)]
        for part in self.further:
            maps.append(part(maps[-1]))
        places = [head(m).reshape(len(m), 4, -1) for head, m in zip(self.places, maps, strict=True)]
        labels = [head(m).reshape(len(m), _LABELS, -1) for head, m in zip(self.labels, maps, strict=True)]
        return torch.cat(places, 2).contiguous(), torch.cat(labels, 2).contiguous()


def _further(inner: int, outer: int, between: int, *, strided: bool) -> nn.Sequential:
    last = nn.Conv2d(between, outer, 3, 2 if strided else 1, 1 if strided else 0, bias=False)
    return nn.Sequential(
        *(nn.Conv2d(inner, between, 1, bias=False), nn.BatchNorm2d(between), nn.ReLU(inplace=True)),
        *(last, nn.BatchNorm2d(outer), nn.ReLU(inplace=True)),
    )


def detector(row: Row) -> bw.Workload:
    """Return DeepLearningExamples' SSD300 with its loss over the hardest boxes."""

    def batch(n: int) -> Any:
        return torch.empty(n, 3, 300, 300), torch.zeros(n, 4, _BOXES), torch.zeros(n, _BOXES, dtype=torch.int64)

    def loss(model: nn.Module, data: Any) -> torch.Tensor:
        with _cast(row.precision):
            places, labels = model(data[0])
            mask = data[2] > 0
            number = mask.sum(dim=1)
            of_places = functional.smooth_l1_loss(places, data[1], reduction="none").sum(dim=1)
            of_places = (mask.float() * of_places).sum(dim=1)
            of_labels = functional.cross_entropy(labels, data[2], reduction="none")
            rank = of_labels.masked_fill(mask, 0).sort(dim=1, descending=True)[1].sort(dim=1)[1]
            chosen = rank < (3 * number).clamp(max=_BOXES).unsqueeze(-1)
            of_labels = (of_labels * (mask.float() + chosen.float())).sum(dim=1)
            total: torch.Tensor = ((of_places + of_labels) / number.float().clamp(min=1e-6)).mean()
            return total

    return bw.Workload(model=SSD300, batch=batch, loss=loss, optimizer=LoopedSGD, name="SSD300")
