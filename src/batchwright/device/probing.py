"""A probe on any device: the same full steps, watched by the device that runs them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from batchwright.device.step import DEFAULT_STEPS, run_probe
from batchwright.state.untouched import untouched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from batchwright.device.outcome import Outcome
    from batchwright.workload import Workload


class ProbesWhatItWatches(ABC):
    """A device that can watch anything run, and so can probe."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where model and batches are placed."""

    @abstractmethod
    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
    ) -> Outcome:
        """Run anything and say how it ended."""

    def now(self) -> float:
        """Read the clock between steps."""
        return time.perf_counter()

    def probe(
        self,
        workload: Workload,
        micro_batch: int,
        *,
        shape: Mapping[str, Any] | None = None,
        steps: int = DEFAULT_STEPS,
        accumulation: int = 1,
        clip_norm: float | None = None,
    ) -> Outcome:
        """Run full steps at one size, say how it went, and give back what is the user's."""
        with untouched(workload, accelerator=None if self.torch_device.type == "cpu" else self.torch_device):
            return self.watch(
                lambda: run_probe(
                    workload,
                    micro_batch,
                    device=self.torch_device,
                    shape=shape,
                    steps=steps,
                    accumulation=accumulation,
                    clip_norm=clip_norm,
                    now=self.now,
                ),
                micro_batch=micro_batch,
                shape=shape,
                accumulation=accumulation,
                **self._met_before(workload),
            )

    def _met_before(self, workload: Workload) -> dict[str, Any]:
        """What `watch` of this device has to be told about a workload; nothing, for most."""
        return {}
