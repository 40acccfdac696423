"""The time of a traced step on a card of the catalogue, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.catalogue.speeds import speed_of
from batchwright.timing.profile import profile_here, profile_of_card
from batchwright.timing.step_time import NoTime, StepTime, time_here, time_step

if TYPE_CHECKING:
    from batchwright.catalogue.cards import Card
    from batchwright.device.step import StepSettings
    from batchwright.timing.collectives import Network
    from batchwright.trace.work import StepWork


def time_on(
    card: Card, work: StepWork | None, micro_batch: int, step: StepSettings, network: Network | None = None
) -> StepTime | NoTime:
    """Return the seconds of one optimizer step of all ranks; by a profile of the card, if there is one."""
    if work is None or not work.entries:
        return NoTime("the step could not be followed operator by operator, or its rank waits for others of a pipeline")
    samples = micro_batch * step.accumulation * step.devices
    profile = profile_of_card(card)
    if profile is not None and step.devices in (1, profile.ranks):
        return time_here(work, profile, samples=samples, devices=step.devices)
    speed = speed_of(card)
    if speed is None:
        return NoTime(f"no data sheet of {card.product} was found")
    return time_step(work, speed, samples=samples, devices=step.devices, network=network)


def time_on_cpu(work: StepWork | None, micro_batch: int, step: StepSettings) -> StepTime | NoTime | None:
    """Return the seconds of a step on this machine's CPU, if it was calibrated; None if it never was."""
    profile, reason = profile_here("cpu")
    if profile is None:
        return NoTime(reason) if "another machine" in reason else None
    return None if work is None else time_here(work, profile, samples=micro_batch * step.accumulation)
