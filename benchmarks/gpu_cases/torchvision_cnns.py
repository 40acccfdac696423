"""Image classifiers of torchvision: xMem's runs on two small cards, GPUMemNet's on an A100.

xMem (perf_estimator/trainer/train_loop.py in its repository): fp32, eager, `CrossEntropyLoss`, three iterations over
CIFAR-10 resized to 86x86, `optimizer.zero_grad()` at the start of an iteration (mode 0) or between forward and
backward (mode 1), optimizers with their defaults. A class head of ten only where the case says so; torchvision's
1,000 otherwise. GPUMemNet (Test_Pipeline/cnn_models): fp32, Adam, ImageNet crops; whether cudnn.benchmark was on is
not said there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import batchwright as bw
from gpu_cases.optimizers_of_the_time import forget_gradients, keeping_gradients_until_backward
from gpu_cases.outside_packages import torchvision_models
from gpu_cases.recipes import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

# Three iterations were run; the third allocates what the second did.
_XMEM = {"steps": 3, "is_conv_net": True, "device_holds": "reserved and context", "cudnn_benchmark": False}
_GPUMEMNET = {
    "is_conv_net": True,
    "device_holds": "reserved and context",
    "context_from": ("gpumemnet-timm-vit_base_patch16_224-bs32",),
    "doubt": "cudnn.benchmark is not stated; sampled by nvidia-smi, so a short peak may be missed",
}

# case: model, classes, optimizer, batch
_XMEM_CASES: dict[str, tuple[str, int, str, int]] = {
    "xmem-06": ("mnasnet1_0", 10, "AdamW", 400),
    "xmem-07": ("mnasnet1_0", 10, "RMSprop", 400),
    "xmem-08": ("mnasnet1_0", 10, "SGD", 700),
    "xmem-09": ("mobilenet_v3_large", 10, "AdamW", 500),
    "xmem-10": ("mobilenet_v2", 1000, "AdamW", 251),
    "xmem-14": ("regnet_y_400mf", 1000, "SGD", 503),
    "xmem-19": ("vgg16", 1000, "SGD", 684),
    "xmem-20": ("vgg19", 1000, "AdamW", 377),
    "xmem-21": ("mobilenet_v3_small", 10, "AdamW", 553),
    "xmem-22": ("mobilenet_v3_small", 10, "SGD", 258),
}


def recipes() -> dict[str, Recipe]:
    """Return the recipes of both sources."""
    made = {
        case: Recipe(partial(classifier, model, classes, 86, optimizer), batch, options=_XMEM)
        for case, (model, classes, optimizer, batch) in _XMEM_CASES.items()
    }
    made["xmem-24"] = Recipe(_zero_grad_before_backward, 209, options=_XMEM)
    for model, image, batch in (("mobilenet_v2", 224, 32), ("mobilenet_v2", 224, 128), ("efficientnet_b0", 224, 128)):
        build = partial(classifier, model, 1000, image, "Adam")
        made[f"gpumemnet-{model}-bs{batch}"] = Recipe(build, batch, options=_GPUMEMNET)
    for batch in (32, 128):
        # Without its auxiliary head; its initialization is slow and changes nothing here.
        build = partial(classifier, "inception_v3", 1000, 299, "Adam", aux_logits=False, init_weights=False)
        made[f"gpumemnet-inception_v3-aux_logits-false-bs{batch}"] = Recipe(build, batch, options=_GPUMEMNET)
    return made


def classifier(model: str, classes: int, image: int, optimizer: str, **changes: Any) -> bw.Workload:
    """Return a torchvision model trained as a classifier in fp32."""
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, optimizer)
    return bw.Workload(
        model=lambda: getattr(torchvision_models(), model)(weights=None, num_classes=classes, **changes),
        batch=lambda n: {"images": torch.randn(n, 3, image, image), "labels": torch.randint(0, classes, (n,))},
        loss=classification_loss,
        optimizer=lambda params: make(params, lr=1e-3),
        name=model,
    )


def classification_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy of a batch of images."""
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


def _zero_grad_before_backward() -> bw.Workload:
    """Return the one run in mode 1: the gradients of a step live until the next one's backward."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = classification_loss(model, batch)
        forget_gradients(model)
        return value

    usual = classifier("convnext_base", 1000, 86, "Adam")
    adam = keeping_gradients_until_backward(torch.optim.Adam)
    return bw.Workload(
        model=usual.model,
        batch=usual.batch,
        loss=loss,
        optimizer=lambda params: adam(params, lr=1e-3),
        name="convnext_base",
    )
