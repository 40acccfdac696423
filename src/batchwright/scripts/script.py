"""`Script`: the user's own command where a Workload would go, and which of its options sets the micro-batch.

Promises:
- nothing in the program has to change; its option is recognised, or named by the user, and always said;
- an option counts as the one that sets the micro-batch only if the model's inputs follow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.scripts.command import ACCUMULATION, MICRO_BATCH, UserCommand, read_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchwright.scripts.script_run import ScriptRun

_NOT_OF_TRAINING = ("eval", "test", "valid", "val", "infer", "predict")


@dataclass(frozen=True)
class Script:
    """A program as it is typed, run unmodified.

    >>> script = Script(["train.py", "--batch-size", "{micro_batch}", "--lr", "3e-4"])
    >>> str(script.at(8))
    'train.py --batch-size 8 --lr 3e-4'
    >>> str(Script(["train.py"], batch_option="--bs").at(8))
    'train.py --bs 8'

    Args:
        words: the command, a word each, as it would be typed; {micro_batch} and {accumulation} are filled in.
        cwd: the folder that it runs in.
        batch_option: the option that sets the micro-batch, if no word has {micro_batch}: `--batch-size`, or
            `train.batch_size=` for an override.
        accumulation_option: likewise for the accumulation.
    """

    words: Sequence[str]
    cwd: str | Path = "."
    batch_option: str | None = None
    accumulation_option: str | None = None

    @property
    def command(self) -> UserCommand:
        """The command, taken apart."""
        return read_command(list(self.words))

    @property
    def name(self) -> str:
        """What the program is called in answers."""
        return Path(self.command.program).name

    @property
    def sets_micro_batch(self) -> bool:
        """Whether it is known how to run it at another micro-batch."""
        return self.batch_option is not None or MICRO_BATCH in self.command.placeholders

    def at(
        self,
        micro_batch: int | None = None,
        *,
        accumulation: int | None = None,
        shape: Mapping[str, Any] | None = None,
    ) -> UserCommand:
        """Return the command for a micro-batch; as it is typed where nothing is asked for."""
        command = self.command
        values: dict[str, Any] = dict(shape or {})
        for name, option, value in (
            (MICRO_BATCH, self.batch_option, micro_batch),
            (ACCUMULATION, self.accumulation_option, accumulation),
        ):
            if value is None:
                continue
            if name in command.placeholders:
                values[name] = value
            elif option is not None:
                command = command.with_option(option, value)
        missing = set(shape or {}) - command.placeholders
        if missing:
            raise InvalidInputError(
                f"the command has no place for {', '.join(sorted(missing))}.",
                remedy=f"a word with {{{min(missing)}}}, as in --{min(missing).replace('_', '-')} {{{min(missing)}}}",
            )
        filled = command.fill(values)
        unfilled = {MICRO_BATCH, ACCUMULATION} & filled.placeholders
        if unfilled:
            name = min(unfilled)
            raise InvalidInputError(
                f"the command has {{{name}}}, and no {name.replace('_', '-')} was given.", remedy=f"{name}=8"
            )
        return filled


def recognise_option(run: ScriptRun) -> str | None:
    """Return the option of the program that sets its micro-batch, judged by one run; None if none stands out.

    >>> from batchwright.scripts.script_run import ScriptRun
    >>> run = ScriptRun(input_shapes=((8, 3),), options={"--batch-size": 8, "--eval-batch-size": 8, "--batch-log": 3})
    >>> recognise_option(run)
    '--batch-size'
    """
    sizes = {run.batch_size, *run.loader_batch_sizes}
    fitting = [name for name, value in run.options.items() if value in sizes]
    of_training = [name for name in fitting if not any(word in name.lower() for word in _NOT_OF_TRAINING)]
    by_inputs = [name for name in of_training if run.options[name] == run.batch_size]
    candidates = by_inputs or of_training
    return min(candidates, key=lambda name: (0 if "size" in name else 1, len(name)), default=None)


def check_that_it_follows(script: Script, option: str, runs: Mapping[int, ScriptRun]) -> None:
    """Refuse an option that changes nothing: the model must receive what was asked for, or a multiple of it."""
    sizes = {size: run.batch_size for size, run in runs.items() if run.batch_size is not None}
    if len(sizes) < 2 or len(set(sizes.values())) > 1:
        return
    received = next(iter(sizes.values()))
    raise InvalidInputError(
        f"{option} changes nothing: the model of {script.name} still receives {received} samples.",
        details=[f"run with {option} {', '.join(map(str, sorted(sizes)))}"],
        remedy="{micro_batch} in the place that does",
    )
