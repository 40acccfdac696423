"""What running out of memory looks like: the only place that reads the text of an exception.

Promises:
- an error is out-of-memory only by a named rule, and the rule that matched can be asked for;
- the cause, the context and the members of an exception group are looked at as well; an interrupt never counts;
- a limit on the size of one tensor (32-bit indexing) counts too, since a smaller batch also cures it, but under a
  rule whose name begins with "too-large";
- users add rules of their own.

Left out on purpose, because a smaller batch does not cure them or because they mostly mean something else:
- DataLoader workers "out of shared memory" or killed: a limit of /dev/shm and of the number of workers;
- Triton's "out of resource: shared memory": the memory inside one GPU core, fixed by the kernel, not the batch;
- CUDA "illegal memory access", CUBLAS_STATUS_NOT_INITIALIZED, CUDNN_STATUS_EXECUTION_FAILED;
- `KeyError: 'exp_avg_sq'` (what an out-of-memory inside Adam's first step leaves behind) and BatchNorm's "Expected
  more than 1 value per channel": these are for the search to prevent, not to mistake for memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from types import TracebackType


Predicate = Callable[[BaseException], bool]


@dataclass(frozen=True)
class Rule:
    """One way to run out of memory: exceptions of these types whose text holds this pattern."""

    name: str
    pattern: re.Pattern[str] = re.compile("")
    types: tuple[type[BaseException], ...] = (RuntimeError,)
    doubt: str = ""
    """What else the same message can mean; empty where it means memory alone."""
    predicate: Predicate | None = None

    def matches(self, error: BaseException) -> bool:
        """Whether this one exception, without its causes, falls under the rule."""
        if self.predicate is not None:
            return self.predicate(error)
        return isinstance(error, self.types) and self.pattern.search(str(error)) is not None


def _text(name: str, pattern: str, doubt: str = "") -> Rule:
    return Rule(name, re.compile(pattern), doubt=doubt)


# torch.OutOfMemoryError and torch.AcceleratorError are RuntimeErrors. Marks: [R] raised on our own machines, torch
# 2.13 on a CPU; [S] read in torch's source; [B] found in its binary; [I] reported in the issue named.
_BUILT_IN = (
    # [R] Ours, from byte_counter.py: a budget that is kept by counting.
    Rule("counted-limit", re.compile(r"^the tensors alive would take .* and the limit is"), types=(MemoryError,)),
    # [R] Python and numpy (numpy raises a subclass, _ArrayMemoryError); cupy's OutOfMemoryError is one as well.
    Rule("memory-error", types=(MemoryError,)),
    # [S] c10/cuda/CUDACachingAllocator.cpp; pytorch#138002 for HIP; XPUCachingAllocator.cpp; sglang#29838 for NPU.
    _text("cuda-allocator", r"CUDA out of memory\. Tried to allocate"),
    _text("hip-allocator", r"HIP out of memory\. Tried to allocate"),
    _text("xpu-allocator", r"XPU out of memory\. Tried to allocate"),
    _text("npu-allocator", r"NPU out of memory\. Tried to allocate"),
    # [S] ATen/mps/MPSAllocator.mm. A single buffer has a limit of its own: pytorch#141909, diffusers#5894.
    _text("mps-allocator", r"MPS backend out of memory"),
    _text("mps-buffer", r"Invalid buffer size: [\d.]+ [KMGT]?i?B"),
    # [I] accelerate 1.15 utils/memory.py reads the same text; Gaudi's source is not public.
    _text("hpu-allocator", r"MODULE:PT_DEVMEM Allocation failed"),
    # [R] c10/core/impl/alloc_cpu.cpp on Linux and macOS; on Windows [I] Comfy-Org/Nvidia_RTX_Nodes_ComfyUI#13.
    _text("cpu-allocator", r"DefaultCPUAllocator: can't allocate memory"),
    _text("cpu-allocator-windows", r"DefaultCPUAllocator: not enough memory"),
    # [R] OpenMP under RLIMIT_DATA: it cannot start a thread and ends the process, so only a parent reads these.
    _text("openmp-thread", r"libgomp: Thread creation failed|cannot allocate memory for thread-local data"),
    # [B] libc10: the few bytes that hold a tensor's sizes.
    _text("cpu-tensor-sizes", r"Could not allocate memory (for|to change) Tensor SizesAndStrides"),
    # [R] C++ out of memory as torch hands it on, 35 of 359 errors of a transformer and a bf16 MLP under RLIMIT_DATA;
    # "bad allocation" is what Microsoft's library calls it.
    _text("bad-alloc", r"std::bad_alloc|^bad allocation$"),
    # [S] Exceptions.h of ATen/cuda, CuFFTUtils.h. HIPBLAS is how ROCm spells it.
    _text("cublas-alloc", r"(CU|HIP)BLAS_STATUS_ALLOC_FAILED"),
    _text("cusolver-alloc", r"CUSOLVER_STATUS_ALLOC_FAILED"),
    _text("cufft-alloc", r"(CU|HIP)FFT_ALLOC_FAILED"),
    # cuDNN 9 has a status for each kind of memory (4003 and 4004).
    _text("cudnn-alloc", r"CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED)"),
    # [I] cupy#6375: the test of allocation failures in the FFT meets this status instead of ALLOC_FAILED; NeMo's
    # OOMptimizer counts it as well. But pytorch#88038 was CUDA 11.7 on a card it does not know.
    _text("cufft-internal", r"CUFFT_INTERNAL_ERROR", doubt="a CUDA too old for the card gives the same status"),
    # [I] pytorch#108645 "uninformative OOM error", QwenLM/Qwen3-VL#151; but cog#1430 was a second cuDNN on the path.
    _text(
        "cudnn-no-engine",
        r"was unable to find an engine to execute this computation",
        doubt="a broken or mixed cuDNN installation gives the same message at every size",
    ),
    # [I] pytorch#4107 (large inputs), pytorch#44473, mmaction2#493 (a smaller batch cured it); accelerate, Lightning
    # and toma count it. [S] torch adds the words about the input whatever the reason.
    _text(
        "cudnn-not-supported",
        r"CUDNN_STATUS_NOT_SUPPORTED\. This error may appear if you passed in a non-contiguous input",
        doubt="an operation that cuDNN does not support gives the same status at every size",
    ),
    # [I] physical-ai-studio#440, pytorch#177714, pytorch#190972. PI_ is the name before oneAPI 2025.
    _text("xpu-runtime", r"(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY"),
    _text(
        "xpu-resources",
        r"(UR_RESULT|PI)_ERROR_OUT_OF_RESOURCES",
        doubt="a kernel that asks for too many registers gives the same code (torch-xpu-ops#5061)",
    ),
    # [R] Under RLIMIT_DATA 157 of 552 errors of a conv net and an LSTM; each new size makes primitives that stay, about
    # 2.5 MiB for two convolutions. An LSTM there said "execute" now and then, cause unknown. "... descriptor"
    # never came: it means that there is no kernel for a shape or dtype (intel-extension-for-pytorch#375,
    # torch-xpu-ops#4066). Other reasons for this one: pytorch#89104 (a bug on one CPU), pytorch#143651 (a service that
    # may not make executable pages).
    _text(
        "onednn-primitive",
        r"could not (create|execute) a primitive(?! descriptor)",
        doubt="oneDNN says the same where it may not make executable memory pages",
    ),
    # [B] The same library, where the memory is for data.
    _text("onednn-memory", r"could not create a memory object"),
    # [B] libtorch_cpu: Fourier transforms through MKL.
    _text("mkl-memory", r"oneMKL DFTI ERROR: Not enough memory"),
    # [I] Everything else that says so after a word for failure: "CUDA error: out of memory" (Wan2GP#1083), "HIP error:
    # out of memory", NCCL's "Cuda failure 2 'out of memory'", "Triton Error [CUDA]: out of memory", faiss (SpCL#44),
    # spconv (CMT#15). A bare "out of memory" in the middle of advice does not count.
    _text("library", r"(?i)\b(error|failed|failure)\b[^.\n]{0,80}\bout of memory\b"),
    # Last, so that the rule with the backend's name speaks first.
    Rule("torch-out-of-memory-error", types=(torch.OutOfMemoryError,)),
    # [I] pytorch#80020; BoxTeacher#11; pytorch#113833 (safe_downcast); pytorch#51871; pytorch#141909.
    _text("too-large-32-bit-index", r"canUse32BitIndexMath|must fit into 32-bit index math"),
    _text("too-large-integer", r"^integer out of range"),
    _text("too-large-int-max", r"not supported for tensors with more than INT_MAX elements"),
    _text("too-large-mps", r"larger than currently supported by the MPS backend|tensor dims larger than INT_MAX"),
    # [R] The bytes of one tensor do not fit 64 bits.
    _text("too-large-storage", r"Storage size calculation overflowed|numel: integer multiplication overflow"),
    # [R] torch.quantile, torch.multinomial.
    _text("too-large-operator", r"quantile\(\) input tensor is too large|number of categories cannot exceed 2\^24"),
)

# A user's rules, in the order they came. The one piece of state in this file, and register and unregister own it.
_registered: list[Rule] = []


# Not memory at all, but read here because this is the one file that reads messages: BatchNorm has nothing to
# normalise over, and one sample more cures it. [R] nn.BatchNorm1d in training mode on one sample.
_TOO_SMALL = re.compile(r"Expected more than 1 value per channel when training")


def is_too_small(error: BaseException) -> bool:
    """Whether the step cannot run on so few samples, and a larger size may well run.

    >>> is_too_small(ValueError("Expected more than 1 value per channel when training, got input size [1, 8]"))
    True
    """
    return isinstance(error, ValueError) and _TOO_SMALL.search(str(error)) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a smaller batch would have fitted.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(ValueError("wrong shape"))
    (True, False)
    """
    return find_rule(error) is not None


def out_of_memory_rule(error: BaseException) -> str | None:
    """Return the name of the rule an error falls under, or None.

    >>> out_of_memory_rule(MemoryError())
    'memory-error'
    """
    rule = find_rule(error)
    return rule.name if rule else None


def find_rule(error: BaseException) -> Rule | None:
    """Return the first rule that an error, or what it came from, falls under."""
    # Ctrl-C while an out-of-memory is being handled has it as its context, and is still Ctrl-C.
    if not isinstance(error, Exception):
        return None
    for member in _with_causes(error, set()):
        for rule in (*_registered, *_BUILT_IN):
            if rule.matches(member):
                return rule
    return None


class Registration:
    """A user's rule; ends with `unregister()`, or at the end of a `with` block."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def unregister(self) -> None:
        """Take the rule away again; a second time does nothing."""
        if self.rule in _registered:
            _registered.remove(self.rule)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.unregister()


def register_out_of_memory(pattern_or_predicate: str | re.Pattern[str] | Predicate, *, name: str) -> Registration:
    """Teach one more way to run out of memory: a regular expression for the text, or a function of the exception.

    >>> with register_out_of_memory(r"RESOURCE_EXHAUSTED", name="xla"):
    ...     out_of_memory_rule(RuntimeError("RESOURCE_EXHAUSTED: while allocating"))
    'xla'
    """
    if name in {rule.name for rule in (*_registered, *_BUILT_IN)}:
        raise InvalidInputError(f"there is already an out-of-memory rule named {shortened(name)}.")
    if isinstance(pattern_or_predicate, str | re.Pattern):
        rule = Rule(name, re.compile(pattern_or_predicate), types=(Exception,))
    elif callable(pattern_or_predicate):
        rule = Rule(name, predicate=pattern_or_predicate)
    else:
        raise InvalidInputError(
            "an out-of-memory rule is a regular expression or a function of the exception; "
            f"received {shortened(pattern_or_predicate)}."
        )
    _registered.append(rule)
    return Registration(rule)


def _with_causes(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    # `raise ... from None` hides the context from the reader of a traceback; it is the reason all the same.
    for origin in (*inner, error.__cause__, error.__context__):
        if origin is not None:
            yield from _with_causes(origin, seen)
