"""torchvision, timm and torchao, taken from a folder of their own.

They are no dependency of the project, and torchvision's wheel for a GPU cannot load its operators beside a torch
without one. The models need none of these operators, so the package is put into a folder and imported without them:

    pip install --no-deps --target FOLDER torchvision==0.28.0 timm==1.0.30 torchao==0.18.0
    export BATCHWRIGHT_GPU_CASES=FOLDER

torchvision 0.28 goes with torch 2.13.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch

FOLDER_VARIABLE = "BATCHWRIGHT_GPU_CASES"

# The operators that torchvision gives fake versions to when it is imported; kept for as long as it is.
_DECLARED: list[torch.library.Library] = []


def torchvision_models() -> Any:
    """Return the module torchvision.models."""
    return _from_folder("torchvision.models")


def timm() -> Any:
    """Return the module timm."""
    _from_folder("torchvision.models")
    return _from_folder("timm")


def torchao_float8() -> Any:
    """Return the module torchao.float8."""
    return _from_folder("torchao.float8")


def _from_folder(module: str) -> Any:
    if module in sys.modules:
        return sys.modules[module]
    # First, because transformers looks for torchvision when it is imported and would use what it finds.
    import_module("transformers")
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and folder not in sys.path:
        # Last, so that nothing of the environment is hidden by it.
        sys.path.append(folder)
    if "torchvision" not in sys.modules and not _DECLARED:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
    try:
        return import_module(module)
    except ImportError as error:
        raise SystemExit(
            f"{module} is needed for these cases: {error}.\n"
            "  pip install --no-deps --target FOLDER torchvision==0.28.0 timm==1.0.30 torchao==0.18.0\n"
            f"  export {FOLDER_VARIABLE}=FOLDER"
        ) from error
