"""What `torch.cuda` answers while a card is simulated: there is one, it is this one, and so much of it is taken.

Promises:
- questions (is there one, its name, its generation, what is taken) are answered for the simulated card;
- what only orders work in time (streams, events, synchronize) does nothing, what cannot be simulated (graphs) is
  refused;
- torch is as it was afterwards.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from batchwright.errors import CannotTraceError
from batchwright.simulated.autocast import forget_casts
from batchwright.simulated.backend import NAME
from batchwright.simulated.library_answers import library_answers
from batchwright.simulated.memory_answers import memory_answers
from batchwright.simulated.old_types import old_types
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.catalogue.gpus import Card
    from batchwright.simulated.caching_allocator import CachingAllocator

_FIRST_WITH_BFLOAT16 = (8, 0)
_DOES_NOTHING = (
    *("synchronize", "set_device", "manual_seed", "manual_seed_all", "seed", "seed_all", "init", "_lazy_init"),
    *("ipc_collect", "set_stream", "set_rng_state", "set_per_process_memory_fraction"),
    *("set_rng_state_all", "set_sync_debug_mode", "_sleep", "_record_memory_history"),
)
# Of the generation's best known card; others of it differ. Kernels choose tiles by it, no bytes here follow from it.
_L2_MIB = {(7, 0): 6, (7, 5): 4, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50, (10, 0): 126, (12, 0): 96}
_L2_OTHERWISE_MIB = 50
_SEEN_AS = torch.device("cuda", 0)


class _InOrder:
    """A stream or an event: there is only one order of things here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "record_event":
            return lambda event=None: _InOrder() if event is None else event
        return lambda *_, **__: True if name == "query" else 0.0 if name == "elapsed_time" else None

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_Generator: Any = torch.Generator
# Looked up here: where one run is inside another, what stands in the class is no property.
_TRUE_DEVICE: Any = vars(FakeTensor)["device"]


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
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.product,
        total_memory=card.total_bytes,
        major=major,
        minor=minor,
        multi_processor_count=card.num_sms,
        warp_size=32,
        L2_cache_size=_L2_MIB.get((major, minor), _L2_OTHERWISE_MIB) << 20,
        regs_per_multiprocessor=65536,
        is_integrated=0,
        is_multi_gpu_board=0,
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
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": torch.initial_seed,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "get_sync_debug_mode": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda device, peer_device: False,
        **memory_answers(card, allocator),
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


def answering_for(card: Card, allocator: CachingAllocator) -> Iterator[Patch]:
    """Have torch answer for a card."""
    told = answers(card, allocator)
    yield from library_answers(told)
    for name, answer in told.items():
        for place in (torch.cuda, torch.cuda.memory, torch.cuda.random):
            if hasattr(place, name):
                yield Patch(place, name, answer)
    for name in ("mark", "range", "range_pop", "range_push"):
        yield Patch(torch.cuda.nvtx, name, _InOrder)
    yield Patch(torch, "Generator", _GeneratorOnHost)
    yield Patch(torch.Tensor, "record_stream", _nothing)
    yield Patch(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    # Where mixed precision is asked about CUDA, the simulated device is meant.
    for name in ("set_autocast_enabled", "is_autocast_enabled", "set_autocast_dtype", "get_autocast_dtype"):
        yield Patch(torch, name, _meaning_the_card(getattr(torch, name)))
    yield Patch(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype(NAME))
    yield Patch(torch, "clear_autocast_cache", _clear_both(torch.clear_autocast_cache))
    # Optimizers take their multi-tensor form only for tensors of types they list.
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module: Any = import_module(name)
        yield Patch(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])
    yield Patch(FakeTensor, "device", property(seen_device(_TRUE_DEVICE.fget)))
    yield Patch(torch.nn.DataParallel, "forward", _on_the_one_card)
    yield from old_types()


def seen_device(true_device: Any) -> Callable[[Any], torch.device]:
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


def _on_the_one_card(self: Any, *args: Any, **kwargs: Any) -> Any:
    """DataParallel scatters over the cards there are: over one it only moves what is not there yet."""
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), (args, kwargs))
    return self.module(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    pass
