"""Image classifiers of timm: GPUMemNet's and torchao's.

GPUMemNet's 5,085 runs (tier C) say neither optimizer nor precision; timm's script defaults are taken (SGD with
momentum, fp32), so they are for slopes and order only. torchao's ViT-g (benchmarks/benchmark_low_bit_adam.py):
weights, gradients and moments in bf16, checkpointed blocks, fused AdamW, 45 classes, crops of 224 whatever the
model's default, and `max_memory_allocated() / 1e9` printed with two decimals. Its ViT-H: weights in fp32, bf16
autocast, the model compiled as a whole, optimizers of 8 and 4 bits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import batchwright as bw
from gpu_cases.optimizers_of_the_time import AdamOfFewBits, StateElsewhere
from gpu_cases.outside_packages import timm
from gpu_cases.recipes import Recipe
from gpu_cases.torchvision_cnns import classification_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SANITY_ONLY = {
    "device_holds": "reserved and context",
    "context_from": ("gpumemnet-timm-vit_base_patch16_224-bs32",),
    "cudnn_benchmark": True,
    "doubt": "optimizer, precision and cudnn.benchmark are timm's defaults, not stated: sanity only",
}
_XCEPTION = {
    "is_conv_net": True,
    "device_holds": "reserved and context",
    "context_from": ("gpumemnet-timm-vit_base_patch16_224-bs32",),
    "doubt": "cudnn.benchmark is not stated; timm's xception is its legacy_xception of today",
}

# Blocks as they were in 2024: bitsandbytes' 0.43, torchao's prototype and lpmm.
_FEW_BITS = {
    "bitsandbytes-8-bit-adamw": partial(AdamOfFewBits, bits=8, block=2048),
    "torchao-8-bit-adamw": partial(AdamOfFewBits, bits=8, block=2048),
    "lpmm-4-bit-adamw": partial(AdamOfFewBits, bits=4, block=128),
    "lpmm-4-bit-adamw-rank-1-norm": partial(AdamOfFewBits, bits=4, block=128, scales_by_rank_one=True),
}

_SIZES = (
    ("resnet50", 32),
    ("resnet50", 64),
    ("resnet18", 64),
    ("vit_base_patch16_224", 8),
    ("vit_base_patch16_224", 32),
    ("vit_base_patch16_224", 64),
    ("vit_base_patch16_224", 128),
    ("vit_small_patch16_224", 64),
    ("vit_large_patch16_224", 32),
    ("convnext_tiny", 64),
    ("regnety_032", 64),
)


def recipes() -> dict[str, Recipe]:
    """Return the recipes of both sources."""
    made = {
        f"gpumemnet-timm-{model}-bs{batch}": Recipe(
            partial(classifier, model, 224, momentum), batch, options=_SANITY_ONLY
        )
        for model, batch in _SIZES
    }
    # Resize(256) and a crop of 224, although the model's own size is 299.
    made["gpumemnet-xception-timm-bs128"] = Recipe(
        partial(classifier, "legacy_xception", 224, adam), 128, options=_XCEPTION
    )
    made["ao-vitg-torch-adam-no-offload"] = Recipe(partial(_vit_giant, fused_adamw), 32)
    made["ao-vitg-torchao-cpuoffloadoptimizer"] = Recipe(
        partial(_vit_giant, StateElsewhere),
        32,
        options={"doubt": "the offloading optimizer's own streams are not modelled: state on the host, step in place"},
    )
    for name, optimizer in _FEW_BITS.items():
        made[f"ao-vith-{name}"] = Recipe(partial(_vit_huge, optimizer), 8)
    return made


def momentum(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return timm's default optimizer: SGD with Nesterov momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=2e-5)


def adam(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return torch's Adam."""
    return torch.optim.Adam(params)


def fused_adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return torch's AdamW in one kernel, without temporaries."""
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0, fused=True)


def classifier(model: str, image: int, optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> bw.Workload:
    """Return a timm model trained on ImageNet's classes in fp32."""
    return bw.Workload(
        model=lambda: timm().create_model(model, pretrained=False, num_classes=1000),
        batch=lambda n: {"images": torch.randn(n, 3, image, image), "labels": torch.randint(0, 1000, (n,))},
        loss=classification_loss,
        optimizer=optimizer,
        name=model,
    )


def _vit_giant(optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> bw.Workload:
    def build() -> torch.nn.Module:
        model = timm().create_model("vit_giant_patch14_dinov2", pretrained=False, num_classes=45, img_size=224)
        model.set_grad_checkpointing()
        return model.bfloat16()  # type: ignore[no-any-return]

    return bw.Workload(
        model=build,
        batch=lambda n: {
            "images": torch.randn(n, 3, 224, 224, dtype=torch.bfloat16),
            "labels": torch.randint(0, 45, (n,)),
        },
        loss=classification_loss,
        optimizer=optimizer,
        name="vit_giant_patch14_dinov2",
    )


def _vit_huge(optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> bw.Workload:
    def build() -> torch.nn.Module:
        model = timm().create_model("vit_huge_patch14_224", pretrained=False, num_classes=45)
        model.compile(fullgraph=True)
        return model  # type: ignore[no-any-return]

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return classification_loss(model, batch)

    return bw.Workload(
        model=build,
        batch=lambda n: {"images": torch.randn(n, 3, 224, 224), "labels": torch.randint(0, 45, (n,))},
        loss=loss,
        optimizer=lambda params: optimizer(params),
        name="vit_huge_patch14_224",
    )
