"""What was asked of `tune`, checked, and the same as plain data for the run's file."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import names_a_card
from batchwright.device.device import default_device
from batchwright.errors import InvalidInputError
from batchwright.targets import Target
from batchwright.units import parse_bytes, shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


STAGES = ("fit", "estimate", "throughput", "audit", "noise", "branches")
"""What can be skipped, in the order in which it is done."""


@dataclass(frozen=True)
class Ask:
    """One question to `tune`."""

    on: str = field(default_factory=default_device)
    memory: str | int | None = None
    devices: int = 1
    effective_batch: int | None = None
    limit: int | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    steps: int = 200
    noise_batch: int | None = None
    branch_batches: tuple[int, ...] = ()
    seed: int = 0
    skip: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        *,
        skip: Iterable[str] = (),
        shape: Mapping[str, Any] | None = None,
        branch_batches: Iterable[int] = (),
        **told: Any,
    ) -> Ask:
        """Check what was asked.

        >>> Ask.read(skip=["noise"], devices=2).skip
        ('noise',)
        """
        names = (skip,) if isinstance(skip, str) else tuple(skip)
        for name in names:
            if name not in STAGES:
                raise InvalidInputError(
                    f"there is no stage {shortened(name)} to skip; there are {', '.join(STAGES)}.",
                    remedy="--skip noise",
                )
        asked = cls(skip=names, shape=dict(shape or {}), branch_batches=tuple(branch_batches), **told)
        whole_number(asked.devices, "devices")
        whole_number(asked.steps, "steps")
        for name in ("effective_batch", "limit", "noise_batch"):
            if getattr(asked, name) is not None:
                whole_number(getattr(asked, name), name.replace("_", " "))
        if asked.memory is not None:
            parse_bytes(asked.memory)
        return asked

    @property
    def is_on_card(self) -> bool:
        """Whether a simulated card was asked about: nothing runs there."""
        return names_a_card(self.on)

    def why_not(self, stage: str) -> str | None:
        """Why a stage is not run, or None."""
        if stage in self.skip:
            return "skipped, as asked"
        if stage == "branches" and not self.branch_batches:
            return "not asked for"
        if self.is_on_card and stage in ("throughput", "audit", "noise", "branches"):
            return f"{self.on} is simulated: nothing runs there"
        return None

    def command(self, target: str) -> str:
        """Return the command that asks this.

        >>> Ask.read(memory="16GiB", branch_batches=(16, 64), shape={"seq_len": 512}).command("train.py:workload")
        'batchwright tune train.py:workload --memory 16GiB --shape seq_len=512 --branches 16,64'
        """
        named = Target.read(target)
        words = ["batchwright", "tune", named.name]
        for each in fields(self):
            value, option = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if each.name == "shape":
                words += [word for name, size in value.items() for word in (option, f"{name}={size}")]
            elif isinstance(value, tuple):
                option = "--branches" if each.name == "branch_batches" else option
                words += [option, ",".join(map(str, value))] if value else []
            elif value != (default_device() if each.name == "on" else each.default):
                words += [option, _as_typed(value) if each.name == "memory" else str(value)]
        return shlex.join([*words, "--", *named.arguments] if named.arguments else words)

    def to_dict(self) -> dict[str, Any]:
        """Return the question as plain data."""
        return {**asdict(self), "branch_batches": list(self.branch_batches), "skip": list(self.skip)}


def _as_typed(amount: str | int) -> str:
    """An amount as a person types it, where bytes are whole MiB or GiB.

    >>> _as_typed(64 * 2**20), _as_typed("16GiB"), _as_typed(1000)
    ('64MiB', '16GiB', '1000')
    """
    if isinstance(amount, int):
        for power, unit in ((30, "GiB"), (20, "MiB")):
            if amount and amount % 2**power == 0:
                return f"{amount >> power}{unit}"
    return str(amount)
