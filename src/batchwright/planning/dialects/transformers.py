"""transformers: keyword arguments of TrainingArguments, and the same as flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.planning.dialects.wording import call, eval_micro_batch, headline, refuse_uneven

if TYPE_CHECKING:
    from batchwright.planning.plan import Plan

OUTPUT = 'output_dir="out"'


def settings(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments`."""
    refuse_uneven(
        plan,
        "transformers",
        "its Trainer gives every device per_device_train_batch_size samples in every pass",
    )
    return {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "per_device_eval_batch_size": eval_micro_batch(plan),
        "dataloader_num_workers": plan.workers,
        "dataloader_drop_last": plan.drop_last,
    }


def snippet(plan: Plan, *, learning_rate: float | None = None) -> str:
    """A `TrainingArguments` call, and the command line that says the same."""
    arguments = settings(plan)
    if learning_rate is not None:
        arguments["learning_rate"] = float(f"{learning_rate:.3g}")
    # A false flag is left out: that is its default, and older parsers take no value after it.
    flags = [f"--{name} {value}" for name, value in arguments.items() if value is not False]
    launcher = f"torchrun --nproc-per-node {plan.devices}" if plan.devices > 1 else "python"
    command = " \\\n#     ".join([f"{launcher} train.py", *flags])
    return "\n".join(
        [
            headline(plan),
            "from transformers import TrainingArguments",
            "",
            f"arguments = {call('TrainingArguments', arguments, first=OUTPUT)}",
            "",
            "# or as flags, with HfArgumentParser:",
            f"#   {command}",
        ]
    )
