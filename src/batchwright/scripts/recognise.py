"""Which options of the user's program set its micro-batch and its accumulation.

Promises:
- an option is recognised by one run of the command as it is typed, and always named in the answer;
- an option counts as the one that sets the micro-batch only if the model's inputs follow it, or, where nothing of its
  value is seen in them, if no other one is called a batch size;
- where no option does, the size of the program's own loader is turned, as if another number stood in the program.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.scripts.command import ACCUMULATION, LOADER, MICRO_BATCH, UserCommand
from batchwright.scripts.script_run import ACCUMULATES, ScriptRun, is_about_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from batchwright.scripts.probe import Probes
    from batchwright.scripts.script import Script

# Time, samples, channels: a batch is one of them.
_MOST_DIMENSIONS = 3
_NOT_OF_TRAINING = ("eval", "test", "valid", "val", "infer", "predict")


def recognise_option(run: ScriptRun) -> str | None:
    """Return the option of the program that sets its micro-batch, judged by one run; None if none stands out.

    >>> from batchwright.scripts.script_run import ScriptRun
    >>> run = ScriptRun(input_shapes=((8, 3),), options={"--batch-size": 8, "--eval-batch-size": 8, "--batch-log": 3})
    >>> recognise_option(run)
    '--batch-size'
    >>> recognise_option(ScriptRun(input_shapes=((16, 3),), loader_batch_sizes=(16, 32)))
    'DataLoader(batch_size=16)'
    >>> recognise_option(ScriptRun(input_shapes=((35, 20),), options={"--batch-size": 20, "--batch-log": 35}))
    '--batch-size'
    """
    sizes = {run.batch_size, *run.loader_batch_sizes}
    fitting = [name for name, value in run.options.items() if value in sizes and ACCUMULATES not in name.lower()]
    of_training = [name for name in fitting if not any(word in name.lower() for word in _NOT_OF_TRAINING)]
    by_inputs = [name for name in of_training if run.options[name] == run.batch_size]
    candidates = by_inputs or of_training
    called_so = [name for name in run.options if _is_called_a_batch_size(name)]
    if set(called_so).isdisjoint(candidates) and (best := _only_one(called_so, run)) is not None:
        return best
    best = min(candidates, key=lambda name: (0 if "size" in name else 1, len(name)), default=None)
    if best is None and run.batch_size in run.loader_batch_sizes:
        return f"DataLoader(batch_size={run.batch_size})"
    return best


def _is_called_a_batch_size(name: str) -> bool:
    words = name.lower().strip("$-=").replace("-", "_").replace(".", "_").split("_")
    is_so = "batchsize" in words or {"batch", "size"} <= set(words) or words[-1] in ("batch", "bs", "bsz", "mbs")
    return is_so and not any(word in _NOT_OF_TRAINING for word in words) and ACCUMULATES not in name.lower()


def _only_one(names: list[str], run: ScriptRun) -> str | None:
    """Return the option whose value is another dimension of the inputs; or the only one, if no loader has a size."""
    dimensions = {size for shape in run.input_shapes for size in shape}
    seen = [name for name in names if run.options[name] > 1 and run.options[name] in dimensions]
    if len(seen) == 1:
        return seen[0]
    return names[0] if len(names) == 1 and run.batch_size not in run.loader_batch_sizes else None


def recognise_accumulation(run: ScriptRun) -> str | None:
    """Return the option of the program that sets its accumulation; None if none stands out.

    >>> from batchwright.scripts.script_run import ScriptRun
    >>> recognise_accumulation(ScriptRun(options={"--batch-size": 8, "--grad-accum": 1}))
    '--grad-accum'
    """
    names = [name for name in run.options if ACCUMULATES in name.lower()]
    of_value = [name for name in names if run.options[name] == run.accumulation]
    return min(of_value or names, key=len, default=None)


def typed_options(command: UserCommand) -> dict[str, int]:
    """Return the whole numbers that a command sets and that have to do with a batch, whatever parser reads them.

    >>> from batchwright.scripts.command import read_command
    >>> typed_options(read_command("BSZ=2 train.py model.layers=2 data.batch_size=8 --bs 4 --accum=2".split()))
    {'data.batch_size=': 8, '--bs': 4, '--accum': 2, '$BSZ': 2}
    """
    options = {}
    for word, after in pairwise((*command.arguments, "")):
        name, equals, value = word.partition("=")
        is_option = name.startswith("-")
        if is_about_batches(name) and (is_option or equals):
            number = value if equals else after
            options[name if is_option else f"{name.lstrip('+')}="] = number
    environment = {**os.environ, **dict(command.environment)}
    options |= {f"${name}": value for name, value in environment.items() if is_about_batches(name)}
    return {name: int(value) for name, value in options.items() if value.isdecimal()}


def check_that_it_follows(script: Script, runs: Mapping[int, ScriptRun]) -> None:
    """Refuse an option that changes nothing: the model must receive what was asked for, or a multiple of it."""
    option = script.batch_option
    if option is None:
        return
    ended = {size: run for size, run in runs.items() if run.was_cut}
    if len(ended) < 2 or any(_follows(ended, at) for at in range(_MOST_DIMENSIONS)):
        return
    received = next(iter(ended.values())).batch_size
    # Of what nothing is seen in the inputs, by the memory that it takes.
    if received is None and len({run.peak_bytes for run in ended.values()}) > 1:
        return
    still = (
        "its peak is the same" if received is None else f"the model of {script.name} still receives {received} samples"
    )
    raise InvalidInputError(
        f"{option} changes nothing: {still}.",
        details=[f"run with {option} {', '.join(map(str, sorted(ended)))}"],
        remedy="{micro_batch} in the place that does",
    )


def _follows(runs: Mapping[int, ScriptRun], at: int) -> bool:
    """Whether a dimension of the inputs is another if the size is; of any but the first, so many times the size."""
    if all(any(shape[at : at + 1] == (size,) for shape in run.input_shapes) for size, run in runs.items()):
        return True  # beside others: a player acts on one sample a thousand times
    lengths: dict[int, int] = {}
    for size, run in runs.items():
        counted = Counter(shape[at] for shape in run.input_shapes if len(shape) > at)
        if not counted:
            return False
        lengths[size] = counted.most_common(1)[0][0]
    return len(set(lengths.values())) > 1 and (at == 0 or all(lengths[size] % size == 0 for size in lengths))


def run_as_typed(probes: Probes, shape: Mapping[str, Any] | None) -> ScriptRun:
    """Run the command as it is typed, and add to the options that its parser reads those that its words have."""
    command = probes.script.command.fill({MICRO_BATCH: 1, ACCUMULATION: 1, **(shape or {})})
    run = probes.run(command)
    return replace(run, options={**typed_options(command), **run.options})


def with_options_of(run: ScriptRun, script: Script, wanted: Iterable[str] = (MICRO_BATCH, ACCUMULATION)) -> Script:
    """Return the script with the options that are wanted, where it has no place for them and one stands out."""
    if MICRO_BATCH in wanted and not script.sets_micro_batch:
        script = replace(script, batch_option=recognise_option(run))
    if ACCUMULATION in wanted and not script.sets_accumulation:
        script = replace(script, accumulation_option=recognise_accumulation(run))
    return script


def with_recognised_options(
    probes: Probes, wanted: Iterable[str], *, shape: Mapping[str, Any] | None, say: Callable[[str], None]
) -> tuple[Script, tuple[str, ...]]:
    """Return the script with the options that are wanted, recognised if it has no place for them, and what was seen."""
    script = probes.script
    is_set = {MICRO_BATCH: script.sets_micro_batch, ACCUMULATION: script.sets_accumulation}
    missing = [name for name in wanted if not is_set[name]]
    if not missing:
        return script, ()
    words = " and its ".join(name.replace("_", "-") for name in missing)
    say(f"running the program as it is typed, to see which option sets its {words}")
    run = run_as_typed(probes, shape)
    script = with_options_of(run, script, missing)
    options = {MICRO_BATCH: script.batch_option, ACCUMULATION: script.accumulation_option}
    return script, tuple(_describe_option(name, options[name], run, script) for name in missing)


def _describe_option(name: str, option: str | None, run: ScriptRun, script: Script) -> str:
    """Say which option was recognised; refuse to go on if none was."""
    if option is None:
        seen = ", ".join(f"{option} {value}" for option, value in run.options.items()) or "none"
        raise InvalidInputError(
            f"no option of {script.name} stands out as its {name.replace('_', '-')}; the model receives "
            f"{run.batch_size} samples.",
            details=[f"options that have to do with a batch: {seen}"],
            remedy=f"{{{name}}} in its place, as in --{name.replace('_', '-')} {{{name}}}",
        )
    if name == ACCUMULATION:
        return f"{option} of the program sets its accumulation"
    if LOADER.fullmatch(option):
        return f"no option sets the micro-batch: the {option} of the program was given other sizes"
    return f"{option} of the program sets its micro-batch: the model's inputs follow it"
