"""Metrics of a batch, and where they go: TensorBoard, Weights & Biases, MLflow, Trackio, a Lightning logger, ...

None of these packages is imported here, but by whoever hands in what is theirs.

Promises:
- eight names, filled from whatever results are at hand; every value is a finite number: what is unresolved, infinite or
  not known is left out, never written as NaN;
- sizes are in samples, `batch/units` in what the loss is a mean over, `batch/waste` a share from 0 to 1;
- what cannot be written to is refused when a tracker is made, before training; after that nothing here ends a training:
  a target that fails, or a value that is no number, is warned of once, left out and counted in `failures`.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from batchwright.accumulate.windows import Step
from batchwright.errors import InvalidInputError
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.plan import Plan
from batchwright.units import shortened, whole_number

__all__ = ["batch_metrics", "effective_batch_text", "tracker_for"]

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
    """Return the `batch/*` metrics that some results know of; where two know the same, the later one counts.

    >>> from batchwright.planning.plan import plan
    >>> from batchwright.planning.critical_batch import CriticalBatch
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
    metrics: dict[str, float] = {}
    for result in results:
        metrics.update(_of_result(result, spread))
    return {key: metrics[key] for key in KEYS if key in metrics and math.isfinite(metrics[key])}


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


def _of_critical_batch(critical: CriticalBatch) -> dict[str, float]:
    # Beside batch/effective, which is in samples; where nothing tells them, in what was counted.
    critical = critical.in_samples() or critical
    if critical.resolved:
        return {CRITICAL: critical.value, CRITICAL_LOW: critical.low, CRITICAL_HIGH: critical.high}
    # The lower end holds without the upper one; 0 is what an interval begins at that says nothing.
    return {CRITICAL_LOW: critical.low} if critical.low > 0 else {}


def _of_step(step: Step, devices: int) -> dict[str, float]:
    metrics: dict[str, float] = {ACCUMULATION: step.micro_batches / devices, UNITS: step.units}
    if step.samples is not None:
        metrics[EFFECTIVE] = step.samples
        # On average: the micro-batches of a window may differ.
        metrics[MICRO] = step.samples / step.micro_batches if step.micro_batches else math.nan
    return metrics


def _num_ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class TrackerWarning(UserWarning):
    """Something was not written to a tracker; training went on."""


class Tracker(ABC):
    """One place that metrics go to; made by `tracker_for`."""

    name = "the tracker"

    def __init__(self, target: Any) -> None:
        self.target = target
        self.failures = 0
        """Calls that the target did not take, and values that were no numbers."""
        self._warned: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write numbers under their names at a step; what is infinite or NaN is left out."""
        numbers = {key: self._number(key, value) for key, value in metrics.items()}
        finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
        if finite:
            self._try(f"log at step {step}", lambda: self._log(finite, step))

    def write(self, name: str, text: str) -> None:
        """Write a text that describes the run."""
        self._try(f"{name} = {text}", lambda: self._write(name, text))

    def log_effective_batch(self, micro_batch: int | Plan, accumulation: int = 1, devices: int = 1) -> None:
        """Write `Config/effective_batch_size`, as a product; see `effective_batch_text`."""
        self.write(EFFECTIVE_BATCH_ENTRY, effective_batch_text(micro_batch, accumulation, devices))

    @abstractmethod
    def _log(self, metrics: dict[str, float], step: int) -> None:
        """Hand finite numbers to the target."""

    @abstractmethod
    def _write(self, name: str, text: str) -> None:
        """Hand a text to the target, or the nearest that it has."""

    def _number(self, key: str, value: Any) -> float:
        try:
            # True would be drawn as 1, and a text of digits is still a text.
            if isinstance(value, bool | str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            self._warn(key, f"{key} must be a number; received {shortened(value)}. It was left out of the log.")
            return math.nan
        return value if isinstance(value, int) else number

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._warn(
                "",
                f"{self.name} did not take {what} ({reason}). Training goes on; this is said once, and the calls that "
                f"failed are counted in `failures`.",
            )

    def _warn(self, about: str, text: str) -> None:
        self.failures += 1
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, TrackerWarning, stacklevel=4)


class TensorBoard(Tracker):
    """A SummaryWriter of torch.utils.tensorboard or tensorboardX; one that was closed opens another file by itself."""

    name = "TensorBoard"

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for key, value in metrics.items():
            self.target.add_scalar(key, value, step)

    def _write(self, name: str, text: str) -> None:
        self.target.add_text(name, text)


class WandbRun(Tracker):
    """A run of Weights & Biases, or of what has its `log` and `config`."""

    name = "Weights & Biases"

    def _log(self, metrics: dict[str, float], step: int) -> None:
        # Its own step is not asked for: a run that is finished answers after 30 seconds, with an error. One that has
        # passed this step says so and drops the entry.
        self.target.log(metrics, step=step)

    def _write(self, name: str, text: str) -> None:
        self.target.config.update({name: text}, allow_val_change=True)


class TrackioRun(WandbRun):
    """A run of Trackio, which logs as Weights & Biases does."""

    name = "Trackio"

    def _write(self, name: str, text: str) -> None:
        self.target.config[name] = text
        # The config travels with the first log; what comes later is only seen as an entry of the log.
        if getattr(self.target, "_config_logged", False):
            self.target.log({name: text})


class MlflowModule(Tracker):
    """The module `mlflow`: its active run."""

    name = "MLflow"

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.target.log_metrics(metrics, step=step)

    def _write(self, name: str, text: str) -> None:
        # A tag, not a parameter: those cannot be changed, and a batch can.
        self.target.set_tag(name, text)


class MlflowRun(Tracker):
    """One run of MLflow, by a client."""

    name = "MLflow"

    def __init__(self, client: Any, run_id: str) -> None:
        super().__init__(client)
        self._run_id = run_id

    def _log(self, metrics: dict[str, float], step: int) -> None:
        metric = importlib.import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        entries = [metric(key, float(value), now, step) for key, value in metrics.items()]
        self.target.log_batch(self._run_id, metrics=entries)

    def _write(self, name: str, text: str) -> None:
        self.target.set_tag(self._run_id, name, text)


class LightningLogger(MlflowModule):
    """A logger of Lightning, which logs as MLflow does; it writes on rank 0 only."""

    name = "Lightning's logger"

    def _write(self, name: str, text: str) -> None:
        experiment = self.target.experiment
        if hasattr(experiment, "add_text"):
            experiment.add_text(name, text)
        else:
            self.target.log_hyperparams({name: text})


class Function(Tracker):
    """A function `log(metrics, step)`; texts have no place there."""

    name = "the function"

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.target(metrics, step)

    def _write(self, name: str, text: str) -> None:
        pass


def tracker_for(target: Any, *, run_id: str | None = None) -> Tracker:
    """Return the tracker that writes to a SummaryWriter, a run, a client, a logger or a function.

    >>> import math
    >>> tracker = tracker_for(lambda metrics, step: print(step, metrics))
    >>> tracker.log({"batch/micro": 8, "batch/critical": math.inf}, 3)
    3 {'batch/micro': 8}

    `target` is a SummaryWriter (torch.utils.tensorboard, tensorboardX), a run of Weights & Biases or Trackio, one of
    the modules `wandb`, `trackio`, `mlflow` with a run that is open, a run of MLflow, an MlflowClient with `run_id=`, a
    Lightning logger, or a function `log(metrics, step)`. A tracker is returned as it is.
    """
    if isinstance(target, Tracker):
        return target
    if isinstance(target, type):
        raise InvalidInputError(
            f"metrics cannot be logged to the class {target.__name__}.", remedy="one of it, as that package makes it"
        )
    if hasattr(target, "add_scalar") and hasattr(target, "add_text"):
        return TensorBoard(target)
    package = (getattr(target, "__name__", "") if _is_module(target) else type(target).__module__).partition(".")[0]
    if package == "mlflow":
        return _mlflow(target, run_id)
    if hasattr(target, "log_metrics") and hasattr(target, "log_hyperparams"):
        return LightningLogger(target)
    if _is_module(target) and package in ("wandb", "trackio"):
        target = _open_run(target, package)
    if hasattr(target, "log") and hasattr(target, "config"):
        return TrackioRun(target) if package == "trackio" else WandbRun(target)
    if callable(target):
        return Function(target)
    raise InvalidInputError(
        f"metrics cannot be logged to {shortened(target)}.",
        remedy="a SummaryWriter, a run of wandb, trackio or mlflow, an MlflowClient with run_id=..., a Lightning "
        "logger, or a function log(metrics, step)",
    )


def _mlflow(target: Any, run_id: str | None) -> Tracker:
    if _is_module(target):
        return MlflowModule(target)
    if hasattr(target, "log_batch"):
        if run_id is None:
            raise InvalidInputError(
                "an MlflowClient has many runs, and none was named.",
                remedy="tracker_for(client, run_id=run.info.run_id), or tracker_for(run)",
            )
        return MlflowRun(target, run_id)
    return MlflowRun(importlib.import_module("mlflow").MlflowClient(), target.info.run_id)


def _open_run(module: Any, package: str) -> Any:
    run = module.run if package == "wandb" else module.context_vars.current_run.get()
    if run is None:
        raise InvalidInputError(f"{package} has no open run.", remedy=f"{package}.init(project=...) before")
    return run


def _is_module(target: Any) -> bool:
    return type(target).__name__ == "module"
