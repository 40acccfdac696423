"""`TuneRequest`: what was asked of `tune`, checked once, and the same as plain data for the run's file."""

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
    from collections.abc import Mapping

STAGES = ("fit", "estimate", "throughput", "audit", "noise", "branches")
"""What can be skipped, in the order in which it is done."""
TRAINING_STAGES = ("throughput", "audit", "noise", "branches")
"""Those that run real steps: never on a simulated card, and together on all ranks."""


@dataclass(frozen=True)
class TuneRequest:
    """One question to `tune`.

    >>> TuneRequest(skip=["noise"], devices=2).skip
    ('noise',)
    """

    on: str = field(default_factory=default_device)
    memory: str | int | None = None
    devices: int = 1
    effective_batch: int | None = None
    limit: int | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 200
    noise_batch: int | None = None
    branch_batches: tuple[int, ...] = ()
    seed: int = 0
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", (self.skip,) if isinstance(self.skip, str) else tuple(self.skip))
        object.__setattr__(self, "shape", dict(self.shape))
        object.__setattr__(self, "branch_batches", tuple(self.branch_batches))
        for name in self.skip:
            if name not in STAGES:
                raise InvalidInputError(
                    f"there is no stage {shortened(name)} to skip; there are {', '.join(STAGES)}.",
                    remedy='skip=["noise"]',
                )
        whole_number(self.devices, "devices")
        whole_number(self.steps, "steps")
        for name in ("effective_batch", "limit", "noise_batch"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name.replace("_", " "))
        if self.memory is not None:
            parse_bytes(self.memory)

    @property
    def is_on_card(self) -> bool:
        """Whether it is about a simulated card: nothing runs there."""
        return names_a_card(self.on)

    def reason_to_skip(self, stage: str) -> str | None:
        """Return why a stage is not run; None if it is."""
        if stage in self.skip:
            return "skipped, as asked"
        if stage == "branches" and not self.branch_batches:
            return "not asked for"
        if self.is_on_card and stage in TRAINING_STAGES:
            return f"{self.on} is simulated: nothing runs there"
        return None

    def command(self, target: str) -> str:
        """Return the command that asks this.

        >>> TuneRequest(memory="16GiB", branch_batches=(16, 64), shape={"seq_len": 512}).command("train.py:workload")
        'batchwright tune train.py:workload --memory 16GiB --shape seq_len=512 --branches 16,64'
        """
        named = Target.read(target)
        words = ["batchwright", "tune", named.name]
        for argument in fields(self):
            if argument.name == "seed":
                continue
            value, option = getattr(self, argument.name), f"--{argument.name.replace('_', '-')}"
            if argument.name == "shape":
                words += [word for name, size in value.items() for word in (option, f"{name}={size}")]
            elif isinstance(value, tuple):
                option = "--branches" if argument.name == "branch_batches" else option
                words += [option, ",".join(map(str, value))] if value else []
            elif value != (default_device() if argument.name == "on" else argument.default):
                words += [option, _as_typed(value) if argument.name == "memory" else str(value)]
        text = shlex.join([*words, "--", *named.arguments] if named.arguments else words)
        return f"{text}  # and in Python: seed={self.seed}" if self.seed else text

    def to_dict(self) -> dict[str, Any]:
        """Return the question as plain data."""
        return {**asdict(self), "branch_batches": list(self.branch_batches), "skip": list(self.skip)}


def _as_typed(amount: str | int) -> str:
    """An amount as a person types it, if bytes are whole MiB or GiB.

    >>> _as_typed(64 * 2**20), _as_typed("16GiB"), _as_typed(1000)
    ('64MiB', '16GiB', '1000')
    """
    if isinstance(amount, int):
        for power, unit in ((30, "GiB"), (20, "MiB")):
            if amount and amount % 2**power == 0:
                return f"{amount >> power}{unit}"
    return str(amount)
