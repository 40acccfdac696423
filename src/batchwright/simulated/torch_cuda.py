"""What `torch.cuda` answers while a card is simulated: there is one, it is this one, and so much of it is taken.

Promises:
- questions (is there one, its name, its generation, what is taken) are answered for the simulated card;
- what only orders work in time (streams, events, synchronize) does nothing, what cannot be simulated (graphs) is
  refused;
- torch is as it was afterwards.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from batchwright.catalogue.gpus import context_of
from batchwright.errors import CannotTraceError
from batchwright.simulated.autocast import forget_casts
from batchwright.simulated.backend import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.catalogue.gpus import Card
    from batchwright.simulated.caching_allocator import CachingAllocator

_FIRST_WITH_BFLOAT16 = (8, 0)
_DOES_NOTHING = (
    *("synchronize", "set_device", "manual_seed", "manual_seed_all", "seed", "seed_all", "init", "_lazy_init"),
    *("ipc_collect", "set_stream", "set_rng_state", "set_per_process_memory_fraction"),
)
_SEEN_AS = torch.device("cuda", 0)


class _InOrder:
    """A stream or an event: there is only one order of things here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: True if name == "query" else 0.0 if name == "elapsed_time" else None

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_Generator: Any = torch.Generator


class _GeneratorOnHost(_Generator):  # type: ignore[misc]
    """Random numbers of a card that has none to draw: the generator is the host's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator.__new__(cls, "cpu" if str(device).startswith("cuda") else device)


class _Graph:
    """Refused: a class all the same, because type hints speak of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CannotTraceError(
            "the step records a CUDA graph, whose memory pools of its own are not simulated.",
            remedy="estimate the step without graphs; a graph keeps what it uses beside the rest",
        )


def answers(card: Card, allocator: CachingAllocator) -> dict[str, Any]:
    """Return what each name of `torch.cuda` stands for."""
    stats = allocator.stats
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.product,
        total_memory=card.total_bytes,
        major=major,
        minor=minor,
        multi_processor_count=card.num_sms,
        gcnArchName="",
    )
    return {
        **dict.fromkeys(_DOES_NOTHING, _nothing),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or (major, minor) >= _FIRST_WITH_BFLOAT16
        ),
        "get_device_name": lambda device=None: card.product,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "mem_get_info": lambda device=None: (_free(card, allocator), card.total_bytes),
        "memory_allocated": lambda device=None: stats.allocated.current,
        "max_memory_allocated": lambda device=None: stats.allocated.peak,
        "memory_reserved": lambda device=None: stats.reserved.current,
        "max_memory_reserved": lambda device=None: stats.reserved.peak,
        "memory_stats": lambda device=None: _memory_stats(allocator),
        "memory_summary": lambda device=None, abbreviated=False: _summary(card, allocator),
        "reset_peak_memory_stats": lambda device=None: allocator.reset_peaks(),
        "empty_cache": allocator.empty_cache,
        "Stream": _InOrder,
        "Event": _InOrder,
        "stream": _InOrder,
        "device": _InOrder,
        "current_stream": lambda device=None: _InOrder(),
        "default_stream": lambda device=None: _InOrder(),
        "CUDAGraph": _Graph,
        "graph": _Graph,
        "make_graphed_callables": _Graph,
    }


@contextmanager
def answering_for(card: Card, allocator: CachingAllocator) -> Iterator[None]:
    """Have torch answer for a card, and take it all back in the end."""
    with ExitStack() as stack:
        for name, answer in answers(card, allocator).items():
            for place in (torch.cuda, torch.cuda.memory):
                if hasattr(place, name):
                    stack.enter_context(patch.object(place, name, answer))
        for name in ("mark", "range", "range_pop", "range_push"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, _InOrder))
        stack.enter_context(patch.object(torch, "Generator", _GeneratorOnHost))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", _nothing))
        stack.enter_context(patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cuda")))
        # Where mixed precision is asked about CUDA, the simulated device is meant.
        for name in ("set_autocast_enabled", "is_autocast_enabled", "set_autocast_dtype", "get_autocast_dtype"):
            stack.enter_context(patch.object(torch, name, _meaning_the_card(getattr(torch, name))))
        stack.enter_context(patch.object(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype(NAME)))
        stack.enter_context(patch.object(torch, "clear_autocast_cache", _clear_both(torch.clear_autocast_cache)))
        # Optimizers take their multi-tensor form only for tensors of types they list.
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            module: Any = import_module(name)
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", types))
        true_device: Any = vars(FakeTensor)["device"]
        stack.enter_context(patch.object(FakeTensor, "device", property(_seen_device(true_device.fget))))
        stack.callback(forget_casts)
        yield


def _seen_device(true_device: Any) -> Callable[[Any], torch.device]:
    """Have a tensor say of its device: cuda to a step, the truth to torch's own work on fake tensors."""

    def seen(tensor: Any) -> torch.device:
        device: torch.device = true_device(tensor)
        is_asked_by_step = torch._C._is_torch_function_mode_enabled()
        return _SEEN_AS if is_asked_by_step and device.type == NAME else device

    return seen


def _meaning_the_card(asked: Callable[..., Any]) -> Callable[..., Any]:
    def ask(device_type: Any = "cuda", *args: Any) -> Any:
        if isinstance(device_type, bool):  # the old form: set_autocast_enabled(True)
            return asked(NAME, device_type)
        return asked(NAME if device_type == "cuda" else device_type, *args)

    return ask


def _clear_both(clear: Callable[[], None]) -> Callable[[], None]:
    def clear_both() -> None:
        forget_casts()
        clear()

    return clear_both


def _free(card: Card, allocator: CachingAllocator) -> int:
    """What nobody has taken; of a card with room to spare, no more than there is."""
    left = card.total_bytes - context_of(card).typical_bytes - allocator.stats.reserved.current
    return max(min(allocator.free_on_card, left), 0)


def _summary(card: Card, allocator: CachingAllocator) -> str:
    told = "\n".join(f"{name}: {num_bytes:,}" for name, num_bytes in _memory_stats(allocator).items())
    return f"{card.product}, simulated\n{told}"


def _memory_stats(allocator: CachingAllocator) -> dict[str, int]:
    found = {"num_alloc_retries": allocator.stats.num_alloc_retries, "num_ooms": allocator.stats.num_ooms}
    for name in ("allocated", "reserved", "active", "requested"):
        counter = getattr(allocator.stats, name)
        found[f"{name}_bytes.all.current"], found[f"{name}_bytes.all.peak"] = counter.current, counter.peak
    return found


def _nothing(*_: Any, **__: Any) -> None:
    pass
