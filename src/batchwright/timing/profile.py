"""A machine's own profile: what operators took there, by size; kept as a file, and used for every step on that machine.

Promises:
- an operator is looked up by its name, then by its kind; products by their dimensions, the rest by their bytes;
- between measured sizes times follow from the neighbours; beyond the largest they grow in proportion;
- a profile of another machine, or of another torch, is not used, and why is said;
- nothing is written over that is no profile.
"""

from __future__ import annotations

import json
import math
import platform
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchwright.catalogue.cards import find_card
from batchwright.errors import InvalidInputError
from batchwright.units import shortened
from batchwright.user_files import cache_folder, read_text, replace_file

if TYPE_CHECKING:
    from batchwright.catalogue.cards import Card
    from batchwright.trace.work import StepWork, Work

_SCHEMA = 1
_NEIGHBOURS, _NEAR, _FAR = 6, 0.05, 8.0
# Of what a file may hold: more of it is no profile of ours.
_MOST_POINTS = 100_000

Point = tuple[tuple[float, ...], float]


@dataclass(frozen=True)
class Machine:
    """What has to be the same for a profile to hold."""

    device: str
    threads: int
    torch: str

    @staticmethod
    def here(device: str = "cpu") -> Machine:
        """Return this machine, seen from this process."""
        name = _processor() if device == "cpu" else torch.cuda.get_device_name(torch.device(device))
        return Machine(name, torch.get_num_threads() if device == "cpu" else 0, torch.__version__)

    def difference(self, other: Machine) -> str:
        """Say what differs from another machine; empty if nothing does.

        >>> Machine("cpu", 1, "2.13.0").difference(Machine("cpu", 2, "2.13.0"))
        'threads 1, here 2'
        """
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in ("device", "threads", "torch")]
        return ", ".join(f"{name} {ours}, here {theirs}" for name, ours, theirs in pairs if ours != theirs)


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Profile:
    """What operators took on one machine."""

    machine: Machine
    curves: Mapping[str, Sequence[tuple[float, float]]]
    """For each operator and kind: bytes and seconds, by bytes."""
    products: Mapping[str, Sequence[Point]]
    """For each operator and kind: logarithms of the dimensions, and of the seconds per FLOP."""
    host_seconds: Mapping[str, float]
    """For each kernel that is asked for in forward, backward and optimizer, and for each view, beyond the operator."""
    spread: tuple[float, float] = (0.8, 1.25)
    """True over predicted seconds of the layers that it was made of, the middle 90 %."""
    overlaps: bool = False
    """Whether the host runs ahead of the device, as it does of a GPU."""
    formats: tuple[str, ...] = ("fp32",)
    ranks: int = 1
    """How many there were when collectives were timed."""
    collectives: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """For each collective: bytes of the whole tensor and seconds, by bytes."""
    notes: tuple[str, ...] = ()
    _cache: dict[Any, float] = field(default_factory=dict, compare=False, repr=False)

    def seconds_of(self, work: Work) -> float:
        """Return what an operator takes on the device."""
        key = work[:7] + work[7:9]
        known = self._cache.get(key)
        if known is None:
            known = self._product(work) if work.flops else self._bytes(work)
            self._cache[key] = known
        return known

    def collective_seconds(self, kind: str, num_bytes: int) -> float:
        """Return what a collective takes; one that was not timed as long as an all-reduce, which sends no less."""
        curve = self.collectives.get(kind) or self.collectives.get("all_reduce")
        return _on_curve(curve, float(num_bytes)) if curve else 0.0

    def beyond_operators(self, step: StepWork) -> float:
        """Return what a step takes beyond its operators: autograd's and Python's part."""
        per = self.host_seconds
        launches = sum(work.kernels * per.get(work.phase, per["forward"]) for work in step.entries)
        return launches + step.num_views * per.get("view", 0.0)

    def _bytes(self, work: Work) -> float:
        for name in (work.operator, work.kind, "elementwise"):
            curve = self.curves.get(name)
            # One that was only seen at far smaller sizes says little: its kind says more.
            if curve and (work.num_bytes <= _FAR * curve[-1][0] or name == "elementwise"):
                return _on_curve(curve, float(work.num_bytes))
        return 0.0

    def _product(self, work: Work) -> float:
        place = place_of(work)
        for name in (work.operator + "/" + work.kind, work.kind, "matmul"):
            points = [point for point in self.products.get(name, ()) if len(point[0]) == len(place)]
            if points:
                return work.flops * math.exp(_near(points, place))
        return work.flops * self._slowest

    @cached_property
    def _slowest(self) -> float:
        rates = [rate for points in self.products.values() for _, rate in points]
        return math.exp(sorted(rates)[len(rates) // 2]) if rates else 1e-10

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, as it is written."""
        return {
            "schema": _SCHEMA,
            "source": "measured",
            "machine": {"device": self.machine.device, "threads": self.machine.threads, "torch": self.machine.torch},
            "curves": {name: [list(point) for point in points] for name, points in self.curves.items()},
            "products": {name: [[list(p), rate] for p, rate in points] for name, points in self.products.items()},
            "host_seconds": dict(self.host_seconds),
            "spread": list(self.spread),
            "overlaps": self.overlaps,
            "formats": list(self.formats),
            "ranks": self.ranks,
            "collectives": {name: [list(point) for point in points] for name, points in self.collectives.items()},
            "notes": list(self.notes),
        }


def place_of(work: Work) -> tuple[float, ...]:
    """Return where a product lies among others: the logarithms of its dimensions."""
    return tuple(math.log2(max(size, 1)) for size in work.dims)


def _on_curve(curve: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Read a curve, straight between the logarithms of its points.

    >>> _on_curve([(100.0, 1.0), (10_000.0, 10.0)], 1000.0), _on_curve([(100.0, 1.0), (10_000.0, 10.0)], 20_000.0)
    (3.1622776601683795, 20.0)
    """
    sizes = [size for size, _ in curve]
    above = bisect_left(sizes, num_bytes)
    if above == 0:
        return curve[0][1]
    if above == len(curve):
        return curve[-1][1] * num_bytes / curve[-1][0]
    (x0, y0), (x1, y1) = curve[above - 1], curve[above]
    share = math.log(num_bytes / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))


def _near(points: Sequence[Point], place: tuple[float, ...]) -> float:
    """Average the nearest points, the nearer the more."""
    distances = sorted((sum((a - b) ** 2 for a, b in zip(at, place, strict=True)), value) for at, value in points)
    distances = distances[:_NEIGHBOURS]
    weights = [1 / (distance + _NEAR) ** 1.5 for distance, _ in distances]
    total: float = sum(w * value for w, (_, value) in zip(weights, distances, strict=True)) / sum(weights)
    return total


def default_file(machine: Machine) -> Path:
    """Return where a machine's profile is kept: in $BATCHWRIGHT_CACHE, else in the user's cache folder."""
    folder = cache_folder()
    if folder is None:
        raise InvalidInputError("there is no home folder to keep a profile in.", remedy="set BATCHWRIGHT_CACHE")
    name = re.sub(r"[^a-z0-9]+", "-", machine.device.lower()).strip("-") or "machine"
    threads = f"-{machine.threads}-threads" if machine.threads else ""
    return folder / "profiles" / f"{name}{threads}.json"


def write_profile(profile: Profile, file: Path) -> None:
    """Write a profile where it is looked for."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(profile.to_dict(), separators=(",", ":")) + "\n"
    replace_file(file, text.encode(), what="the profile", option="BATCHWRIGHT_CACHE")


def read_profile(file: str | Path) -> Profile:
    """Read what `write_profile` wrote."""
    try:
        data = json.loads(read_text(file))
        if data["schema"] != _SCHEMA:
            raise InvalidInputError(f"'{file}' has schema {shortened(data['schema'])}; this version reads {_SCHEMA}.")
        machine = data["machine"]
        profile = Profile(
            Machine(str(machine["device"]), int(machine["threads"]), str(machine["torch"])),
            {str(k): [(float(x), float(y)) for x, y in v] for k, v in data["curves"].items()},
            {str(k): [(tuple(map(float, p)), float(r)) for p, r in v] for k, v in data["products"].items()},
            {str(k): float(v) for k, v in data["host_seconds"].items()},
            (float(data["spread"][0]), float(data["spread"][1])),
            bool(data["overlaps"]),
            tuple(map(str, data["formats"])),
            int(data.get("ranks", 1)),  # files of before collectives were timed
            {str(k): [(float(x), float(y)) for x, y in v] for k, v in data.get("collectives", {}).items()},
            tuple(map(str, data["notes"])),
        )
    except InvalidInputError:
        raise
    except OSError as error:
        raise InvalidInputError(f"'{file}' cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise InvalidInputError(
            f"'{file}' is no profile of a machine: {error}.", remedy="batchwright calibrate"
        ) from None
    _check(profile, file)
    return profile


def _check(profile: Profile, file: str | Path) -> None:
    curves = [*profile.curves.values(), *profile.collectives.values()]
    numbers = [y for curve in curves for point in curve for y in point]
    numbers += list(profile.host_seconds.values())
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or len(numbers) > _MOST_POINTS:
        raise InvalidInputError(f"'{file}' holds times that no machine has.", remedy="batchwright calibrate")
    if any(a[0] >= b[0] for curve in curves for a, b in pairwise(curve)):
        raise InvalidInputError(f"'{file}' has sizes out of order.", remedy="batchwright calibrate")


def profile_of_card(card: Card) -> Profile | None:
    """Return the profile that was made on such a card, here or elsewhere; None where there is none of this torch."""
    folder = cache_folder()
    for file in sorted((folder / "profiles").glob("*.json")) if folder else ():
        profile = read_profile(file)
        with suppress(InvalidInputError):
            if find_card(profile.machine.device) == card and profile.machine.torch == torch.__version__:
                return profile
    return None


def profile_here(device: str = "cpu") -> tuple[Profile | None, str]:
    """Return this machine's profile, or None and why there is none that holds."""
    machine = Machine.here(device)
    if cache_folder() is None or not (file := default_file(machine)).exists():
        return None, "this machine was not calibrated: `batchwright calibrate` takes a minute"
    profile = read_profile(file)
    differs = profile.machine.difference(machine)
    return (None, f"the profile in {file} is of another machine: {differs}") if differs else (profile, "")
