"""The critical batch of the user's own program, measured while it trains unmodified.

Promises:
- gradients, weights and random numbers of the program are what they would be without the measurement;
- the samples of a micro-batch are those that the model received; the dimension they lie along is said if it is not 0;
- of several optimizers the answer is that of the one with the most weights, and a note names it.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import names_a_card
from batchwright.device.device import default_device
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.noise.noise_result import NoiseRun, TrendPoint, judge
from batchwright.noise.noise_scale import NoiseScale
from batchwright.noise.ramp import gamma_of
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.horizon import Stretch
from batchwright.scripts.command import ACCUMULATION, MICRO_BATCH
from batchwright.scripts.probe import Probes
from batchwright.scripts.recognise import with_recognised_options
from batchwright.units import counted, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

    from batchwright.scripts.script import Script
    from batchwright.scripts.script_run import ScriptRun


class NoiseMeasure:
    """In the program's process: watches the optimizers' weights from the second step on."""

    def __init__(self, num_windows: int) -> None:
        self._num_windows = num_windows
        self._roots: list[nn.Module] = []
        self._noise: dict[int, tuple[NoiseScale, torch.optim.Optimizer]] = {}
        self._notes: list[str] = []

    def seed(self) -> None:
        """The program's own random numbers are used."""

    def forward(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Remember the modules that the program calls."""
        if all(module is not root for root in self._roots):
            self._roots.append(module)

    def about_to_step(self, _: torch.optim.Optimizer) -> None:
        """Nothing to do."""

    def stepped(self, optimizer: torch.optim.Optimizer, run: ScriptRun) -> None:
        """Begin to watch once the module of the optimizer's weights, and the size of its batches, are known."""
        if id(optimizer) in self._noise:
            return
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        roots = [root for root in self._roots if held & {id(weight) for weight in root.parameters()}]
        size, dim = samples_of(run)
        if not roots or size is None:
            return
        root = max(roots, key=lambda module: sum(1 for _ in module.parameters()))
        try:
            noise = NoiseScale(root, optimizer=optimizer, micro_batch=size, batch_dim=dim)
        except BatchwrightError as error:
            self._notes.append(str(error))
            return
        if dim:
            noise.notes.append(f"samples were taken to lie along dimension {dim} of the model's inputs")
        noise.average_over(max(self._num_windows // 2, 1) * size * (run.accumulation or 1))
        self._noise[id(optimizer)] = noise, optimizer

    def result(self) -> dict[str, Any]:
        """Return what was measured of the optimizer with the most weights."""
        if not self._noise:
            return {"critical_batch": None, "skipped": {}, "notes": self._notes}
        noise, optimizer = max(self._noise.values(), key=lambda pair: _num_weights(pair[1]))
        if len(self._noise) > 1:
            noise.notes.append(
                f"{len(self._noise)} optimizers step; measured is {type(optimizer).__name__}, with the most weights"
            )
        group = optimizer.param_groups[0]
        critical = noise.critical_batch
        return {
            "critical_batch": None if critical is None else asdict(critical),
            "history": [(point.step, asdict(point.critical_batch)) for point in noise.history],
            "course": [asdict(stretch) for stretch in noise.stretches],
            "by_group": {name: asdict(value) for name, value in noise.by_group.items()},
            "gamma": gamma_of(noise.history),
            "optimizer": type(optimizer).__name__,
            "learning_rate": float(group.get("lr", 0.0)) or None,
            "betas": group.get("betas"),
            "weight_decay": group.get("weight_decay"),
            "skipped": noise.skipped,
            "notes": [*self._notes, *noise.notes],
        }


def samples_of(run: ScriptRun) -> tuple[int | None, int]:
    """Return how many samples the model receives, and along which dimension of its inputs they lie.

    >>> from batchwright.scripts.script_run import ScriptRun
    >>> samples_of(ScriptRun(input_shapes=((8, 35),), loader_batch_sizes=(8,)))
    (8, 0)
    >>> samples_of(ScriptRun(input_shapes=((35, 8),), loader_batch_sizes=(8,)))
    (8, 1)
    >>> samples_of(ScriptRun(input_shapes=((35, 20),), options={"--batch_size": 20}))
    (20, 1)
    """
    first = run.batch_size
    named = {*run.loader_batch_sizes, *run.options.values()}
    if first is None or first in named or not named:
        return first, 0
    shape = next(shape for shape in run.input_shapes if shape and shape[0] == first)
    return (shape[1], 1) if len(shape) > 1 and shape[1] in named else (first, 0)


def _num_weights(optimizer: torch.optim.Optimizer) -> int:
    return sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])


def measure_noise_of_script(
    script: Script,
    *,
    steps: int = 200,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    on: str | None = None,
    shape: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> NoiseRun:
    """Let a program train for some optimizer steps, and measure its critical batch.

    Args:
        script: the program as it is typed.
        steps: optimizer steps after which it is cut.
        micro_batch: fills {micro_batch}, or the script's batch option; default: as it is typed.
        accumulation: likewise.
        on: this machine's own device; a simulated card has no values to measure.
        shape: values of further placeholders.
        progress: called with what is being done.
    """
    place = on or default_device()
    if names_a_card(place):
        raise InvalidInputError(
            f"noise is measured from real gradients, and {place} is simulated: it has none.", remedy='on="cpu"'
        )
    turned = {MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
    names = [name for name, value in turned.items() if value is not None]
    wanted = whole_number(steps, "steps")
    with Probes(script, place) as probes:
        script, recognised = with_recognised_options(probes, names, shape=shape, say=progress)
        command = script.at(micro_batch, accumulation=accumulation, shape=shape)
        progress(f"running {command} until optimizer step {wanted:,}")
        run = probes.run(command, num_windows=wanted, measure="noise")
    data = run.measured or {}
    if data.get("critical_batch") is None:
        reasons = [f"{counted(number, 'step')}: {reason}" for reason, number in data.get("skipped", {}).items()]
        raise BatchwrightError(
            f"{counted(run.num_windows, 'step')} of {script.name} gave no observation of the noise.",
            details=[*reasons, *data.get("notes", ())],
            remedy=f"steps={max(20, 2 * wanted)}" if run.was_cut else "",
        )
    return _noise_run(script.name, place, replace(run, notes=(*recognised, *run.notes)), wanted)


def _noise_run(name: str, place: str, run: ScriptRun, wanted: int) -> NoiseRun:
    assert run.measured is not None
    data = run.measured
    critical = CriticalBatch(**data["critical_batch"])
    size, _ = samples_of(run)
    micro_batch, accumulation = size or 1, run.accumulation or 1
    notes = [*data["notes"], *run.notes, "the program's loss is not known, so the trend shows none"]
    if run.num_windows < wanted:
        notes.insert(0, f"the program ended after {run.num_windows:,} of {wanted:,} steps ({run.end})")
    history = [(step, CriticalBatch(**point)) for step, point in data["history"]]
    if not history or history[-1][0] < run.num_windows:
        history.append((run.num_windows, critical))
    return NoiseRun(
        name=name,
        critical_batch=critical,
        effective_batch=micro_batch * accumulation,
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=1,
        on=place,
        steps=run.num_windows,
        course=tuple(Stretch(**stretch) for stretch in data["course"]),
        history=tuple(
            TrendPoint(step, step * micro_batch * accumulation, float("nan"), point) for step, point in history
        ),
        verdict=judge(
            critical.in_samples() or critical,
            micro_batch * accumulation,
            optimizer=data["optimizer"],
            learning_rate=data["learning_rate"],
            betas=data["betas"],
            weight_decay=data["weight_decay"],
            devices=1,
        ),
        by_group={group: CriticalBatch(**value) for group, value in data["by_group"].items()},
        seconds_per_step=statistics.median(run.window_seconds),
        gamma=data["gamma"],
        skipped=data["skipped"],
        notes=tuple(notes),
    )
