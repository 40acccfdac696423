"""The CPU under a real byte budget: the kernel itself refuses what goes beyond.

Promises:
- the budget covers everything taken from before the model is built: tensors, thread stacks, what kernels keep;
- weights of a model that was handed in, and so exist already, are inside the budget; what a process held besides them
  is outside it;
- the limit is on during a probe only.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from batchwright.device.host import HostDevice
from batchwright.device.outcome import Outcome, judge
from batchwright.device.peak_bytes import PeakBytes
from batchwright.device.probing import ProbesWhatItWatches
from batchwright.device.process_memory import PeakWatch, give_back, holes_filled, limited_to
from batchwright.state.kept_tensor import storages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


# A later process takes a little more than a probe of two steps saw: what its heaps had free at the start differs, and a
# process creeps after its second step. 0.3 MiB on the models of benchmarks/fit_heaps.py, 0.8 MiB the most on any other
# that no tolerance is judged on; 1 MiB is held back.
_HEAPS_DIFFER_BYTES = 2**20
# torch splits an elementwise operator over its threads in pieces of 32,768.
_ENOUGH_FOR_ALL_THREADS = 32_768 * 64


@dataclass(frozen=True)
class LimitedHost(ProbesWhatItWatches):
    """This machine's memory, of which a probe may take so many bytes.

    >>> from batchwright.workload import Workload
    >>> workload = Workload(model=nn.Linear(8, 1), batch=lambda n: torch.zeros(n, 8), loss=lambda m, b: m(b).mean())
    >>> LimitedHost(limit_bytes=2**28).probe(workload, 4).verdict
    'fits'
    >>> LimitedHost(limit_bytes=2**28).probe(workload, 2**24).verdict
    'out_of_memory'
    """

    limit_bytes: int
    held_bytes: int = 0
    """Of what the process holds before a probe, this much belongs to the budget: a live model's weights."""

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
        """The budget."""
        return self.limit_bytes

    @property
    def free_bytes(self) -> int | None:
        """The budget, or what the machine still has if that is less."""
        free = HostDevice().free_bytes
        return self.limit_bytes if free is None else min(self.limit_bytes, free)

    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
    ) -> Outcome:
        """Run anything under the budget and say how it ended."""
        _import_the_rest()
        clear_kernel_buffers()
        with holes_filled(), PeakWatch() as watch:
            outside = watch.bytes_before - self.held_bytes - _HEAPS_DIFFER_BYTES
            # Threads first: their stacks belong to the budget, but OpenMP ends the process if it cannot start one.
            torch.ones(_ENOUGH_FOR_ALL_THREADS).add_(1)
            watch.look_from_here()

            def run_limited() -> tuple[float, ...]:
                with limited_to(outside + self.limit_bytes):
                    return run()

            outcome = judge(
                run_limited,
                micro_batch=micro_batch,
                shape=shape or {},
                accumulation=accumulation,
                # What ran under the limit cannot have exceeded it, though the reading is only so exact.
                peak=lambda: PeakBytes(device=min(watch.peak_bytes() - outside, self.limit_bytes)),
            )
        give_back()
        # What the kernel refused counts in its peak as well, so after a refusal the peak says nothing.
        return outcome if outcome.fits else replace(outcome, peak_bytes=None)


def live_bytes(things: Iterable[Any]) -> int:
    """Bytes of what exists already: weights, buffers and gradients of modules, states of optimizers; nothing twice.

    >>> live_bytes([nn.Linear(8, 1), "no module"])
    36
    """
    tensors: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            tensors += [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, torch.optim.Optimizer):
            tensors += [parameter for group in thing.param_groups for parameter in group["params"]]
            tensors += [t for state in thing.state.values() for t in tree_leaves(dict(state)) if torch.is_tensor(t)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    real = [t for t in tensors if t.device.type == "cpu" and not is_traceable_wrapper_subclass(t)]
    return sum(dict(storage for tensor in real for storage in storages_of(tensor)).values())


def clear_kernel_buffers() -> None:
    """Have MKL give back the buffers it keeps for sizes that ran before: 3 to 50 MiB that a fresh process has free."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers()


def _import_the_rest() -> None:
    """Import what torch imports only when the first optimizer is made: imports are outside a budget."""
    import torch._dynamo  # noqa: F401
