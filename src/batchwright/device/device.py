"""`Device`: a place where probes run, and how it is opened by name.

Promises:
- whatever the device, a probe takes the same workload and yields the same `Outcome`;
- a device that this machine does not have is an error that names those it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from batchwright.device.accelerator import AcceleratorDevice
from batchwright.device.host import HostDevice, LimitedHost
from batchwright.device.process_memory import can_limit
from batchwright.device.step import DEFAULT_STEPS, PLAIN_STEP, StepSettings
from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from batchwright.device.outcome import Outcome
    from batchwright.workload import Workload


ACCELERATORS = ("cuda", "mps", "xpu")


class Device(Protocol):
    """A place where probes run."""

    @property
    def name(self) -> str:
        """How the device is asked for."""

    @property
    def kind(self) -> str:
        """What it is: `host`, `accelerator` or `simulated`."""

    @property
    def total_bytes(self) -> int | None:
        """Memory there is; None where it is not known."""

    @property
    def free_bytes(self) -> int | None:
        """Memory that can still be taken; None where it is not known."""

    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
        held: Iterable[torch.Tensor] = (),
    ) -> Outcome:
        """Run anything and say how it ended; `held` are tensors that exist, for a device that counts tensors."""

    def probe(
        self, workload: Workload, micro_batch: int, settings: StepSettings = PLAIN_STEP, *, steps: int = DEFAULT_STEPS
    ) -> Outcome:
        """Run full steps at one size and say how it went."""


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

    >>> open_device("cpu").kind
    'host'
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
