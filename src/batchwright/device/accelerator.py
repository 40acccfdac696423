"""An accelerator as a device: CUDA, ROCm, XPU and MPS, through torch's own counters.

Promises:
- the three peaks are those torch and the driver report; one that a backend does not report is None;
- memory of an earlier probe is given back before the next one starts;
- time is read only when the device has finished what it was asked to do.

Not run by us: there was no accelerator on the machines this was written on. Its tests are marked `gpu`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.outcome import Outcome, judge
from batchwright.device.step import ProbesWhatItWatches
from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


@dataclass(frozen=True)
class AcceleratorDevice(ProbesWhatItWatches):
    """One card of this machine, such as `cuda:0`."""

    device: torch.device
    limit_bytes: int | None = None

    @property
    def name(self) -> str:
        """How the device is asked for."""
        return str(self.device)

    @property
    def torch_device(self) -> torch.device:
        """Where model and batches are placed."""
        return self.device

    @property
    def kind(self) -> str:
        """`accelerator`: it runs for real, on a card."""
        return "accelerator"

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
            with self._as_current(), self._limited():
                return run()

        self._module.empty_cache()
        self._call("reset_peak_memory_stats")
        outcome = judge(
            run_here, micro_batch=micro_batch, shape=shape or {}, accumulation=accumulation, peak=self._peak_bytes
        )
        self._module.empty_cache()
        return outcome

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

    def _as_current(self) -> contextlib.AbstractContextManager[Any]:
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
