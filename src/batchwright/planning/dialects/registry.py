"""Which frameworks a plan can be written for, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from batchwright.errors import InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan

FRAMEWORKS = ("transformers", "accelerate", "deepspeed", "lightning", "torchtitan", "composer", "pytorch")


# What a framework's own settings say nothing about, because the user makes the loaders.
_UNSPOKEN = {
    "deepspeed": ("eval micro-batch", "workers"),
    "torchtitan": ("eval micro-batch", "workers", "drop_last"),
}


class Dialect(Protocol):
    """What every file in this folder offers."""

    def settings(self, plan: Plan) -> dict[str, Any]:
        """Return plain data that the framework's own class accepts."""

    def snippet(self, plan: Plan) -> str:
        """Return text to paste into a script or config."""


def find_dialect(framework: str) -> Dialect:
    """Return the dialect of a framework.

    >>> find_dialect("Lightning").__name__
    'batchwright.planning.dialects.lightning'
    """
    name = framework.lower() if isinstance(framework, str) else framework
    if name not in FRAMEWORKS:
        import difflib

        near = difflib.get_close_matches(str(name), FRAMEWORKS, n=1)
        raise InvalidInputError(
            f"unknown framework {shortened(framework)}; known are {', '.join(FRAMEWORKS)}.",
            remedy=near[0] if near else "",
        )
    return cast("Dialect", importlib.import_module(f"batchwright.planning.dialects.{name}"))


def snippet_with_rate(plan: Plan, framework: str, rate: float) -> str:
    """Return the text to paste with the learning rate: as a setting where the framework has one, else as a remark."""
    from batchwright.planning.dialects import transformers

    if framework.lower() == "transformers":
        return transformers.snippet(plan, learning_rate=rate)
    text = find_dialect(framework).snippet(plan)
    # JSON has no remarks.
    return text if text.lstrip().startswith("{") else f"{text}\n\n# learning rate of the optimizer: {rate:.3g}"


def unspoken_settings(plan: Plan, framework: str) -> list[str]:
    """Name what the plan asks for and the framework's settings cannot say."""
    asked = {
        "eval micro-batch": plan.eval_micro_batch is not None,
        "workers": plan.workers > 0,
        "drop_last": plan.drop_last,
    }
    return [name for name in _UNSPOKEN.get(framework.lower(), ()) if asked[name]]
