"""Seconds of a step on a card, operator by operator: the device's lane, the host's beside it, and what ranks wait for.

Each operator takes what its FLOPs and its bytes take, joined by a soft maximum; the step takes what the device and the
host that feeds it take, joined by another, and the collectives that nothing hides.

Promises:
- an answer has an interval, wide where the benchmark says so, and the reasons are named;
- a format that the card has not, or a card without a sheet, is no time and a sentence why, never a guess;
- the same work on another card costs milliseconds, as nothing is traced again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchwright.timing.collectives import COLLECTIVES, Network, collective_seconds, exposed_seconds, is_beyond_a_node
from batchwright.timing.constants import Constants, fitted_constants
from batchwright.units import counted, positive_number, whole_number

if TYPE_CHECKING:
    from batchwright.catalogue.speeds import CardSpeed
    from batchwright.timing.profile import Profile
    from batchwright.trace.work import StepWork, Work

_COSTLIEST = 10
# True over predicted seconds of steps that another size of theirs has set right, the middle 90 %: 534 pairs of sizes
# whose source and family of cards the constants had not seen (benchmarks/step_time.py).
_SET_RIGHT = (0.77, 1.3)
# From these shares of the step on, its time is hard to predict (benchmarks/step_time.py).
_HARD_HOST, _HARD_KINDS, _HARD_GUESS = 0.35, 0.2, 0.1
_HARD = {
    "grouped": "grouped convolutions",
    "depthwise": "depthwise convolutions",
    "recurrent": "recurrent layers",
    "attention_backward": "",
}
# What a person may type.
_NETWORK = "400Gb/s, in estimate and tune"
_FAMILIES_JUDGED = ("ampere", "ga10x", "hopper", "turing", "volta", "pascal", "cdna", "host")


@dataclass(frozen=True)
class CostlyOperator:
    """What all calls of one operator in one place take."""

    operator: str
    module: str
    seconds: float
    count: int
    bound_by: str
    """flops, bytes or launches: what most of its time goes to."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on one card, predicted."""

    seconds: float
    low: float
    high: float
    """The middle 90 % of what such predictions were off by."""
    device_seconds: float
    host_seconds: float
    waiting_seconds: float
    """For collectives that nothing hides."""
    flops: int
    mfu: float | None
    """FLOPs of the step over those of the card's peak in the format of most of them."""
    bound_by: str
    """flops, bytes, launches, host, ranks or upload."""
    costliest: tuple[CostlyOperator, ...]
    unsure: tuple[str, ...] = ()
    """Why the interval is wide."""
    helps: tuple[str, ...] = ()
    samples: int = 1
    """Samples of one step, on all devices."""
    source: str = "predicted"

    @property
    def samples_per_second(self) -> float:
        """Samples of all devices in a second."""
        return self.samples / self.seconds

    def set_right(self, factor: float) -> StepTime:
        """Return it as one measured step of the same workload shows it, which took so many times what was predicted.

        >>> StepTime(0.5, 0.4, 0.8, 0.4, 0.1, 0.0, 0, None, "flops", ()).set_right(1.2).seconds
        0.6
        """
        seconds = self.seconds * factor
        return replace(
            self,
            seconds=seconds,
            low=seconds * _SET_RIGHT[0],
            high=seconds * _SET_RIGHT[1],
            device_seconds=self.device_seconds * factor,
            host_seconds=self.host_seconds * factor,
            mfu=None if self.mfu is None else self.mfu / factor,
            costliest=tuple(replace(entry, seconds=entry.seconds * factor) for entry in self.costliest),
            unsure=(),
            source=f"predicted, times {factor:.3g} by the recorded run",
        )

    def of_run(self, samples: int, *, price_per_hour: float | None = None, devices: int = 1) -> dict[str, Any]:
        """Return hours, and the cost where a device has a price, of a run over so many samples; with intervals.

        >>> time = StepTime(0.5, 0.4, 0.8, 0.4, 0.1, 0.0, 0, None, "flops", (), samples=10)
        >>> time.of_run(72_000, price_per_hour=2.0)
        {'hours': 1.0, 'hours_interval': [0.8, 1.6], 'cost': 2.0, 'cost_interval': [1.6, 3.2]}
        """
        whole_number(samples, "samples")
        hours = [samples / self.samples * seconds / 3600 for seconds in (self.seconds, self.low, self.high)]
        cost: list[float] | None = None
        if price_per_hour is not None:
            price = positive_number(price_per_hour, "price_per_hour must be a number above 0", least=1e-9, most=1e9)
            cost = [hour * price * devices for hour in hours]
        return {
            "hours": hours[0],
            "hours_interval": hours[1:],
            "cost": None if cost is None else cost[0],
            "cost_interval": None if cost is None else cost[1:],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        data = asdict(self)
        data.update(costliest=[asdict(entry) for entry in self.costliest], unsure=list(self.unsure))
        data.update(helps=list(self.helps), samples_per_second=self.samples_per_second)
        return data


@dataclass(frozen=True)
class NoTime:
    """Why there is no time."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"seconds": None, "reason": self.reason}


def operator_seconds(work: Work, speed: CardSpeed, constants: Constants) -> tuple[float, float, float]:
    """Return the seconds of an operator's FLOPs, of its bytes, and of its launches on the device."""
    if work.kind == "upload":
        return 0.0, 0.0, 0.0  # beside the device, from pinned memory
    flops = 0.0
    if work.flops:
        rate = speed.sustained.get(work.number_format) or speed.sustained["fp32"]
        flops = work.flops / (rate * constants.efficiency_of(work))
    num_bytes = work.num_bytes * constants.passes_of(work) / speed.memory
    return flops, num_bytes, work.kernels * constants.device_seconds


def time_step(
    step: StepWork,
    speed: CardSpeed,
    *,
    samples: int,
    devices: int = 1,
    network: Network | None = None,
    constants: Constants | None = None,
    host_factor: float = 1.0,
) -> StepTime | NoTime:
    """Return the seconds of a step on a card.

    `host_factor` is by how much the host is slower than those of the benchmark.
    """
    constants = fitted_constants() if constants is None else constants
    missing = missing_formats(step, speed)
    if missing:
        return NoTime(f"{speed.name} has no {' and no '.join(missing)} arithmetic for products")
    if network is None and is_beyond_a_node(devices, network):
        return NoTime(f"{devices} devices are more than one node, and no network was named (as {_NETWORK})")
    power = constants.flops_and_bytes
    parts: dict[Work, tuple[float, str]] = {}
    lasting = []
    for work in step.entries:
        known = parts.get(work)
        if known is None:
            known = (0.0, "") if work.kind in COLLECTIVES else _joined(operator_seconds(work, speed, constants), power)
            parts[work] = known
        lasting.append(known[0])
    device = sum(lasting)
    host = host_factor * _host_seconds(step, constants)
    joint = constants.host_and_device
    fed = (device**joint + host**joint) ** (1 / joint)
    takes = partial(_takes, devices=devices, speed=speed, network=network)
    waiting = exposed_seconds(step.entries, lasting, takes, spread=fed / device if device else 1.0)
    uploading = sum(work.read_bytes for work in step.entries if work.kind == "upload") / constants.upload_bytes
    seconds = max(fed + waiting, uploading)
    unsure = _reasons_to_doubt(step, lasting, speed, host / (host + device) if device else 1.0, devices)
    low, high = constants.intervals["hard" if unsure else "plain"]
    kinds: dict[str, float] = {"host": host, "ranks": waiting}
    for lasts, bound in zip(lasting, (parts[work][1] for work in step.entries), strict=True):
        kinds[bound or "ranks"] = kinds.get(bound or "ranks", 0.0) + lasts
    bound_by = max(("flops", "bytes", "launches"), key=lambda kind: kinds.get(kind, 0.0))
    if uploading >= seconds:
        bound_by = "upload"
    elif host > device:
        bound_by = "host"
    elif waiting > 0.5 * seconds:
        bound_by = "ranks"
    return StepTime(
        seconds,
        seconds * low,
        seconds * high,
        device,
        host,
        waiting,
        step.flops,
        _mfu(step, speed, seconds),
        bound_by,
        _costliest(step, lasting, parts),
        unsure,
        _helps(bound_by),
        samples,
    )


def _takes(kind: str, num_bytes: int, *, devices: int, speed: CardSpeed, network: Network | None) -> float:
    return collective_seconds(kind, num_bytes, devices, speed, network)


def time_here(step: StepWork, profile: Profile, *, samples: int, devices: int = 1) -> StepTime | NoTime:
    """Return the seconds of a step on the machine that a profile is of, with as many ranks as it has timed."""
    if devices > 1 and devices != profile.ranks:
        return NoTime(f"the profile of {profile.machine.device} has no collectives of {devices} ranks")
    formats = {work.number_format for work in step.entries if work.flops}
    missing = sorted(formats - set(profile.formats) - {"fp32", "tf32"})
    if missing:
        return NoTime(f"the profile of {profile.machine.device} has no products in {' and '.join(missing)}")
    lasting = [0.0 if work.kind in COLLECTIVES else profile.seconds_of(work) for work in step.entries]
    device, host = sum(lasting), profile.beyond_operators(step)
    seconds = max(device, host) if profile.overlaps else device + host
    waiting = 0.0
    if devices > 1:
        spread = seconds / device if device else 1.0
        waiting = exposed_seconds(step.entries, lasting, profile.collective_seconds, spread=spread)
    seconds += waiting
    timed = list(zip(step.entries, lasting, strict=True))
    parts = {work: (taken, "flops" if work.flops else "bytes") for work, taken in timed}
    products = sum(taken for work, taken in timed if work.flops)
    low, high = profile.spread
    bound_by = "host" if host > device else "flops" if products > device / 2 else "bytes"
    bound_by = "ranks" if waiting > 0.5 * seconds else bound_by
    return StepTime(
        seconds,
        seconds * low,
        seconds * high,
        device,
        host,
        waiting,
        step.flops,
        None,
        "ranks"
        if waiting > 0.5 * seconds
        else "host"
        if host > device
        else "flops"
        if products > device / 2
        else "bytes",
        _costliest(step, lasting, parts),
        samples=samples,
        source="predicted from this machine's profile",
    )


def _host_seconds(step: StepWork, constants: Constants) -> float:
    """What asking for everything takes the host."""
    launches = sum(work.kernels * constants.host_seconds_of(work.phase) for work in step.entries)
    return launches + step.num_views * constants.host_seconds.get("view", 0.0)


def missing_formats(step: StepWork, speed: CardSpeed) -> list[str]:
    """Return the formats of products that a card has no arithmetic for; TF32 falls back to fp32, as torch does."""
    used = {work.number_format for work in step.entries if work.flops}
    return sorted(used - set(speed.sustained) - {"tf32", "fp32"})


def _joined(seconds: tuple[float, float, float], power: float) -> tuple[float, str]:
    flops, num_bytes, launches = seconds
    joined = (flops**power + num_bytes**power) ** (1 / power) if flops else num_bytes
    bound = max((flops, "flops"), (num_bytes, "bytes"), (launches, "launches"))[1]
    return joined + launches, bound


def _mfu(step: StepWork, speed: CardSpeed, seconds: float) -> float | None:
    by_format: dict[str, int] = {}
    for work in step.entries:
        by_format[work.number_format] = by_format.get(work.number_format, 0) + work.flops
    most = max(by_format, key=by_format.__getitem__, default="fp32")
    peak = speed.peaks.get(most) or speed.peaks.get("fp32")
    return step.flops / seconds / peak if peak and seconds else None


def _costliest(
    step: StepWork, lasting: Sequence[float], parts: dict[Work, tuple[float, str]]
) -> tuple[CostlyOperator, ...]:
    sums: dict[tuple[str, str], list[Any]] = {}
    for work, module, seconds in zip(step.entries, step.modules, lasting, strict=True):
        entry = sums.setdefault((work.operator, module), [0.0, 0, parts[work][1]])
        entry[0] += seconds
        entry[1] += 1
    most = sorted(sums.items(), key=lambda item: -item[1][0])[:_COSTLIEST]
    return tuple(CostlyOperator(*where, seconds, count, bound) for where, (seconds, count, bound) in most if seconds)


def _reasons_to_doubt(
    step: StepWork, lasting: Sequence[float], speed: CardSpeed, host_share: float, devices: int
) -> tuple[str, ...]:
    """Why such a step was hard to predict where it was tried."""
    total = sum(lasting) or 1.0
    reasons = []
    if host_share > _HARD_HOST:
        reasons.append(f"the host's launches are {host_share:.0%} of the work, and hosts differ")
    for kind, called in _HARD.items():
        share = sum(s for w, s in zip(step.entries, lasting, strict=True) if w.kind == kind) / total
        if called and share > _HARD_KINDS:
            reasons.append(f"{called} are {share:.0%} of the device's time, and kernels for them differ widely")
    if speed.family not in _FAMILIES_JUDGED:
        reasons.append(f"no card of the {speed.family} family was among the measurements")
    if is_beyond_a_node(devices, None):
        reasons.append(f"{counted(devices, 'device')} are more than one node: a model, not measured")
    return tuple(reasons)


def _helps(bound_by: str) -> tuple[str, ...]:
    if bound_by == "host":
        return ("a larger micro-batch", "torch.compile", "CUDA graphs")
    if bound_by == "launches":
        return ("a larger micro-batch", "torch.compile")
    if bound_by == "ranks":
        return ("more accumulation", "a larger micro-batch")
    return ()


def largest_error(times: Sequence[StepTime]) -> float:
    """Return the widest interval among times, as a factor."""
    return max((max(t.high / t.seconds, t.seconds / t.low) for t in times), default=math.nan)
