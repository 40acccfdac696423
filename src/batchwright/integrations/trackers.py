"""Where metrics go: TensorBoard, Weights & Biases, MLflow, Trackio, a Lightning logger, or a function of one's own.

What cannot be written to is refused when a tracker is made, before training; what fails later is `Tracker`'s matter.
None of these packages is imported here, but by whoever hands in what is theirs.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.integrations.tracker import Tracker
from batchwright.units import shortened


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


class TrackioRun(Tracker):
    """A run of Trackio."""

    name = "Trackio"

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.target.log(metrics, step=step)

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


class LightningLogger(Tracker):
    """A logger of Lightning; it writes on rank 0 only."""

    name = "Lightning's logger"

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.target.log_metrics(metrics, step=step)

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
