"""torchtitan: local and global batch size of its TrainingConfig; accumulation follows from the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.planning.dialects.wording import headline, keywords, refuse_uneven

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan


def settings(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of `TrainingConfig`."""
    refuse_uneven(plan, "torchtitan", "its global batch must be a multiple of local batch x data-parallel degree")
    return {"local_batch_size": plan.micro_batch, "global_batch_size": plan.effective_batch}


def snippet(plan: Plan) -> str:
    """A `TrainingConfig` call, and the flags that say the same."""
    fields = settings(plan)
    flags = " ".join(f"--training.{name} {value}" for name, value in fields.items())
    return "\n".join(
        [
            headline(plan),
            "from torchtitan.config import TrainingConfig",
            "",
            f"training = TrainingConfig({keywords(fields)})",
            "",
            "# or as flags, added to your --module and --config:",
            f"#   torchrun --nproc-per-node {plan.devices} -m torchtitan.train {flags}",
        ]
    )
