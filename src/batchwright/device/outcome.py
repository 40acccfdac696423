"""`Outcome`: what one probe did, the same for every device, and what running out of memory looks like.

This is the only file that reads the text of an exception.

Promises:
- a verdict is one of three: it fits, it ran out of memory, or the user's code failed;
- a kind of peak that a device does not have is None, never 0;
- a failure keeps its exception with the user's traceback, but none of the tensors that its frames held;
- an error is out-of-memory only by a named rule, and the rule that matched can be asked for;
- the cause, the context and the members of an exception group are looked at as well; an interrupt never counts;
- a limit on the size of one tensor (32-bit indexing) counts too, since a smaller batch also cures it, but under a
  rule whose name begins with "too-large".

Left out of the rules, because a smaller batch does not cure them or because they mostly mean something else:
- DataLoader workers "out of shared memory" or killed: a limit of /dev/shm and of the number of workers;
- Triton's "out of resource: shared memory": the memory inside one GPU core, fixed by the kernel, not the batch;
- CUDA "illegal memory access", CUBLAS_STATUS_NOT_INITIALIZED, CUDNN_STATUS_EXECUTION_FAILED;
- `KeyError: 'exp_avg_sq'` (what an out-of-memory inside Adam's first step leaves behind) and BatchNorm's "Expected
  more than 1 value per channel": these are for the search to prevent, not to mistake for memory.
"""

from __future__ import annotations

import gc
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from batchwright.errors import BatchwrightError
from batchwright.targets import users_traceback_text
from batchwright.units import PeakBytes


@dataclass(frozen=True)
class Rule:
    """One way to run out of memory: exceptions of these types whose text holds this pattern."""

    name: str
    pattern: re.Pattern[str] = re.compile("")
    types: tuple[type[BaseException], ...] = (RuntimeError,)
    doubt: str = ""
    """What else the same message can mean; empty where it means memory alone."""

    def matches(self, error: BaseException) -> bool:
        """Whether this one exception, without its causes, falls under the rule."""
        return isinstance(error, self.types) and self.pattern.search(str(error)) is not None


def _text(name: str, pattern: str, doubt: str = "") -> Rule:
    return Rule(name, re.compile(pattern), doubt=doubt)


# torch.OutOfMemoryError and torch.AcceleratorError are RuntimeErrors. Marks: [R] raised on our own machines, torch
# 2.13 on a CPU; [S] read in torch's source; [B] found in its binary; [I] reported in the issue named.
_RULES = (
    # [R] Ours, from host.py: a budget that is kept by counting.
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


def find_rule(error: BaseException) -> Rule | None:
    """Return the first rule that an error, or what it came from, falls under.

    >>> find_rule(MemoryError()).name
    'memory-error'
    """
    # Ctrl-C while an out-of-memory is being handled has it as its context, and is still Ctrl-C.
    if not isinstance(error, Exception):
        return None
    return next((rule for member in with_causes(error) for rule in _RULES if rule.matches(member)), None)


def with_causes(error: BaseException, seen: set[int] | None = None) -> Iterator[BaseException]:
    """Yield an error, the members of a group, and what each came from; each once."""
    seen = set() if seen is None else seen
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    # `raise ... from None` hides the context from the reader of a traceback; it is the reason all the same.
    for origin in (*inner, error.__cause__, error.__context__):
        if origin is not None:
            yield from with_causes(origin, seen)


# Forward graphs, and backward graphs that are compiled when the first backward runs. Names as of torch 2.13; where
# they change, the count stays right and the time is no longer taken off.
_STAGES = ("_compile.compile_inner", "backward._backward_impl")


def _compiled_so_far() -> tuple[int, float]:
    """Graphs compiled in this process and the seconds they took: no part of what a step costs."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0.0
    times = [t for name in _STAGES for t in dynamo.compilation_time_metrics.get(name, [])]
    return dynamo.counters["stats"]["unique_graphs"], float(sum(times))


Verdict = Literal["fits", "out_of_memory", "failed"]


@dataclass(frozen=True)
class Outcome:
    """One probe at one size.

    >>> ran = Outcome(8, {}, "fits", PeakBytes(allocated=2**20), seconds=1.5, step_seconds=0.5)
    >>> ran.fits, ran.samples_per_second
    (True, 16.0)

    `seconds` are those of the whole probe without what torch.compile took, `step_seconds` those of its last full step.
    After out-of-memory the peak is what had been reached by then, a lower bound of what the size needs, or None.
    """

    micro_batch: int
    shape: dict[str, Any]
    verdict: Verdict
    peak_bytes: PeakBytes | None
    seconds: float
    step_seconds: float | None = None
    accumulation: int = 1
    rule: str | None = None
    doubt: str = ""
    is_too_small: bool = False
    """The step cannot run on so few samples (BatchNorm over one); the verdict is `failed`, but it is nobody's bug."""
    num_compilations: int = 0
    error: str | None = None
    traceback: str | None = field(default=None, repr=False)
    exception: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether full steps ran at this size."""
        return self.verdict == "fits"

    @property
    def samples_per_second(self) -> float | None:
        """Samples of a step over the seconds of the last one; None where no step ended."""
        return self.micro_batch * self.accumulation / self.step_seconds if self.step_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {
            "micro_batch": self.micro_batch,
            "shape": dict(self.shape),
            "accumulation": self.accumulation,
            "outcome": self.verdict,
            "peak_bytes": asdict(self.peak_bytes) if self.peak_bytes else None,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "num_compilations": self.num_compilations,
            "rule": self.rule,
            "doubt": self.doubt or None,
            "error": self.error,
            "is_too_small": self.is_too_small,
            "traceback": self.traceback,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Outcome:
        """Read back what `to_dict` wrote, in another process or in an earlier run.

        >>> ran = Outcome(8, {}, "fits", PeakBytes(device=2**20), seconds=1.5, step_seconds=0.5)
        >>> Outcome.from_dict(ran.to_dict()) == ran
        True
        """
        fields = {key: value for key, value in data.items() if key not in ("outcome", "samples_per_second")}
        fields["peak_bytes"] = PeakBytes(**data["peak_bytes"]) if data["peak_bytes"] else None
        return Outcome(**{**fields, "verdict": data["outcome"], "doubt": data["doubt"] or ""})


def judge(
    run: Callable[[], tuple[float, ...]],
    *,
    micro_batch: int,
    shape: Mapping[str, Any],
    accumulation: int,
    peak: Callable[[], PeakBytes | None],
) -> Outcome:
    """Run a probe and say how it ended; `peak` is read at the end, whatever it was.

    What batchwright raises deliberately, and an interrupt, are no outcome: they pass through.
    """
    start = time.perf_counter()
    graphs_before, compiling_before = _compiled_so_far()
    outcome = Outcome(micro_batch, dict(shape), "fits", None, 0.0, accumulation=accumulation)
    try:
        outcome = replace(outcome, step_seconds=run()[-1])
    except BatchwrightError:
        raise
    except Exception as error:
        rule = find_rule(error)
        message = "".join(traceback.format_exception_only(error)).strip()
        if rule is not None:
            outcome = replace(outcome, verdict="out_of_memory", error=message, rule=rule.name, doubt=rule.doubt)
        else:
            outcome = replace(
                outcome,
                verdict="failed",
                error=message,
                is_too_small=is_too_small(error),
                traceback=users_traceback_text(error),
                exception=error,
            )
        # Let go of the tensors in the frames; the lines stay readable.
        for member in with_causes(error):
            traceback.clear_frames(member.__traceback__)
    graphs, compiling = _compiled_so_far()
    seconds = max(0.0, time.perf_counter() - start - (compiling - compiling_before))
    peak_bytes = peak()
    # Outside the except block, where the traceback no longer holds the failed step's tensors; models are often in
    # reference cycles, so counting references alone does not free them.
    gc.collect()
    return replace(outcome, peak_bytes=peak_bytes, seconds=seconds, num_compilations=graphs - graphs_before)
