"""What else of torch speaks for a CUDA library that is not there: versions, cuDNN, NCCL, `torch.accelerator`.

Promises:
- versions are those of a usual build, and read the same for every card;
- a function of `torch.cuda` that would ask the library for something nobody answers is refused by its name.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from batchwright.errors import CannotTraceError
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

# The build whose wheels run on every card of the catalogue, from Volta to Blackwell.
_CUDA, _CUDNN, _NCCL = "12.8", 91002, (2, 27, 5)
_MODULES = ("torch.cuda", "torch.cuda.memory", "torch.cuda.random", "torch.cuda.nccl")
_ASKS_LIBRARY = ("_cuda_", "_nccl_")
_ASKS_DRIVER = ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage", "list_gpu_processes")
_BELONG_TO_LIBRARY = ("MemPool", "CUDAPluggableAllocator", "_dump_snapshot", *_ASKS_DRIVER)


def library_answers(cuda: Mapping[str, Any]) -> Iterator[Patch]:
    """Have torch speak of a CUDA build; of what `cuda` answers for torch.cuda, torch.accelerator answers its part."""
    cudnn: Any = torch.backends.cudnn
    yield Patch(torch.version, "cuda", _CUDA)
    yield Patch(cudnn, "version", lambda: _CUDNN)
    yield Patch(cudnn, "is_available", lambda: True)
    # Asked by RNNs before they lay their weights out anew, in memory that has to be real.
    yield Patch(cudnn, "is_acceptable", lambda tensor: False)
    for name, answer in (("get", lambda: 10), ("set", lambda limit: None)):
        yield Patch(torch._C, f"_cuda_{name}_cudnn_benchmark_limit", answer)
    yield Patch(torch.cuda.nccl, "version", lambda: _NCCL)
    yield from (*_of_accelerator(cuda), *_refusals(cuda))


def _of_accelerator(cuda: Mapping[str, Any]) -> Iterator[Patch]:
    accelerator: Any = torch.accelerator
    told = {
        **cuda,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "empty_host_cache": lambda: None,
        **dict.fromkeys(("current_device_index", "current_device_idx"), cuda["current_device"]),
        **dict.fromkeys(("set_device_index", "set_device_idx"), cuda["set_device"]),
        "device_index": cuda["device"],
    }
    # What a card is capable of is put in other words there.
    del told["get_device_capability"]
    for place in (accelerator, getattr(accelerator, "memory", None)):
        yield from (Patch(place, name, answer) for name, answer in told.items() if place and name in vars(place))


def _refusals(answered: Container[str]) -> Iterator[Patch]:
    for place in map(import_module, _MODULES):
        for name, value in vars(place).items():
            is_public = not name.startswith("_") and inspect.isfunction(value) and _asks_library(value)
            is_answered = name in answered or (place is torch.cuda.nccl and name == "version")
            if (is_public or name in _BELONG_TO_LIBRARY) and not is_answered:
                yield Patch(place, name, _refusal(f"torch.cuda.{name}"))


def _asks_library(function: Callable[..., Any]) -> bool:
    code: Any = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any(name.startswith(_ASKS_LIBRARY) for name in code.co_names)


def _refusal(called: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise CannotTraceError(
            f"{called} asks the CUDA library or the driver, and this card is simulated.",
            remedy="leave that call out of the step that is traced",
        )

    return refuse
