"""What a step is run with, as bytes: the precision, what is trained, which kernels.

Promises:
- the three precisions mean the same here as in torch: all fp32; `model.to(bfloat16)`; fp32 weights under bf16 autocast;
- every choice that changes a number is a field here, checked once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable

TUNINGS = ("full", "lora", "qlora")
ATTENTIONS = ("sdpa", "eager")
KERNELS = ("gpu", "cpu")
# Numbers that an optimizer keeps for each one it trains, and whole copies that its step makes for a moment.
OPTIMIZERS = {
    "adamw": (2, 0),
    "adamw-foreach": (2, 1),
    "sgd": (0, 0),
    "sgd-momentum": (1, 0),
}
LORA_RANK = 16


@dataclass(frozen=True)
class Precision:
    """Bytes of one number in each place of a step.

    `compute` is what matrices are multiplied in, `stream` what flows from layer to layer between them.
    """

    name: str
    weights: int
    compute: int
    stream: int


PRECISIONS = {
    "fp32": Precision("fp32", weights=4, compute=4, stream=4),
    "bf16": Precision("bf16", weights=2, compute=2, stream=2),
    # Autocast leaves the embedding and the sums between layers in fp32.
    "mixed": Precision("mixed", weights=4, compute=2, stream=4),
}


@dataclass(frozen=True)
class Setup:
    """How a named model is run, every choice checked.

    >>> Setup.of(precision="bf16", tuning="lora").copies_inputs
    True
    """

    precision: Precision
    tuning: str = "full"
    attention: str = "sdpa"
    kernels: str = "gpu"
    optimizer: str = "adamw"
    checkpointing: bool = False

    @classmethod
    def of(
        cls,
        *,
        precision: str = "bf16",
        tuning: str = "full",
        attention: str = "sdpa",
        kernels: str = "gpu",
        optimizer: str = "adamw",
        checkpointing: bool = False,
    ) -> Setup:
        """Return the set-up of these names, or say which of them is not known."""
        return cls(
            PRECISIONS[_one_of("precision", precision, PRECISIONS)],
            _one_of("tuning", tuning, TUNINGS),
            _one_of("attention", attention, ATTENTIONS),
            _one_of("kernels", kernels, KERNELS),
            _one_of("optimizer", optimizer, OPTIMIZERS),
            bool(checkpointing),
        )

    @property
    def trains_all(self) -> bool:
        """Whether every weight gets a gradient, rather than adapters only."""
        return self.tuning == "full"

    @property
    def copies_inputs(self) -> bool:
        """Whether each matrix keeps its own 2-byte copy of its input.

        Autocast casts the fp32 input anew for every matrix that reads it; so do the adapters of LoRA, which peft
        holds in fp32 and runs under autocast.
        """
        return self.precision.name == "mixed" or (not self.trains_all and self.precision.name == "bf16")

    @property
    def mask_bytes(self) -> int:
        """Bytes of one entry of a dropout mask: a flag on a GPU, a number of the activations' type on a CPU."""
        return 1 if self.kernels == "gpu" else self.precision.compute


def _one_of(what: str, value: object, known: Iterable[str]) -> str:
    names = tuple(known)
    if isinstance(value, str) and value.lower() in names:
        return value.lower()
    raise InvalidInputError(f"{what} must be one of {', '.join(names)}; received {shortened(value)}.")
