"""What torch says about CUDA while a card is simulated: there is one, it is this one, and so much of it is taken.

Replaces: the names of `answers` in torch.cuda, torch.cuda.memory, torch.cuda.random and torch.accelerator (its memory
too), and whatever else there asks the CUDA library; torch.version.cuda, torch.backends.cudnn.version, is_available and
is_acceptable, torch.cuda.nccl.version, torch.cuda.nvtx; torch._C._cuda_get_cudnn_benchmark_limit, its setter and
_get_accelerator; torch.Generator, FakeTensor.device, nn.DataParallel.forward; torch's autocast
functions, and the types that optimizers take for their multi-tensor form.

Promises:
- questions (is there one, its name, its generation, what is taken) are answered for the simulated card; `torch.cuda`
  and `torch.accelerator` ask one allocator;
- what only orders work in time (events, synchronize) does nothing; a stream has memory of its own; what cannot be
  simulated (graphs) is refused;
- versions are those of a usual build, and read the same for every card;
- a function of `torch.cuda` that would ask the library for something nobody answers is refused by its name;
- torch is as it was afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from batchwright.catalogue.cards import Card, context_of
from batchwright.errors import CannotTraceError
from batchwright.simulated.allocator.caching_allocator import CachingAllocator, History
from batchwright.simulated.operators.autocast import forget_casts
from batchwright.simulated.torch_patches.backend import NAME
from batchwright.simulated.torch_patches.patches import Patch, do_nothing, refusing
from batchwright.simulated.torch_patches.redirected_calls import old_types

# As torch.cuda.memory_stats names them, and as the allocator does. What was freed and waits for another stream is no
# longer counted as active here.
_FAMILIES = {
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "active_bytes": "allocated",
    "requested_bytes": "requested",
    "inactive_split_bytes": "inactive_split",
    "segment": "num_segments",
    "allocation": "num_allocations",
    "active": "num_allocations",
}
_COUNTS = (
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
    "num_oom_rejections",
)


# Asks for the same as a nested dict, and flattens it.
_FLATTENED = torch.cuda.memory.memory_stats


def memory_answers(card: Card, allocator: CachingAllocator) -> dict[str, Callable[..., Any]]:
    """Return what each question about memory is answered with."""
    stats = allocator.stats
    return {
        "mem_get_info": lambda device=None: (_free(card, allocator), card.total_bytes),
        "get_memory_info": lambda device=None: (_free(card, allocator), card.total_bytes),
        "device_memory_used": lambda device=None: card.total_bytes - _free(card, allocator),
        "memory_allocated": lambda device=None: stats.allocated.current,
        "max_memory_allocated": lambda device=None: stats.allocated.peak,
        "memory_reserved": lambda device=None: stats.reserved.current,
        "max_memory_reserved": lambda device=None: stats.reserved.peak,
        "memory_stats": _FLATTENED,
        "memory_stats_as_nested_dict": lambda device=None: _memory_stats(allocator),
        "memory_summary": lambda device=None, abbreviated=False: _summary(card, allocator),
        "memory_snapshot": lambda mempool_id=None, include_traces=True: allocator.segments(),
        "_snapshot": lambda device=None, augment_with_fx_traces=False: History().snapshot(allocator),
        "reset_peak_memory_stats": lambda device=None: stats.reset_peaks(),
        "reset_accumulated_memory_stats": lambda device=None: stats.reset_accumulated(),
        "get_allocator_backend": lambda: "native",
        "empty_cache": allocator.empty_cache,
    }


def _free(card: Card, allocator: CachingAllocator) -> int:
    """What nobody has taken; of a card with room to spare, no more than there is."""
    left = card.total_bytes - context_of(card).typical_bytes - allocator.stats.reserved.current
    return max(min(allocator.free_on_card, left), 0)


def _summary(card: Card, allocator: CachingAllocator) -> str:
    lines = [f"{name}: {number:,}" for name, number in _FLATTENED().items()]
    return "\n".join([f"{card.product}, simulated", *lines])


def _memory_stats(allocator: CachingAllocator) -> dict[str, Any]:
    counts: dict[str, Any] = {name: getattr(allocator.stats, name) for name in _COUNTS}
    for name, ours in _FAMILIES.items():
        one = getattr(allocator.stats, ours)
        numbers = {"current": one.current, "peak": one.peak, "allocated": one.risen, "freed": one.fallen}
        counts[name] = {"all": numbers}
    return counts


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
    replies = {
        **cuda,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "empty_host_cache": lambda: None,
        **dict.fromkeys(("current_device_index", "current_device_idx"), cuda["current_device"]),
        **dict.fromkeys(("set_device_index", "set_device_idx"), cuda["set_device"]),
        "device_index": cuda["device"],
    }
    # What a card is capable of is put in other words there.
    del replies["get_device_capability"]
    for place in (accelerator, getattr(accelerator, "memory", None)):
        yield from (Patch(place, name, answer) for name, answer in replies.items() if place and name in vars(place))


def _refusals(answered: Container[str]) -> Iterator[Patch]:
    for place in map(import_module, _MODULES):
        for name, value in vars(place).items():
            is_public = not name.startswith("_") and inspect.isfunction(value) and _asks_library(value)
            is_answered = name in answered or (place is torch.cuda.nccl and name == "version")
            if (is_public or name in _BELONG_TO_LIBRARY) and not is_answered:
                problem = f"torch.cuda.{name} asks the CUDA library or the driver, and this card is simulated."
                yield Patch(place, name, refusing(problem, "leave that call out of the step that is traced"))


def _asks_library(function: Callable[..., Any]) -> bool:
    code: Any = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any(name.startswith(_ASKS_LIBRARY) for name in code.co_names)


_FIRST_WITH_BFLOAT16 = (8, 0)
_DOES_NOTHING = (
    *("set_device", "manual_seed", "manual_seed_all", "seed", "seed_all", "init", "_lazy_init"),
    *("ipc_collect", "set_rng_state", "set_per_process_memory_fraction"),
    *("set_rng_state_all", "set_sync_debug_mode", "_sleep", "_record_memory_history"),
)
# Of the generation's best known card; others of it differ. Kernels choose tiles by it, no bytes here follow from it.
_L2_MIB = {(7, 0): 6, (7, 5): 4, (8, 0): 40, (8, 6): 6, (8, 9): 72, (9, 0): 50, (10, 0): 126, (12, 0): 96}
_L2_OTHERWISE_MIB = 50
SEEN_AS = torch.device("cuda", 0)


class _InOrder:
    """An event, or a device: there is only one order of things here."""

    cuda_stream = device_index = stream_id = 0
    device = SEEN_AS

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: True if name == "query" else 0.0 if name == "elapsed_time" else None

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Stream(_InOrder):
    """A stream: work on it has the same order as all other, but its memory comes from pools of its own."""

    def __init__(self, allocator: CachingAllocator, number: int) -> None:
        self._allocator, self.cuda_stream, self.stream_id = allocator, number, number
        self._before: list[int] = []

    def synchronize(self) -> None:
        self._allocator.passed()

    def record_event(self, event: Any = None) -> Any:
        event = _Event(self._allocator) if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __enter__(self) -> _Stream:
        self._before.append(self._allocator.stream)
        self._allocator.stream = self.cuda_stream
        return self

    def __exit__(self, *_: object) -> None:
        self._allocator.stream = self._before.pop()


class _Event(_InOrder):
    """An event: who waits for it on the host knows that what was launched before it has passed."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator, self._number = allocator, 0

    def record(self, _: Any = None) -> None:
        self._number = self._allocator.num_launched

    def synchronize(self) -> None:
        self._allocator.passed(self._number)


# PyTorch has so many streams for each priority, and hands them out again in turn (c10/cuda/CUDAStream.cpp).
_STREAMS = 32


def stream_answers(allocator: CachingAllocator) -> dict[str, Any]:
    """Return what the names of `torch.cuda` that are about streams stand for."""
    numbers = {False: 0, True: 0}

    class Stream(_Stream):  # a class, because type hints speak of it
        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            is_urgent = priority < 0
            super().__init__(allocator, 1 + numbers[is_urgent] % _STREAMS + _STREAMS * is_urgent)
            numbers[is_urgent] += 1

    class Event(_Event):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(allocator)

    def set_stream(stream: _Stream | None) -> None:
        if stream is not None:
            allocator.stream = stream.cuda_stream

    return {
        "Stream": Stream,
        "Event": Event,
        "synchronize": lambda device=None: allocator.passed(),
        "stream": lambda stream: _InOrder() if stream is None else stream,
        "set_stream": set_stream,
        "current_stream": lambda device=None: _Stream(allocator, allocator.stream),
        "default_stream": lambda device=None: _Stream(allocator, 0),
    }


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
        # What Triton's heuristics ask too; they choose tiles by it.
        max_threads_per_multi_processor={(7, 5): 1024, (8, 0): 2048, (9, 0): 2048}.get((major, minor), 1536),
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=163 << 10,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
    return {
        **dict.fromkeys(_DOES_NOTHING, do_nothing),
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
        "device": _InOrder,
        **stream_answers(allocator),
        "CUDAGraph": _Graph,
        "graph": _Graph,
        "make_graphed_callables": _Graph,
    }


def answering_for(card: Card, allocator: CachingAllocator) -> Iterator[Patch]:
    """Have torch answer for a card."""
    replies = answers(card, allocator)
    yield from library_answers(replies)
    for name, answer in replies.items():
        for place in (torch.cuda, torch.cuda.memory, torch.cuda.random):
            if hasattr(place, name):
                yield Patch(place, name, answer)
    for name in ("mark", "range", "range_pop", "range_push"):
        yield Patch(torch.cuda.nvtx, name, _InOrder)
    yield Patch(torch, "Generator", _GeneratorOnHost)
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
        return SEEN_AS if is_asked_by_step and device.type == NAME else device

    return seen


def _meaning_the_card(function: Callable[..., Any]) -> Callable[..., Any]:
    def ask(device_type: Any = "cuda", *args: Any) -> Any:
        if isinstance(device_type, bool):  # the old form: set_autocast_enabled(True)
            return function(NAME, device_type)
        return function(NAME if device_type == "cuda" else device_type, *args)

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
