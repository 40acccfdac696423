"""A plan in the words of a framework: its own settings, and text to paste.

Promises:
- settings are plain data that the framework's own class accepts;
- a plan that a framework cannot run is refused, with the reason and the way out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError, NotExpressibleError
from batchwright.planning.config_check import MICRO, STEPS, TOTAL
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.planning.plan import Plan


Settings = dict[str, Any]
"""Arguments by name, as a framework takes them."""


def headline(plan: Plan) -> str:
    """Comment that says what the settings below come to."""
    sizes = "" if plan.split.is_even else f"{plan.split.smallest} or "
    return (
        f"# micro-batch {sizes}{plan.micro_batch} x accumulation {plan.accumulation} x devices {plan.devices} "
        f"= effective batch {plan.effective_batch}"
    )


def loader_arguments(plan: Plan, batch_size: int | None = None) -> Settings:
    """Keyword arguments of the training DataLoader, apart from dataset and order."""
    return {
        "batch_size": plan.micro_batch if batch_size is None else batch_size,
        "num_workers": plan.workers,
        "drop_last": plan.drop_last,
    }


def eval_loader_arguments(plan: Plan) -> Settings:
    """Keyword arguments of the evaluation DataLoader."""
    return {"batch_size": eval_micro_batch(plan), "num_workers": plan.workers}


def eval_micro_batch(plan: Plan) -> int:
    """Evaluation keeps no activations for a backward, so what fits in training fits there."""
    return plan.micro_batch if plan.eval_micro_batch is None else plan.eval_micro_batch


def keywords(arguments: Settings) -> str:
    """Lay out keyword arguments on one line.

    >>> keywords({"batch_size": 8, "drop_last": True})
    'batch_size=8, drop_last=True'
    """
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def call(name: str, arguments: Settings, *, first: str = "") -> str:
    """Lay out a call with one keyword argument a line.

    >>> print(call("Trainer", {"accumulate_grad_batches": 6}))
    Trainer(
        accumulate_grad_batches=6,
    )
    """
    lines = [f"    {argument}={value!r}," for argument, value in arguments.items()]
    return "\n".join([f"{name}(", *([f"    {first},"] if first else []), *lines, ")"])


def refuse_uneven(plan: Plan, framework: str, reason: str) -> None:
    """Refuse a plan whose micro-batches differ, with the reason and the two ways out."""
    if plan.split.is_even:
        return
    raise NotExpressibleError(
        f"{framework} cannot run this plan: micro-batches of {plan.split.smallest:,} and {plan.split.largest:,} "
        f'(policy="exact"), and {reason}.',
        remedy=f'policy="nearest", policy="at-least" or policy="at-most"; or run {plan.effective_batch:,} exactly '
        "in pytorch, whose loop takes plan.batch_sampler(rank)",
    )


# accelerate: the Accelerator's accumulation and the loader of each process.


def accelerate_settings(plan: Plan) -> Settings:
    """Keyword arguments of `Accelerator` and of the two loaders."""
    refuse_uneven(plan, "accelerate", "it divides every micro-batch's loss by the same count")
    return {
        "accelerator": {"gradient_accumulation_steps": plan.accumulation},
        "train_loader": loader_arguments(plan),
        "eval_loader": eval_loader_arguments(plan),
    }


def accelerate_snippet(plan: Plan) -> str:
    """The set-up and the loop."""
    parts = accelerate_settings(plan)
    return f"""\
{headline(plan)}
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator({keywords(parts["accelerator"])})
train_loader = DataLoader(train_set, shuffle=True, {keywords(parts["train_loader"])})  # per process
eval_loader = DataLoader(eval_set, {keywords(parts["eval_loader"])})
model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)

for inputs, targets in train_loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_fn(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()

# start it: accelerate launch --num_processes {plan.devices} train.py"""


# Composer: the loader gives a device its whole share of the step, and the Trainer cuts it into micro-batches.
#
# The other way round than the rest: accumulation is not set, it follows. Composer weights a smaller last piece
# by its samples, so it can run a target that does not divide, as long as it divides over the devices.


def composer_settings(plan: Plan) -> Settings:
    """Keyword arguments of `Trainer` and of the two loaders."""
    if plan.effective_batch % plan.devices:
        refuse_uneven(plan, "Composer", "its loader gives every device the same number of samples")
    return {
        "trainer": {"device_train_microbatch_size": plan.micro_batch},
        "train_loader": loader_arguments(plan, batch_size=plan.effective_batch // plan.devices),
        "eval_loader": eval_loader_arguments(plan),
    }


def composer_snippet(plan: Plan) -> str:
    """The loaders and the Trainer."""
    parts = composer_settings(plan)
    rest = "model=model, optimizers=optimizer, train_dataloader=train_loader, eval_dataloader=eval_loader"
    return f"""\
{headline(plan)}
from composer import Trainer
from composer.utils import dist
from torch.utils.data import DataLoader

# batch_size is what one device takes in a whole step; the Trainer cuts it into micro-batches.
train_order = dist.get_sampler(train_set, shuffle=True)
train_loader = DataLoader(train_set, sampler=train_order, {keywords(parts["train_loader"])})
eval_loader = DataLoader(eval_set, sampler=dist.get_sampler(eval_set), {keywords(parts["eval_loader"])})
trainer = {call("Trainer", parts["trainer"], first=rest)}
trainer.fit()"""


# DeepSpeed: the three numbers of its JSON config.


def deepspeed_settings(plan: Plan) -> Settings:
    """The part of the config that speaks of the batch."""
    refuse_uneven(plan, "DeepSpeed", f"its config knows one {MICRO} for all")
    numbers = {TOTAL: plan.effective_batch, MICRO: plan.micro_batch, STEPS: plan.accumulation}
    return {**numbers, "dataloader_drop_last": True} if plan.drop_last else numbers


def deepspeed_snippet(plan: Plan) -> str:
    """The same as JSON, which has no room for a comment."""
    return json.dumps(deepspeed_settings(plan), indent=2)


# Lightning: the Trainer's devices and accumulation, and the loader of each process.


def lightning_settings(plan: Plan) -> Settings:
    """Keyword arguments of `Trainer` and of the two loaders."""
    refuse_uneven(plan, "Lightning", "it divides every micro-batch's loss by the same count")
    return {
        "trainer": {"devices": plan.devices, "accumulate_grad_batches": plan.accumulation},
        "train_loader": loader_arguments(plan),
        "eval_loader": eval_loader_arguments(plan),
    }


def lightning_snippet(plan: Plan) -> str:
    """The loaders and the Trainer."""
    parts = lightning_settings(plan)
    return f"""\
{headline(plan)}
from lightning import Trainer
from torch.utils.data import DataLoader

train_loader = DataLoader(train_set, shuffle=True, {keywords(parts["train_loader"])})  # per device
eval_loader = DataLoader(eval_set, {keywords(parts["eval_loader"])})
trainer = {call("Trainer", parts["trainer"])}
trainer.fit(module, train_loader, eval_loader)"""


# Plain PyTorch: the loader's arguments, and a loop that is right for the incomplete last window too.
#
# The loop reads one window ahead, so that it knows how many samples the window holds before the first backward,
# and weights each micro-batch's mean by its share of them.


def pytorch_settings(plan: Plan) -> Settings:
    """Arguments of the two loaders, and the loop's count."""
    train = loader_arguments(plan)
    if not plan.split.is_even:
        # A batch sampler replaces batch_size, shuffle and drop_last; it is made per rank, so it is named, not built.
        train = {"batch_sampler": "plan.batch_sampler(rank)", "num_workers": plan.workers}
    return {
        "train_loader": train,
        "eval_loader": eval_loader_arguments(plan),
        "accumulation": plan.accumulation,
    }


def pytorch_snippet(plan: Plan) -> str:
    """The loader and the loop."""
    return _even_loop(plan) if plan.split.is_even else _uneven_loop(plan)


def _even_loop(plan: Plan) -> str:
    parallel = plan.devices > 1
    order = "sampler=sampler" if parallel else "shuffle=True"
    setup = [f"sampler = DistributedSampler(train_set, drop_last={plan.drop_last})"] if parallel else []
    setup.append(f"loader = DataLoader(train_set, {order}, {keywords(loader_arguments(plan))})")
    windows = ["batches = iter(loader)", f"while window := list(islice(batches, {plan.accumulation})):"]
    windows.append("    samples = sum(len(targets) for _, targets in window)")
    windows += _passes(
        plan, item="inputs, targets", window="window", count="len(window)", weight="len(targets) / samples"
    )
    imports = "DataLoader, DistributedSampler" if parallel else "DataLoader"
    return _script(plan, f"from torch.utils.data import {imports}", setup, windows, has_sampler=parallel)


def _uneven_loop(plan: Plan) -> str:
    rank = "torch.distributed.get_rank()" if plan.devices > 1 else "0"
    arguments = {"micro_batch": plan.max_micro_batch, "devices": plan.devices, "policy": plan.policy}
    setup = [
        f"plan = bw.plan({plan.requested_batch}, {keywords({**arguments, 'drop_last': plan.drop_last})})",
        f"sampler = plan.batch_sampler(rank={rank}, samples=len(train_set))",
        f"loader = DataLoader(train_set, batch_sampler=sampler, num_workers={plan.workers})",
    ]
    windows = ["batches = zip(loader, sampler.weights(), strict=True)", "for window in sampler.windows():"]
    windows += _passes(
        plan,
        item="(inputs, targets), weight",
        window="islice(batches, window.accumulation)",
        count="window.accumulation",
        # The weights sum to one over all ranks, and the ranks average their gradients.
        weight=f"weight * {plan.devices}" if plan.devices > 1 else "weight",
    )
    imports = "from torch.utils.data import DataLoader\n\nimport batchwright as bw"
    return _script(plan, imports, setup, windows, has_sampler=True)


def _script(plan: Plan, imports: str, setup: list[str], windows: list[str], *, has_sampler: bool) -> str:
    parallel = plan.devices > 1
    return "\n".join(
        [
            headline(plan),
            *(["import contextlib"] if parallel else []),
            "from itertools import islice",
            "",
            *(["import torch"] if parallel else []),
            imports,
            "",
            *(
                [f"torch.distributed.init_process_group()  # torchrun --nproc-per-node {plan.devices}"]
                if parallel
                else []
            ),
            *(["model = torch.nn.parallel.DistributedDataParallel(model)"] if parallel else []),
            *setup,
            f"eval_loader = DataLoader(eval_set, {keywords(eval_loader_arguments(plan))})",
            "",
            "for epoch in range(epochs):",
            *(["    sampler.set_epoch(epoch)"] if has_sampler else []),
            *(f"    {line}" for line in windows),
        ]
    )


def _passes(plan: Plan, *, item: str, window: str, count: str, weight: str) -> list[str]:
    step = ["    optimizer.step()", "    optimizer.zero_grad()"]
    passes = ["loss = loss_fn(model(inputs), targets)", f"(loss * {weight}).backward()"]
    if plan.devices == 1:
        return [f"    for {item} in {window}:", *(f"        {line}" for line in passes), *step]
    return [
        f"    for number, ({item}) in enumerate({window}, 1):",
        "        # Only the last pass synchronises; the forward belongs inside, or the synchronisation is lost.",
        f"        with contextlib.nullcontext() if number == {count} else model.no_sync():",
        *(f"            {line}" for line in passes),
        *step,
    ]


# torchtitan: local and global batch size of its TrainingConfig; accumulation follows from the two.


def torchtitan_settings(plan: Plan) -> Settings:
    """Keyword arguments of `TrainingConfig`."""
    refuse_uneven(plan, "torchtitan", "its global batch must be a multiple of local batch x data-parallel degree")
    return {"local_batch_size": plan.micro_batch, "global_batch_size": plan.effective_batch}


def torchtitan_snippet(plan: Plan) -> str:
    """A `TrainingConfig` call, and the flags that say the same."""
    fields = torchtitan_settings(plan)
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


# transformers: keyword arguments of TrainingArguments, and the same as flags.

OUTPUT = 'output_dir="out"'


def transformers_settings(plan: Plan) -> Settings:
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


def transformers_snippet(plan: Plan, *, learning_rate: float | None = None) -> str:
    """A `TrainingArguments` call, and the command line that says the same."""
    arguments = transformers_settings(plan)
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


@dataclass(frozen=True)
class Dialect:
    """A plan in the words of one framework."""

    name: str
    settings: Callable[[Plan], Settings]
    """Plain data that the framework's own class accepts."""
    snippet: Callable[[Plan], str]
    """Text to paste into a script or config."""


_DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("transformers", transformers_settings, transformers_snippet),
        Dialect("accelerate", accelerate_settings, accelerate_snippet),
        Dialect("deepspeed", deepspeed_settings, deepspeed_snippet),
        Dialect("lightning", lightning_settings, lightning_snippet),
        Dialect("torchtitan", torchtitan_settings, torchtitan_snippet),
        Dialect("composer", composer_settings, composer_snippet),
        Dialect("pytorch", pytorch_settings, pytorch_snippet),
    )
}
FRAMEWORKS = tuple(_DIALECTS)


def find_dialect(framework: str) -> Dialect:
    """Return the dialect of a framework.

    >>> find_dialect("Lightning").name
    'lightning'
    """
    name = framework.lower() if isinstance(framework, str) else framework
    if name not in FRAMEWORKS:
        import difflib

        near = difflib.get_close_matches(str(name), FRAMEWORKS, n=1)
        raise InvalidInputError(
            f"unknown framework {shortened(framework)}; known are {', '.join(FRAMEWORKS)}.",
            remedy=near[0] if near else "",
        )
    return _DIALECTS[name]


def write_snippet(plan: Plan, framework: str, rate: float | None) -> str:
    """Return the text to paste, with the learning rate as a setting if the framework has one, else as a remark."""
    dialect = find_dialect(framework)
    if rate is not None and dialect.name == "transformers":
        return transformers_snippet(plan, learning_rate=rate)
    text = dialect.snippet(plan)
    # JSON has no remarks.
    is_without = rate is None or text.startswith("{")
    return text if is_without else f"{text}\n\n# learning rate of the optimizer: {rate:.3g}"
