"""`NoiseRun`: a short training run, and where its batch stands beside the critical batch (`judge`).

The three positions are a factor of 4 apart from the critical batch Bc, because the curves then say something plain:

- far below (B < Bc/4): at most 20 % of the samples are wasted, and a doubling saves at least 40 % of the steps;
- near: in between; at B = Bc half of the samples are wasted, and a doubling saves a quarter of the steps;
- beyond (B > 4 Bc): at least 80 % of the samples are wasted, and a doubling saves at most 10 % of the steps.

Promises:
- a position is claimed only if the whole interval of the critical batch agrees; otherwise all that it allows are named;
- "beyond" is never claimed while the upper end is not resolved: then nothing shows that the batch is too large;
- every number carries the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from batchwright.planning.critical_batch import (
    CURVE_OFF_BY,
    CriticalBatch,
    Range,
    checked_batch,
    figure,
    over_interval,
    steps_after,
    wasted,
)
from batchwright.planning.learning_rate import LearningRateChange, learning_rate_change
from batchwright.printed_result import PrintedLine, PrintedResult
from batchwright.units import counted, finite, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.planning.best_batch import BestBatch
    from batchwright.planning.horizon import Stretch


POSITIONS = ("far below", "near", "beyond")
_FACTOR = 4.0
# Of a normal distribution, the ends of 80 % in standard deviations: a position is claimed with that chance.
_USUAL = 1.28


@dataclass(frozen=True)
class Verdict(PrintedLine):
    """A batch judged: its position, what a doubling saves and costs, and what to do."""

    critical: CriticalBatch
    effective_batch: float
    devices: int
    positions: tuple[str, ...]
    """Those that the interval allows, from small batches to large."""
    waste: Range
    """The share of the samples that a tiny batch would not have needed."""
    doubling_saves: Range
    """The share of the steps that a doubling saves."""
    doubling_costs: Range
    """The share of samples that a doubling needs on top."""
    doubling_speeds_up: Range
    """How many times sooner twice the devices are there, if a step takes no longer: from 1 to 2."""
    devices_pay: str
    """The same in words."""
    recommendation: str
    """What to do, in one line."""
    words: tuple[str, ...]
    if_doubled: LearningRateChange | None = None
    if_halved: LearningRateChange | None = None

    @property
    def position(self) -> str:
        """The position in words; "unresolved" if the interval allows all three."""
        return "unresolved" if len(self.positions) == len(POSITIONS) else " or ".join(self.positions)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return {
            "critical_batch": self.critical.to_dict(),
            "effective_batch": self.effective_batch,
            "devices": self.devices,
            "position": self.position,
            "waste": self.waste.to_dict(),
            "doubling_saves": self.doubling_saves.to_dict(),
            "doubling_costs": self.doubling_costs.to_dict(),
            "doubling_speeds_up": self.doubling_speeds_up.to_dict(),
            "devices_pay": self.devices_pay,
            "if_doubled": self.if_doubled.to_dict() if self.if_doubled else None,
            "if_halved": self.if_halved.to_dict() if self.if_halved else None,
            "recommendation": self.recommendation,
            "words": list(self.words),
        }

    def __str__(self) -> str:
        return f"{self.position}: {self.recommendation}"


def judge(
    critical: CriticalBatch,
    effective_batch: float,
    *,
    optimizer: str | None = None,
    learning_rate: float | None = None,
    betas: Sequence[float] | None = None,
    weight_decay: float | None = None,
    devices: int = 1,
) -> Verdict:
    """Judge an effective batch, given in the unit of the critical batch.

    >>> verdict = judge(CriticalBatch(900.0, 700.0, 1200.0, "samples", 120, evidence="given"), 64)
    >>> print(verdict)  # doctest: +NORMALIZE_WHITESPACE
    far below: a larger batch pays: a doubling saves 47 % [46, 47] of the steps for 7 % [5, 8] more samples; raise it
    while a doubled step takes less than 1.85 times as long
    >>> judge(CriticalBatch(900.0, 20.0, float("inf"), "samples", 9), 128).recommendation
    'no evidence that the batch is too large: keep it, and measure longer'

    With an `optimizer` it says how the learning rate, and betas and weight decay if they are given, go with a doubled
    and with a halved batch.
    """
    batch = checked_batch(effective_batch, "effective batch")
    num_devices = whole_number(devices, "devices")
    likely = critical.widened()
    usual = critical.widened(_USUAL)
    first, last = _position(batch, usual.high), _position(batch, usual.low)
    positions = POSITIONS[first : last + 1]
    doubled_steps = _steps_after(2, batch, critical)
    saves, costs = doubled_steps.map(lambda ratio: 1 - ratio), doubled_steps.map(lambda ratio: 2 * ratio - 1)
    sooner = doubled_steps.map(lambda ratio: 1 / ratio)
    devices_pay = (
        f"{counted(2 * num_devices, 'device')} instead of {num_devices:,}, each with the batch it has now, reach the "
        f"loss {sooner} times sooner, if a step takes no longer"
    )

    def settings_for(size: float) -> LearningRateChange | None:
        if optimizer is None:
            return None
        given: dict[str, Any] = {"learning_rate": learning_rate, "betas": betas, "weight_decay": weight_decay}
        return learning_rate_change(optimizer, batch, size, critical, **given)

    doubled, halved = settings_for(batch * 2), settings_for(batch / 2)
    return Verdict(
        critical=critical,
        effective_batch=batch,
        devices=num_devices,
        positions=positions,
        waste=_likely(critical, lambda size, bend: wasted(batch, size, bend)),
        doubling_saves=saves,
        doubling_costs=costs,
        doubling_speeds_up=sooner,
        devices_pay=devices_pay,
        recommendation=_recommend(critical, batch, positions, saves, costs, sooner),
        words=(
            f"the batch is {figure(batch)}, the critical batch {critical}",
            *(
                ()
                if critical.evidence == "given"
                else (f"with what such estimates were off by elsewhere the critical batch is {likely}",)
            ),
            f"a doubling saves {saves.percent} of the steps for {costs.percent} more samples",
            devices_pay,
            *(f"for a {name} batch: {change}" for name, change in (("doubled", doubled), ("halved", halved)) if change),
            "the noise scale stands in for the critical batch: equal for plain SGD if the loss curves alike in all "
            "directions (McCandlish et al. 2018); under momentum and Adam larger batches pay for longer. "
            "bw.measure_critical_batch measures it",
        ),
        if_doubled=doubled,
        if_halved=halved,
    )


def _likely(critical: CriticalBatch, curve: Callable[[float, float], float]) -> Range:
    """Return what a curve of critical batch and bend says over all of them that are likely."""
    likely, bends = critical.widened(), critical.bends
    ranges = [over_interval(likely, lambda size, bend=bend: curve(size, bend)) for bend in bends]  # type: ignore[misc]
    return Range(curve(likely.value, fmean(bends)), min(ends.low for ends in ranges), max(ends.high for ends in ranges))


def _steps_after(change: float, batch: float, critical: CriticalBatch) -> Range:
    """Return the steps of so many times the batch over those of the batch."""
    ratio = _likely(critical, lambda size, bend: steps_after(change, batch, size, bend))
    off = 1.0 if critical.evidence == "given" else math.exp(CURVE_OFF_BY)
    return Range(ratio.value, ratio.low / off, ratio.high * off)


def _position(batch: float, critical: float) -> int:
    return 0 if batch < critical / _FACTOR else 2 if batch > critical * _FACTOR else 1


def _recommend(
    critical: CriticalBatch, batch: float, positions: tuple[str, ...], saves: Range, costs: Range, sooner: Range
) -> str:
    doubling = f"a doubling saves {saves.percent} of the steps for {costs.percent} more samples"
    if positions == ("far below",):
        # Not simply "raise it": on the same devices a doubled batch takes longer a step, and only the clock can tell.
        return (
            f"a larger batch pays: {doubling}; raise it while a doubled step takes less than {sooner.low:.3g} times as "
            "long"
        )
    if positions == ("near",):
        return f"keep the batch: {doubling}"
    if positions == ("beyond",):
        halved = _steps_after(0.5, batch, critical)
        saved, more = halved.map(lambda ratio: 1 - ratio / 2).percent, halved.map(lambda ratio: ratio - 1).percent
        return f"lower the batch: halving it saves {saved} of the samples for {more} more steps"
    if not critical.resolved:
        needed = "" if critical.steps_needed is None else f", about {counted(critical.steps_needed, 'more step')}"
        return f"no evidence that the batch is too large: keep it, and measure longer{needed}"
    if positions == ("far below", "near"):
        return f"a larger batch may pay: {doubling}"
    if positions == ("near", "beyond"):
        return f"do not raise the batch: {doubling}"
    return "keep the batch, and measure longer or by branches: it may be far too small or far too large"


@dataclass(frozen=True)
class TrendPoint:
    """The critical batch and the loss at a step of the run."""

    step: int
    samples: int
    loss: float
    critical_batch: CriticalBatch

    def to_dict(self) -> dict[str, Any]:
        """Return the point as plain data."""
        loss = finite(self.loss)
        return {"step": self.step, "samples": self.samples, "loss": loss, **self.critical_batch.to_dict()}


@dataclass(frozen=True, repr=False)
class NoiseRun(PrintedResult):
    """A short training run, and what its gradients say of the batch in use."""

    in_repr = ("name", "critical_batch", "effective_batch", "steps")
    drawn_by = "training_text.draw_noise"

    name: str
    critical_batch: CriticalBatch
    effective_batch: int
    micro_batch: int
    accumulation: int
    ranks: int
    on: str
    steps: int
    history: tuple[TrendPoint, ...]
    verdict: Verdict
    by_group: Mapping[str, CriticalBatch]
    seconds_per_step: float
    """The median."""
    gamma: float | None
    """What a batch that follows the critical batch could buy; 1 for nothing. None if the trend is not resolved."""
    course: tuple[Stretch, ...] = ()
    """The whole run, in pieces that can be carried on to a horizon."""
    best: BestBatch | None = None
    """The batch that reaches the loss soonest, if step times were handed in."""
    skipped: Mapping[str, int] | None = None
    notes: tuple[str, ...] = ()
    source: str = "measured"

    @property
    def recommendation(self) -> str:
        """What to do, in one line."""
        if self.best is None:
            return self.verdict.recommendation
        return f"an effective batch of {self.best.value:,} reaches the loss soonest; {self.best.how_good}"

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data, the same as `batchwright noise --json` prints."""
        return {
            "schema": 1,
            "source": self.source,
            "name": self.name,
            "critical_batch": self.critical_batch.to_dict(),
            "effective_batch": self.effective_batch,
            "effective_batch_unit": "samples",
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "devices": self.ranks,
            "on": self.on,
            "steps": self.steps,
            "observations": self.critical_batch.observations,
            "steps_needed": self.critical_batch.steps_needed,
            "history": [point.to_dict() for point in self.history],
            "course": [stretch.to_dict() for stretch in self.course],
            "by_group": {name: critical.to_dict() for name, critical in self.by_group.items()},
            "seconds_per_step": self.seconds_per_step,
            "gamma": self.gamma,
            "verdict": self.verdict.to_dict(),
            "recommendation": self.recommendation,
            "best_batch": None if self.best is None else self.best.to_dict(),
            "skipped": dict(self.skipped or {}),
            "notes": list(self.notes),
        }
