"""Operators that CUDA runs as one kernel, and that torch takes apart on a device it does not know.

Taken apart, their temporaries would be counted: the backward of SiLU alone would hold four more tensors of its size.
torch's own table of operators (native_functions.yaml) tells which they are: those with a kernel for CUDA beside one
made of other operators that autograd follows.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from batchwright.simulated.backend import simulated_device

_FUSED_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
_registered: list[torch.library.Library] = []


def register_fused_operators() -> None:
    """Have the simulated device own these operators, once per process."""
    if _registered:
        return
    simulated_device()
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in _FUSED_ON_CUDA:
        library.impl(name, _computes_nothing)
    _registered.append(library)


def _computes_nothing(*args: Any, **options: Any) -> NoReturn:
    raise AssertionError("a fake tensor answers before any kernel of the simulated device is asked")
