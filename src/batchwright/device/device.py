"""The devices of this machine, how one is opened by name, and what a traced step runs on in place of one.

Promises:
- whatever the device, a probe takes the same workload and yields the same `Outcome`;
- a device that this machine does not have is an error that names those it has;
- the three peaks of an accelerator (CUDA, ROCm, XPU, MPS) are those torch and the driver report; one that a backend
  does not report is None;
- memory of an earlier probe is given back before the next one starts;
- time is read only when the device has finished what it was asked to do.

Accelerators were not run by us: there was none on the machines this was written on. Their tests are marked `gpu`.

A trace over fake tensors knows operators and storages. How a device runs an operator (the copies its kernels hold, the
layout of what they make, what its libraries keep) and what happens when memory is taken there, is asked of `Kernels`
and `TracedMemory`. The host's are `trace/cpu_kernels.py` and `trace/storages.py`, a simulated card's
`simulated/operators/cuda_kernels.py` and `simulated/card.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from batchwright.device.host import HostDevice, LimitedHost, can_limit
from batchwright.device.outcome import Outcome, judge
from batchwright.device.step import Device
from batchwright.errors import InvalidInputError
from batchwright.units import PeakBytes, shortened

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

Operator = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
Owner = tuple[str, str, str]
"""Who takes memory: operator, module, phase."""

ACCELERATORS = ("cuda", "mps", "xpu")


@dataclass(frozen=True)
class AcceleratorDevice(Device):
    """One card of this machine, such as `cuda:0`."""

    device: torch.device
    limit_bytes: int | None = None

    @property
    def torch_device(self) -> torch.device:
        """Where model and batches are placed."""
        return self.device

    @property
    def total_bytes(self) -> int | None:
        """Memory of the card; on MPS, where it is the machine's own, what Metal recommends to stay under."""
        info = self._memory_info()
        if info is not None:
            return info[1]
        recommended = getattr(self._module, "recommended_max_memory", None)
        return int(recommended()) if recommended else None

    @property
    def free_bytes(self) -> int | None:
        """Memory that no process holds; None where the backend does not say."""
        info = self._memory_info()
        return info[0] if info is not None else None

    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
        held: Iterable[torch.Tensor] = (),
    ) -> Outcome:
        """Run anything on the card and say how it ended."""

        def run_here() -> tuple[float, ...]:
            with self.measured():
                return run()

        outcome = judge(
            run_here, micro_batch=micro_batch, shape=shape or {}, accumulation=accumulation, peak=self._peak_bytes
        )
        self._module.empty_cache()
        return outcome

    @contextlib.contextmanager
    def measured(self) -> Iterator[Callable[[], PeakBytes]]:
        """Count the peak from here on, on the card made current and under its limit; yields how to read it."""
        self._module.empty_cache()
        self._call("reset_peak_memory_stats")
        with self._as_current(), self._limited():
            yield self._peak_bytes

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Let torch's allocator take no more than the limit, where the backend can be told so (CUDA and XPU can)."""
        set_fraction = getattr(self._module, "set_per_process_memory_fraction", None)
        total = self.total_bytes
        if self.limit_bytes is None or set_fraction is None or not total:
            yield
            return
        set_fraction(min(1.0, self.limit_bytes / total), self.device)
        try:
            yield
        finally:
            set_fraction(1.0, self.device)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def _as_current(self) -> AbstractContextManager[Any]:
        # Kernels that users bring (Triton) start on the current card, whatever card their tensors are on.
        switch = getattr(self._module, "device", None)
        return contextlib.nullcontext() if switch is None else switch(self.device)

    def now(self) -> float:
        """Read the clock when the device has finished what it was asked to do."""
        # Kernels are queued: without waiting, the clock would time the queueing.
        torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def _peak_bytes(self) -> PeakBytes:
        info = self._memory_info()
        reserved = self._call("max_memory_reserved")
        if reserved is None and self.device.type == "mps":
            # MPS keeps no peaks, but its pool does not shrink by itself, so its size at the end is its largest.
            reserved = self._module.driver_allocated_memory()
        return PeakBytes(
            allocated=self._call("max_memory_allocated"),
            reserved=reserved,
            # Everything on the card: the context, other processes, and the pool, which still has its largest size
            # here. After out-of-memory torch has emptied the pool, so there this is less than the peak.
            device=info[1] - info[0] if info is not None else None,
        )

    def _memory_info(self) -> tuple[int, int] | None:
        """Return free and total bytes of the card as the driver sees them."""
        try:
            info = self._call("mem_get_info")
        except RuntimeError:  # Some XPU drivers cannot be asked.
            return None
        return (int(info[0]), int(info[1])) if info is not None else None

    def _call(self, name: str) -> Any:
        """Ask the backend, or return None where it has no such function (MPS has few of them)."""
        function = getattr(self._module, name, None)
        return None if function is None else function(self.device)


def open_limited(on: str, limit_bytes: int | None, *, held_bytes: int = 0) -> Device:
    """Open a device of which no more than so many bytes may be taken.

    On Linux the kernel keeps the limit of a CPU; elsewhere tensors are counted. Of an accelerator its allocator is
    told, and of the bytes this process holds already `held_bytes` belong to the budget.
    """
    device = open_device(on)
    if limit_bytes is None:
        return device
    if isinstance(device, AcceleratorDevice):
        return AcceleratorDevice(device.device, limit_bytes)
    return LimitedHost(limit_bytes, held_bytes) if can_limit() else HostDevice(limit_bytes)


def open_device(on: str | None = None) -> Device:
    """Open a device of this machine by its name: cpu, cuda, cuda:1, mps or xpu; `default_device()` without a name.

    >>> open_device("cpu").name
    'cpu'
    >>> open_device("tpu")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: no device is called 'tpu'; this machine has: cpu...
      try: one of cpu, cuda, cuda:1, mps, xpu
    """
    on = default_device() if on is None else on
    here = ", ".join(present_devices())
    kind, colon, number = on.partition(":")
    if on == "cpu":
        return HostDevice()
    if kind not in ACCELERATORS or (colon and not (number.isascii() and number.isdigit())):
        raise InvalidInputError(
            f"no device is called {shortened(on)}; this machine has: {here}.",
            remedy="one of cpu, cuda, cuda:1, mps, xpu",
        )
    if _count(kind) == 0:
        raise InvalidInputError(
            f"{on} was asked for, but torch {torch.__version__} finds no {kind} device; this machine has: {here}.",
            remedy="one that is there, or a build of torch for the accelerator",
        )
    index = int(number) if colon else 0
    if index >= _count(kind):
        raise InvalidInputError(f"{on} was asked for; this machine has: {here}.", remedy=f"{kind}:0")
    return AcceleratorDevice(torch.device(kind, index))


def default_device() -> str:
    """Return the device to use where none was named: the machine's accelerator, cpu where there is none.

    Without a number, so that under torchrun each rank takes its own.
    """
    return next((kind for kind in ACCELERATORS if _count(kind)), "cpu")


def present_devices() -> tuple[str, ...]:
    """Return the names of the devices of this machine, the host first."""
    return ("cpu", *(f"{kind}:{index}" for kind in ACCELERATORS for index in range(_count(kind))))


def _count(kind: str) -> int:
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = torch.get_device_module(kind)
    return int(module.device_count()) if module.is_available() else 0


class Moment(NamedTuple):
    """One thing that happens inside an operator: a copy is made or dropped, or an output is made."""

    num_bytes: int = 0
    output: torch.Tensor | None = None


def around(copies: list[int], outputs: list[Moment]) -> list[Moment]:
    """Add copies that are made after the outputs, and dropped when the operator ends."""
    return [*outputs, *map(Moment, copies), *(Moment(-num_bytes) for num_bytes in reversed(copies))]


class Kernels(Protocol):
    """How a device runs operators."""

    def following(self) -> AbstractContextManager[Any]:
        """Return what must be entered while an operator is followed."""

    def take_arguments(
        self, func: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
    ) -> Arguments:
        """Return an operator's arguments as the device takes them."""

    def library_bytes(self, func: Operator, phase: str) -> int:
        """Return the bytes that a library takes for itself at this operator, and keeps."""

    def shape_rule(self, func: Operator) -> Operator | None:
        """Return what tells shapes and layouts of an operator's results; None if it makes nothing."""

    def moments_of(
        self, func: Operator, args: Sequence[Any], outputs: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
    ) -> list[Moment]:
        """Return what happens inside an operator, in order: each of its outputs once, and the copies around them."""


class TracedMemory(Protocol):
    """The memory whose storages are followed."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""

    def malloc(self, num_bytes: int, owner: Owner) -> Any:
        """Take memory, and return a handle to give it back by."""

    def free(self, block: Any) -> None:
        """Give memory back."""

    def record_stream(self, block: Any, stream: int) -> None:
        """Note that a stream uses memory that was taken on another one."""

    def launched(self) -> None:
        """Note that an operator was launched."""

    def waited_for(self) -> None:
        """Note that the host waited for all that was launched."""
