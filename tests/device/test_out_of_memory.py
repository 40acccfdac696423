"""Each way to run out of memory is recognised, and what only sounds like it is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.device.outcome import _RULES, find_rule, is_out_of_memory

# Since torch 2.8; before that these were plain RuntimeErrors.
AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)

# (rule, exception): texts as reported where outcome.py names the source.
KNOWN: list[tuple[str, Exception]] = [
    ("memory-error", MemoryError()),
    ("memory-error", MemoryError("Unable to allocate 1.00 EiB for an array with shape (2,) and data type uint8")),
    ("counted-limit", MemoryError("the tensors alive would take 2 GiB and the limit is 1 GiB (2 and 1 bytes).")),
    (
        "cuda-allocator",
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 5.69 "
            "MiB is free. Process 3456 has 23.67 GiB memory in use."
        ),
    ),
    (
        "cuda-allocator",
        RuntimeError("CUDA out of memory. Tried to allocate 8.13 GiB (GPU 0; 10.76 GiB total capacity)"),
    ),
    ("hip-allocator", torch.OutOfMemoryError("HIP out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total")),
    ("xpu-allocator", torch.OutOfMemoryError("XPU out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total")),
    ("npu-allocator", RuntimeError("NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity;")),
    ("torch-out-of-memory-error", torch.OutOfMemoryError("Allocation on device")),
    (
        "mps-allocator",
        RuntimeError(
            "MPS backend out of memory (MPS allocated: 17.36 GB, other allocations: 613.56 MB, max allowed: 18.13 GB). "
            "Tried to allocate 192.00 MB on private pool."
        ),
    ),
    ("mps-buffer", RuntimeError("Invalid buffer size: 19.45 GB")),
    ("mps-buffer", RuntimeError("Invalid buffer size: 104.25 GiB")),
    ("hpu-allocator", RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB")),
    ("openmp-thread", RuntimeError("libgomp: Thread creation failed: Resource temporarily unavailable")),
    ("openmp-thread", RuntimeError("cannot allocate memory for thread-local data: ABORT")),
    (
        "cpu-allocator",
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ),
    (
        "cpu-allocator-windows",
        RuntimeError(
            "[enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: "
            "you tried to allocate 26214400 bytes."
        ),
    ),
    ("cpu-tensor-sizes", RuntimeError("Could not allocate memory for Tensor SizesAndStrides!")),
    ("cpu-tensor-sizes", RuntimeError("Could not allocate memory to change Tensor SizesAndStrides!")),
    ("bad-alloc", RuntimeError("std::bad_alloc")),
    ("bad-alloc", RuntimeError("bad allocation")),
    ("cublas-alloc", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ("cublas-alloc", RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`")),
    ("cusolver-alloc", RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate()`")),
    ("cufft-alloc", RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED")),
    ("cufft-internal", RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR")),
    ("cudnn-alloc", RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ("cudnn-alloc", RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED")),
    ("cudnn-no-engine", RuntimeError("GET was unable to find an engine to execute this computation")),
    ("cudnn-no-engine", RuntimeError("FIND was unable to find an engine to execute this computation")),
    (
        "cudnn-not-supported",
        RuntimeError(
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
        ),
    ),
    ("xpu-runtime", RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)")),
    ("xpu-runtime", RuntimeError("level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)")),
    ("xpu-resources", RuntimeError("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)")),
    ("xpu-resources", RuntimeError("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)")),
    ("onednn-primitive", RuntimeError("could not create a primitive")),
    ("onednn-primitive", RuntimeError("could not execute a primitive")),
    ("onednn-memory", RuntimeError("could not create a memory object")),
    ("mkl-memory", RuntimeError("MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate")),
    ("library", RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")),
    ("library", AcceleratorError("CUDA error: out of memory")),
    ("library", RuntimeError("HIP error: out of memory")),
    ("library", RuntimeError("Triton Error [CUDA]: out of memory")),
    ("library", RuntimeError("NCCL error in: NCCLUtils.hpp:330\nLast error:\nCuda failure 2 'out of memory'")),
    ("library", RuntimeError("cuda failed with error 2 out of memory. use CUDA_LAUNCH_BLOCKING=1")),
    (
        "library",
        RuntimeError("Error: 'err == cudaSuccess' failed: failed to cudaMalloc 8 bytes (error 2 out of memory)"),
    ),
    (
        "too-large-32-bit-index",
        RuntimeError("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false."),
    ),
    ("too-large-32-bit-index", RuntimeError("input tensor must fit into 32-bit index math")),
    ("too-large-integer", RuntimeError("integer out of range\nException raised from safe_downcast at Pool.h:41")),
    ("too-large-int-max", RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements, file a")),
    (
        "too-large-mps",
        RuntimeError(
            "Output size of the matrix multiplication is larger than currently supported by the MPS backend: "
            "72250,72250, needs to be less than 2**32 elements"
        ),
    ),
    ("too-large-mps", RuntimeError("MPSGraph does not support tensor dims larger than INT_MAX")),
    ("too-large-storage", RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]")),
    ("too-large-storage", RuntimeError("numel: integer multiplication overflow")),
    ("too-large-operator", RuntimeError("quantile() input tensor is too large")),
    ("too-large-operator", RuntimeError("number of categories cannot exceed 2^24")),
]

INNOCENT: list[BaseException] = [
    KeyError("exp_avg_sq"),
    ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 16])"),
    RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"),
    RuntimeError("Need to provide pin_memory_device to pin memory"),
    RuntimeError("unsupported memory format option ChannelsLast"),
    RuntimeError("required rank 4 tensor to use channels_last format; unsupported memory format"),
    RuntimeError(
        "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location."
    ),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_INVALID_SIZE"),
    RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    # A shape or a dtype that oneDNN has no kernel for: intel-extension-for-pytorch#375, torch-xpu-ops#4066.
    RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload"),
    RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    RuntimeError(
        "DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory. Please try to raise your shared memory limit."
    ),
    RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376."),
    RuntimeError("gradient checkpointing is off. If the card runs out of memory, switch it on."),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x1)"),
    IndexError("index out of range in self"),
    ValueError("Scalar -2779057358 is out of range for type int32"),
    # The text of an out-of-memory in an exception that no part of torch raises with it.
    AssertionError("CUDA out of memory. Tried to allocate"),
]


def name_rule(error: BaseException) -> str | None:
    rule = find_rule(error)
    return rule.name if rule else None


@pytest.mark.parametrize(("rule", "error"), KNOWN, ids=[f"{rule}-{i}" for i, (rule, _) in enumerate(KNOWN)])
def test_known_message_falls_under_its_rule(rule: str, error: Exception) -> None:
    assert is_out_of_memory(error)
    assert name_rule(error) == rule


def test_every_rule_has_a_message() -> None:
    assert {rule for rule, _ in KNOWN} == {rule.name for rule in _RULES}


@pytest.mark.parametrize("error", INNOCENT, ids=[re.sub(r"\W+", "-", str(e))[:40] for e in INNOCENT])
def test_other_errors_fall_under_none(error: BaseException) -> None:
    assert name_rule(error) is None


def test_rules_in_doubt_say_what_else_they_mean() -> None:
    rule = find_rule(RuntimeError("GET was unable to find an engine to execute this computation"))
    assert rule is not None
    assert "cuDNN installation" in rule.doubt


class TestWhereItHides:
    def test_in_the_cause(self) -> None:
        error = ValueError("the training step failed")
        error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        assert name_rule(error) == "cuda-allocator"

    def test_in_the_context_even_when_suppressed(self) -> None:
        def wrap() -> None:
            try:
                raise MemoryError
            except MemoryError:
                raise ValueError("wrapped") from None

        with pytest.raises(ValueError, match="wrapped") as raised:
            wrap()
        assert name_rule(raised.value) == "memory-error"

    def test_in_a_group(self) -> None:
        group = ExceptionGroup("ranks", [ValueError("a"), ExceptionGroup("more", [RuntimeError("std::bad_alloc")])])
        assert name_rule(group) == "bad-alloc"

    def test_in_a_loader_worker(self) -> None:
        text = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        assert is_out_of_memory(RuntimeError(f"{text}RuntimeError: DefaultCPUAllocator: can't allocate memory: you"))

    def test_circles_end(self) -> None:
        first, second = ValueError("a"), ValueError("b")
        first.__context__, second.__context__ = second, first
        assert not is_out_of_memory(first)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_an_interrupt_is_never_one(self, kind: type[BaseException]) -> None:
        error = kind()
        error.__context__ = MemoryError()
        assert not is_out_of_memory(error)
        assert not is_out_of_memory(BaseExceptionGroup("both", [error, MemoryError()]))


class TestRealErrors:
    def test_torch_cpu(self) -> None:
        with pytest.raises(RuntimeError) as raised:
            torch.empty(2**50)
        assert name_rule(raised.value) == "cpu-allocator"

    def test_torch_overflow(self) -> None:
        with pytest.raises(RuntimeError) as raised:
            torch.empty(2**61, 2**10)
        assert name_rule(raised.value) == "too-large-storage"

    def test_numpy_and_python(self) -> None:
        with pytest.raises(MemoryError) as raised:
            np.empty(2**60, dtype=np.uint8)
        assert name_rule(raised.value) == "memory-error"
        with pytest.raises(MemoryError) as raised:
            bytearray(2**60)
        assert name_rule(raised.value) == "memory-error"

    def test_operator_limits(self) -> None:
        with pytest.raises(RuntimeError) as raised:
            torch.quantile(torch.zeros(2**24 + 1), 0.5)
        assert name_rule(raised.value) == "too-large-operator"
        with pytest.raises(RuntimeError) as raised:
            torch.multinomial(torch.ones(1).expand(2**24 + 1), 1)
        assert name_rule(raised.value) == "too-large-operator"

    def test_batch_norm_of_one_and_a_half_made_adam_are_not_memory(self) -> None:
        with pytest.raises(ValueError, match="more than 1 value per channel") as one:
            nn.BatchNorm1d(4)(torch.zeros(1, 4))
        assert not is_out_of_memory(one.value)
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optimizer = torch.optim.Adam([weight])
        optimizer.state[weight] = {"step": torch.zeros(()), "exp_avg": torch.zeros(2)}
        with pytest.raises(KeyError) as half:
            optimizer.step()
        assert not is_out_of_memory(half.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA bounds memory on Linux only")
@pytest.mark.parametrize(
    ("kind", "budget_mib", "size"),
    [
        ("mlp", 20, 20000),
        pytest.param("conv", 20, 400, marks=pytest.mark.slow),
        pytest.param("lstm", 8, 1200, marks=pytest.mark.slow),
    ],
)
def test_every_error_of_a_step_under_a_real_limit_is_recognised(kind: str, budget_mib: int, size: int) -> None:
    child = Path(__file__).with_name("limited_child.py")
    ran = subprocess.run(
        [sys.executable, str(child), kind, str(budget_mib), str(size)], capture_output=True, text=True, timeout=120
    )
    tries = [json.loads(line) for line in ran.stdout.splitlines()]
    errors = [each for each in tries if each["rule"] != "fits"]
    assert ran.returncode == 0, ran.stderr
    assert errors, "the limit was never reached, so this test shows nothing"
    assert [each["error"] for each in errors if each["rule"] is None] == []
    assert {each["rule"] for each in errors} <= {"cpu-allocator", "onednn-primitive", "bad-alloc", "memory-error"}
