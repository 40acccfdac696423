"""Inductor down to the wrapper that it generates, and no kernels: what a compiled graph takes and lets go.

Replaces, while a graph is compiled: torch._inductor.graph.get_wrapper_codegen_for_device,
torch._inductor.graph.GraphLowering._compile_to_module_lines, torch._functorch.partitioners.functionalize_rng_ops, and
settings of torch._inductor, torch._functorch and
torch._dynamo that would write to a cache on disk or start processes.

Promises:
- which buffers there are, when each is taken, reused and let go, is decided by Inductor itself: its passes, its
  scheduler and its memory planning run as they are, and the wrapper that it writes is executed;
- no kernel is compiled or run, and nothing is written to disk;
- operators that Inductor leaves to torch (a convolution, attention) run as they do outside of a compiled graph; what a
  library holds that writes into a buffer of the graph's (a product of matrices) is told to `NoteKernel`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from batchwright.simulated.torch_patches.patches import Patch, applied

NoteKernel = Callable[[Any, tuple[Any, ...], torch.Tensor], None]
"""Told of an operator that writes into memory that is there already: operator, arguments, where it writes."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "torch._inductor.config": {
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "autotune_local_cache": False,
        "compile_threads": 1,
        "cpp.vec_isa_ok": True,
        # Kernels cannot be timed, so nothing is chosen by time.
        "max_autotune": False,
        "max_autotune_pointwise": False,
        "max_autotune_gemm": False,
        "coordinate_descent_tuning": False,
    },
    "torch._functorch.config": {"enable_autograd_cache": False, "enable_remote_autograd_cache": False},
    "torch._dynamo.config": {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False},
}


@contextmanager
def without_kernels(device: torch.device, note_kernel: NoteKernel) -> Iterator[None]:
    """Have Inductor compile for `device` without compiling kernels, within a run."""
    with ExitStack() as stack:
        for name, settings in _SETTINGS.items():
            stack.enter_context(import_module(name).patch(settings))
        stack.enter_context(applied(_patches(device, note_kernel)))
        yield


def _patches(device: torch.device, note_kernel: NoteKernel) -> Iterator[Patch]:
    graph = import_module("torch._inductor.graph")
    yield Patch(graph, "get_wrapper_codegen_for_device", lambda *_, **__: _wrapper_class())

    def load(lowering: Any, wrapper: Any) -> Any:
        lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "", __file__, []
        names = _names_of_wrapper(device, note_kernel)
        names.update(lowering.constants, **lowering.torchbind_constants)
        given = dict(names)
        exec(compile(wrapper.value, "<Inductor's wrapper>", "exec"), names)
        names.update(given)  # over what the wrapper has imported
        return SimpleNamespace(call=names["call"], __file__=__file__)

    yield Patch(graph.GraphLowering, "_compile_to_module_lines", load)
    if device.type != "cpu":
        # Random states that a recomputed operator of the card sets back lie on the host, and here nothing is drawn.
        partitioners = import_module("torch._functorch.partitioners")
        yield Patch(partitioners, "functionalize_rng_ops", lambda _, forward, backward, *__: (forward, backward))


@cache
def _wrapper_class() -> Any:
    """Return the class that writes Inductor's wrapper, with everything about kernels left out."""
    codegen: Any = import_module("torch._inductor.codegen.wrapper")

    def write_nothing(*_: Any, **__: Any) -> None:
        pass

    class Wrapper(codegen.PythonWrapperCodegen):  # type: ignore[misc]
        """Writes allocations, reuses, ends of buffers and calls of torch's operators."""

        @staticmethod
        def create(is_subgraph: bool, name: Any, parent: Any, signatures: Any = None) -> Any:
            if is_subgraph:
                return codegen.SubgraphPythonWrapperCodegen(name, parent, signatures)
            return Wrapper()

        def write_get_raw_stream(self, device_idx: int, graph_name: str) -> str:
            return "None"

    for name in (
        *("write_header", "write_async_compile_wait", "write_triton_header_once", "write_get_raw_stream_header"),
        *("write_get_raw_stream_header_once", "write_kernel_autotune_defs_header", "add_benchmark_harness"),
        *("_define_kernel_helper", "_generate_kernel_call_helper", "codegen_device_guard_enter"),
        *("codegen_device_guard_exit", "_codegen_assert_size_stride"),
    ):
        setattr(Wrapper, name, write_nothing)
    return Wrapper


def _names_of_wrapper(device: torch.device, note_kernel: NoteKernel) -> dict[str, Any]:
    """Return what the names in a wrapper stand for."""

    def empty_on(target: torch.device) -> Callable[..., torch.Tensor]:
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=target)

    host = empty_on(torch.device("cpu"))
    align = import_module("torch._inductor.codegen.memory_planning")._align
    return {
        "torch": torch,
        "math": math,
        "random": random,
        "inf": math.inf,
        "nan": math.nan,
        "align": align,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "_quantized": torch.ops._quantized,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": host,
        "empty_strided_cpu_pinned": host,
        "empty_strided_cuda": empty_on(device),
        "reinterpret_tensor": _reinterpret,
        "alloc_from_pool": torch.ops.inductor._alloc_from_pool,
        "assert_size_stride": _pass_by,
        "assert_alignment": _pass_by,
        "copy_if_misaligned": lambda tensor: tensor,
        "extern_kernels": _ExternKernels(note_kernel),
    }


def _pass_by(*_: Any, **__: Any) -> None:
    pass


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    """Return other sizes and strides of the same memory, unknown to autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


class _ExternKernels:
    """`extern_kernels.mm(a, b, out=buffer)`: the buffer is there, and nothing is computed."""

    def __init__(self, note_kernel: NoteKernel) -> None:
        self._note_kernel = note_kernel

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        operator = getattr(torch.ops.aten, name.removeprefix("bias_")).default

        def run(*args: Any, out: torch.Tensor | None = None, **options: Any) -> Any:
            if out is None:
                return operator(*args, **options)
            self._note_kernel(operator, args, out)
            return out

        return run
