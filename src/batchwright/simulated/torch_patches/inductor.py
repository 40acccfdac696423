"""Inductor down to the wrapper that it generates, and no kernels: what a compiled graph takes and lets go.

Replaces, while a graph is compiled: torch._inductor.graph.get_wrapper_codegen_for_device,
torch._inductor.graph.GraphLowering._compile_to_module_lines, torch._inductor.compile_fx.fx_codegen_and_compile,
torch._inductor.output_code.align_inputs_from_check_idxs, torch._functorch.partitioners.functionalize_rng_ops, and
settings of torch._inductor, torch._functorch and torch._dynamo that would write to a cache on disk or start processes.

Promises:
- which buffers there are, when each is taken, reused and let go, is decided by Inductor itself: its passes, its
  scheduler and its memory planning run as they are, and the wrapper that it writes is executed;
- no kernel is compiled or run, and nothing is written to disk;
- a graph that was lowered once is not lowered again at the same sizes, by the same settings, for the same card;
- operators that Inductor leaves to torch (a convolution, attention) run as they do outside of a compiled graph; what a
  library holds that writes into a buffer of the graph's (a product of matrices) is told to `NoteKernel`.
"""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict
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
NoteFused = Callable[..., None]
"""Told of a kernel that Inductor wrote: name, how many arguments are read and written, over how many numbers it goes,
arguments."""

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


# What was lowered last, oldest first: by a graph with its sizes, what Inductor made of it and the wrapper's text.
_LOWERED: OrderedDict[Any, tuple[Any, str]] = OrderedDict()
_KEPT = 256
# What tells one lowering from another and not what it makes.
_PASSING = ("graph_id", "boxed_forward_device_index")


@contextmanager
def without_kernels(
    device: torch.device, note_kernel: NoteKernel, note_fused: NoteFused, capability: tuple[int, int] | None
) -> Iterator[None]:
    """Have Inductor compile for `device`, on a card for one of this capability, without compiling kernels."""
    with ExitStack() as stack:
        for name, settings in _SETTINGS.items():
            stack.enter_context(import_module(name).patch(settings))
        stack.enter_context(applied(_patches(device, note_kernel, note_fused, capability)))
        yield


def _patches(
    device: torch.device, note_kernel: NoteKernel, note_fused: NoteFused, capability: tuple[int, int] | None
) -> Iterator[Patch]:
    graph, compile_fx = import_module("torch._inductor.graph"), import_module("torch._inductor.compile_fx")
    yield Patch(graph, "get_wrapper_codegen_for_device", lambda *_, **__: _wrapper_class())
    # The wrappers that were loaded while one graph was lowered; None for one that has constants of its own.
    texts: list[str | None] = []

    def run_wrapper(text: str, constants: dict[str, Any]) -> Callable[..., Any]:
        names = {**_names_of_wrapper(device, note_kernel), "note_fused": note_fused, **constants}
        given = dict(names)
        exec(compile(text, "<Inductor's wrapper>", "exec"), names)
        names.update(given)  # over what the wrapper has imported
        return names["call"]  # type: ignore[no-any-return]

    def load(lowering: Any, wrapper: Any) -> Any:
        lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "", __file__, []
        constants = {**lowering.constants, **lowering.torchbind_constants}
        texts.append(None if constants else wrapper.value)
        return SimpleNamespace(call=run_wrapper(wrapper.value, constants), __file__=__file__)

    yield Patch(graph.GraphLowering, "_compile_to_module_lines", load)
    lower = compile_fx.fx_codegen_and_compile
    place: tuple[Any, ...] = (device.type, capability)
    if capability is not None:
        place = (*place, torch.cuda.get_device_properties(0).multi_processor_count)

    def lower_once(module: Any, examples: Any, *rest: Any, **options: Any) -> Any:
        key = _key_of(module, rest, options, place)
        if key in _LOWERED:
            _LOWERED.move_to_end(key)
            kept, text = _LOWERED[key]
            lowered = copy.copy(kept)
            lowered.current_callable = run_wrapper(text, {})
            return lowered
        texts.clear()
        lowered = lower(module, examples, *rest, **options)
        if key is not None and len(texts) == 1 and texts[0] is not None and hasattr(lowered, "current_callable"):
            kept = copy.copy(lowered)
            kept.current_callable = None  # it belongs to this run
            _LOWERED[key] = (kept, texts[0])
            if len(_LOWERED) > _KEPT:
                _LOWERED.popitem(last=False)
        return lowered

    yield Patch(compile_fx, "fx_codegen_and_compile", lower_once)
    # Inputs are taken to be aligned, as they are where the wrapper itself would copy them.
    output_code = import_module("torch._inductor.output_code")
    yield Patch(output_code, "align_inputs_from_check_idxs", lambda call, *_: call)
    if device.type != "cpu":
        # Random states that a recomputed operator of the card sets back lie on the host, and here nothing is drawn.
        partitioners = import_module("torch._functorch.partitioners")
        yield Patch(partitioners, "functionalize_rng_ops", lambda _, forward, backward, *__: (forward, backward))


def _key_of(module: Any, rest: Any, options: dict[str, Any], place: Any) -> Any:
    """What Inductor's work on a graph depends on; None where that is not all to be read off: sizes of any value."""
    nodes = list(module.graph.nodes)
    if any(node.op == "get_attr" for node in nodes):
        return None
    known = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    if any(isinstance(value, torch.SymInt) for value in known):
        return None
    inputs = tuple(map(_layout_of, known))
    # A rule of shapes may be written anew under the same name, and a gradient may reuse what a forward gave up.
    inner = tuple(_layout_of(node.meta.get("val")) for node in nodes)
    donated = tuple(import_module("torch._inductor.utils").get_donated_idxs() or ())
    # What of the output's layout is bound, apart from the values themselves.
    bound = {name: value for name, value in nodes[-1].meta.items() if name.endswith(("_idxs", "_strides"))}
    settings = {name: value for name, value in options.items() if name not in _PASSING}
    config = import_module("torch._inductor.config").get_hash()
    return str(module.graph), inputs, inner, donated, repr(bound), repr(rest), repr(settings), config, place


def _layout_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype, str(value.device), value.requires_grad
    return tuple(map(_layout_of, value)) if isinstance(value, list | tuple) else repr(value)


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

        def _generate_kernel_call_helper(
            self, kernel_name: str, call_args: Any, *, triton_meta: Any = None, **_: Any
        ) -> None:
            args = list(map(str, call_args))
            signature = list((triton_meta or {}).get("signature", ()))
            twice = sum(name.startswith("in_out_ptr") for name in signature)
            named = zip(signature, args, strict=False)
            numels = [value for name, value in named if name.endswith("numel")]
            positions = " * ".join(f"({value})" for value in numels) or "None"
            self.writeline(f"note_fused({', '.join([repr(kernel_name), str(twice), positions, *args])})")

        def write_get_raw_stream(self, device_idx: int, graph_name: str) -> str:
            return "None"

    for name in (
        *("write_header", "write_async_compile_wait", "write_triton_header_once", "write_get_raw_stream_header"),
        *("write_get_raw_stream_header_once", "write_kernel_autotune_defs_header", "add_benchmark_harness"),
        *("_define_kernel_helper", "codegen_device_guard_enter"),
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
