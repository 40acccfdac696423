"""The host as a device: a probe runs for real, in this process, in main memory.

Promises:
- the peak is counted in bytes of tensors, from before the model is built;
- a limit is kept by counting: the size that would exceed it is out of memory, and the machine is never filled;
- free memory respects the cgroup, so that what is asked for does not wake the kernel's killer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from batchwright.device.byte_counter import ByteCounter
from batchwright.device.outcome import Outcome, judge
from batchwright.device.peak_bytes import PeakBytes
from batchwright.device.probing import ProbesWhatItWatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from batchwright.workload import Workload


@dataclass(frozen=True)
class HostDevice(ProbesWhatItWatches):
    """This machine's processor and memory.

    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params),
    ... )
    >>> HostDevice().probe(workload, 4).verdict, HostDevice(limit_bytes=100).probe(workload, 4).verdict
    ('fits', 'out_of_memory')
    """

    limit_bytes: int | None = None

    @property
    def name(self) -> str:
        """How the device is asked for."""
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        """Where model and batches are placed."""
        return torch.device("cpu")

    @property
    def kind(self) -> str:
        """`host`: it runs for real, in main memory."""
        return "host"

    @property
    def total_bytes(self) -> int | None:
        """Memory there is: the limit if one is set, else the machine's or the cgroup's, whichever is less."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        return _least(_physical_bytes(), *(limit for limit, _ in _cgroups()))

    @property
    def free_bytes(self) -> int | None:
        """Memory that can still be taken without swapping; None where the system does not say."""
        return _least(self.limit_bytes, _available_bytes(), *(limit - used for limit, used in _cgroups()))

    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
        held: Iterable[torch.Tensor] = (),
    ) -> Outcome:
        """Run anything and say how it ended; `held` are tensors that exist already and count."""
        counter = ByteCounter(limit_bytes=self.limit_bytes)

        def run_counted() -> tuple[float, ...]:
            with counter:
                counter.count(held)
                return run()

        return judge(
            run_counted,
            micro_batch=micro_batch,
            shape=shape or {},
            accumulation=accumulation,
            # No caching allocator of torch's stands between a CPU tensor and the system: nothing is reserved.
            peak=lambda: PeakBytes(allocated=counter.peak_bytes),
        )

    def _met_before(self, workload: Workload) -> dict[str, Any]:
        model = workload.model
        return {"held": [*model.parameters(), *model.buffers()]} if isinstance(model, nn.Module) else {}


def _least(*amounts: int | None) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return max(0, min(known)) if known else None


def _physical_bytes() -> int | None:
    # Windows has no sysconf: there the answer is "not known", and a limit must be given.
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _available_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """Return (limit, used) of each cgroup around this process that has a limit; of version 2 and of version 1."""
    found = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, limit_file, used_file = root, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                base, limit_file, used_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            # A limit may sit on any group above ours; inside a container our own path may not be visible at all.
            group = base / path.lstrip("/")
            for place in (group, *group.parents):
                # "max" is no number, and version 1 writes "no limit" as a number near 2**63.
                with suppress(OSError, ValueError):
                    limit = int((place / limit_file).read_text())
                    if limit < 2**60:
                        found.append((limit, int((place / used_file).read_text())))
                if place == base:
                    break
    return found
