"""`Script`: the user's own command where a Workload would go. Nothing in the program has to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.scripts.command import ACCUMULATION, MICRO_BATCH, UserCommand, read_command
from batchwright.units import whole_number
from batchwright.workload import Program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchwright.fitting.fit_result import Fit
    from batchwright.fitting.request import FitRequest
    from batchwright.scripts.estimate_script import ScriptEstimate


@dataclass(frozen=True)
class Script(Program):
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
        steps: optimizer steps of a run until it is cut (forwards, if it only evaluates).
        seconds: the longest that one run may take.
        show_output: show what the program prints, on stderr.

    An option that begins with `$` is a variable of the environment.
    """

    words: Sequence[str]
    cwd: str | Path = "."
    batch_option: str | None = None
    accumulation_option: str | None = None
    seconds: float = 600.0
    show_output: bool = False
    steps: int = 2

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps")

    @property
    def command(self) -> UserCommand:
        """The command, taken apart."""
        return read_command(list(self.words))

    @property
    def name(self) -> str:
        """What the program is called in answers."""
        return Path(self.command.program).name

    @property
    def options(self) -> tuple[str, ...]:
        """What the command line says of it before `--`."""
        named = {
            "--batch-flag": self.batch_option,
            "--accumulation-flag": self.accumulation_option,
            "--cwd": None if str(self.cwd) == "." else str(self.cwd),
        }
        return tuple(word for name, value in named.items() if value is not None for word in (name, value))

    @property
    def sets_accumulation(self) -> bool:
        """Whether it is known how to run it at another accumulation."""
        return self.accumulation_option is not None or ACCUMULATION in self.command.placeholders

    @property
    def least_accumulation(self) -> int | None:
        """An accumulation of 1 where it can be set; as it is typed where it cannot."""
        return 1 if self.sets_accumulation else None

    @property
    def sets_micro_batch(self) -> bool:
        """Whether it is known how to run it at another micro-batch."""
        return self.batch_option is not None or MICRO_BATCH in self.command.placeholders

    def answer_fit(self, request: FitRequest, say: Callable[[str], None]) -> Fit:
        """Find its largest micro-batch: `bw.fit(script)`."""
        from batchwright.scripts.fit_script import fit_script

        return fit_script(self, request, say)

    def answer_estimate(self, **settings: Any) -> ScriptEstimate:
        """Return what it takes: `bw.estimate(script)`."""
        from batchwright.scripts.estimate_script import estimate_script

        return estimate_script(self, **settings)

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
            else:
                raise InvalidInputError(
                    f"the command has no place for a {name.replace('_', '-')} of {value}.",
                    remedy=f"{{{name}}} in its place, as in --{name.replace('_', '-')} {{{name}}}",
                )
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
