"""What charts show of a batch: eight names, filled from whatever results are at hand.

Promises:
- every value is a finite number: what is unresolved, infinite or not known is left out, never written as NaN;
- sizes are in samples, `batch/units` in what the loss is a mean over, `batch/waste` a share from 0 to 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchwright.accumulate.step import Step
from batchwright.errors import InvalidInputError
from batchwright.noise.critical_batch import CriticalBatch
from batchwright.planning.plan import Plan
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

MICRO = "batch/micro"
ACCUMULATION = "batch/accumulation"
EFFECTIVE = "batch/effective"
CRITICAL = "batch/critical"
CRITICAL_LOW = "batch/critical_low"
CRITICAL_HIGH = "batch/critical_high"
UNITS = "batch/units"
WASTE = "batch/waste"
KEYS = (MICRO, ACCUMULATION, EFFECTIVE, CRITICAL, CRITICAL_LOW, CRITICAL_HIGH, UNITS, WASTE)

_TIMES = " \N{MULTIPLICATION SIGN} "
EFFECTIVE_BATCH_ENTRY = "Config/effective_batch_size"


def batch_metrics(*results: Any, devices: int | None = None) -> dict[str, float]:
    """Return the `batch/*` metrics that some results know of; where two know the same, the later one has its say.

    >>> from batchwright.planning.plan import plan
    >>> from batchwright.noise.critical_batch import CriticalBatch
    >>> batch_metrics(plan(64, micro_batch=8, devices=2))
    {'batch/micro': 8, 'batch/accumulation': 4, 'batch/effective': 64}
    >>> batch_metrics(CriticalBatch(212.0, 168.0, math.inf, unit="samples", observations=9))
    {'batch/critical_low': 168.0}

    A result is a `Plan`, a `NoiseScale` or its `critical_batch`, a `Step` of an Accumulator, a `TokenBatchSampler` or
    its `stats()` (which costs a plan of an epoch: hand in the stats, not the sampler, where it is asked often), or the
    rows of `pack`. None is a result that is not there yet. `devices` are the ranks that a `Step` is spread over: by
    default the plan's, or those of the process group.
    """
    planned = next((result.devices for result in results if isinstance(result, Plan)), None)
    spread = whole_number(devices, "devices") if devices is not None else planned or _num_ranks()
    found: dict[str, float] = {}
    for result in results:
        found.update(_of_result(result, spread))
    return {key: found[key] for key in KEYS if key in found and math.isfinite(found[key])}


def effective_batch_text(micro_batch: int | Plan, accumulation: int = 1, devices: int = 1) -> str:
    """Write an effective batch as a product, devices only where there are several.

    >>> effective_batch_text(8, 4), effective_batch_text(8, 4, 2)
    ('8 × 4 = 32', '8 × 4 × 2 = 64')
    >>> from batchwright.planning.plan import plan
    >>> effective_batch_text(plan(10, micro_batch=4, policy="exact"))
    '3-4 × 3 = 10'
    """  # noqa: RUF002
    if isinstance(micro_batch, Plan):
        split = micro_batch.split
        micro = f"{split.smallest}-{split.largest}" if split.smallest != split.largest else f"{split.largest}"
        accumulation, devices, effective = split.accumulation, split.devices, split.samples
    else:
        whole_number(accumulation, "accumulation")
        whole_number(devices, "devices")
        micro = f"{whole_number(micro_batch, 'micro-batch')}"
        effective = micro_batch * accumulation * devices
    factors = [micro, f"{accumulation}", *([f"{devices}"] if devices > 1 else [])]
    return f"{_TIMES.join(factors)} = {effective}"


def configured_metrics(micro_batch: int | None, accumulation: int, devices: int) -> dict[str, float]:
    """Return the metrics of a framework's own settings; without a micro-batch there is no effective batch either.

    >>> configured_metrics(8, 4, 2)
    {'batch/micro': 8, 'batch/accumulation': 4, 'batch/effective': 64}
    """
    if micro_batch is None:
        return {ACCUMULATION: accumulation}
    return {MICRO: micro_batch, ACCUMULATION: accumulation, EFFECTIVE: micro_batch * accumulation * devices}


def _of_result(result: Any, devices: int) -> Mapping[str, float]:
    if result is None:
        return {}
    if isinstance(result, Plan):
        return {MICRO: result.micro_batch, ACCUMULATION: result.accumulation, EFFECTIVE: result.effective_batch}
    if isinstance(result, Step):
        return _of_step(result, devices)
    if isinstance(result, CriticalBatch):
        return _of_critical_batch(result)
    if hasattr(result, "critical_batch"):
        return _of_result(result.critical_batch, devices)
    if isinstance(getattr(result, "waste", None), float):
        return {WASTE: result.waste}
    if callable(getattr(result, "stats", None)):
        return {WASTE: result.stats().waste}
    raise InvalidInputError(
        f"batch_metrics takes a Plan, a NoiseScale or its critical_batch, a Step, a TokenBatchSampler or its stats(); "
        f"received {shortened(result)}."
    )


def _of_critical_batch(found: CriticalBatch) -> dict[str, float]:
    # Beside batch/effective, which is in samples; where nothing tells them, in what was counted.
    found = found.in_samples() or found
    if found.resolved:
        return {CRITICAL: found.value, CRITICAL_LOW: found.low, CRITICAL_HIGH: found.high}
    # The lower end holds without the upper one; 0 is what an interval begins at that says nothing.
    return {CRITICAL_LOW: found.low} if found.low > 0 else {}


def _of_step(step: Step, devices: int) -> dict[str, float]:
    found: dict[str, float] = {ACCUMULATION: step.micro_batches / devices, UNITS: step.units}
    if step.samples is not None:
        found[EFFECTIVE] = step.samples
        # On average: the micro-batches of a window may differ.
        found[MICRO] = step.samples / step.micro_batches if step.micro_batches else math.nan
    return found


def _num_ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
