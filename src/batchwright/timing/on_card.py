"""The time of a traced step on a card of the catalogue, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.catalogue.speeds import speed_of
from batchwright.timing.step_time import NoTime, StepTime, time_step

if TYPE_CHECKING:
    from batchwright.catalogue.cards import Card
    from batchwright.device.step import StepSettings
    from batchwright.timing.collectives import Network
    from batchwright.trace.work import StepWork


def time_on(
    card: Card, work: StepWork | None, micro_batch: int, step: StepSettings, network: Network | None = None
) -> StepTime | NoTime:
    """Return the seconds of one optimizer step of all ranks."""
    speed = speed_of(card)
    if speed is None:
        return NoTime(f"no data sheet of {card.product} was found")
    if work is None or not work.entries:
        return NoTime("the step could not be followed operator by operator")
    samples = micro_batch * step.accumulation * step.devices
    return time_step(work, speed, samples=samples, devices=step.devices, network=network)
