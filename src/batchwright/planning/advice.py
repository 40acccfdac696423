"""`advise`: what to change when training runs out of memory, is unstable, or is slow.

Promises:
- every option is a whole setting, before and after, with its effective batch and its learning rate;
- what is not known (the largest micro-batch that fits, the critical batch) is not made up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.learning_rate import LearningRateRule, checked_learning_rate, rule_for
from batchwright.planning.remedies import REMEDIES, Case, Option, Setting
from batchwright.printed_result import PrintedResult
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from rich.console import RenderableType

PROBLEMS = tuple(REMEDIES)
_ALSO_KNOWN_AS = {"oom": "out-of-memory", "out of memory": "out-of-memory", "out_of_memory": "out-of-memory"}


@dataclass(frozen=True, repr=False)
class Advice(PrintedResult):
    """What to change, best first, and what else helps.

    >>> advice = advise("out-of-memory", micro_batch=8)
    >>> [(option.after.micro_batch, option.after.accumulation) for option in advice.options]
    [(4, 2), (2, 4), (1, 8)]
    """

    in_repr = ("problem",)

    problem: str
    before: Setting
    options: tuple[Option, ...]
    further: tuple[str, ...]
    rule: LearningRateRule

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data, the same as `batchwright advise --json` prints."""
        return {
            "schema": 1,
            "source": "formula",
            "problem": self.problem,
            "before": self.before.to_dict(),
            "options": [
                {
                    "title": option.title,
                    "after": option.after.to_dict(),
                    "keeps_effective_batch": option.after.effective_batch == self.before.effective_batch,
                    "learning_rate_factor": option.learning_rate_factor,
                    "why": option.why,
                }
                for option in self.options
            ],
            "further": list(self.further),
            "learning_rate_rule": self.rule.to_dict(),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.advice_text import draw_advice

        return draw_advice(self)

    def _repr_html_(self) -> str:
        from batchwright.report.advice_text import advice_columns, advice_remarks, summarize_advice
        from batchwright.report.html import table_to_html

        return table_to_html(summarize_advice(self), advice_columns(self), advice_remarks(self))


def advise(
    problem: str,
    *,
    micro_batch: int,
    accumulation: int = 1,
    devices: int = 1,
    optimizer: str = "adamw",
    learning_rate: float | None = None,
    max_micro_batch: int | None = None,
    critical_batch: int | None = None,
) -> Advice:
    """Say what to change about the batch when something goes wrong.

    >>> advise("unstable", micro_batch=4, accumulation=4, devices=5).options[0].after
    Setting(micro_batch=4, accumulation=8, devices=5, learning_rate=None)

    `problem` is "out-of-memory", "unstable" or "slow"; the other numbers are the setting as it is now.
    `max_micro_batch` is the largest that fits, `critical_batch` the effective batch beyond which more samples
    stop paying; both sharpen the answer where they are known.
    """
    name = _ALSO_KNOWN_AS.get(problem.lower(), problem.lower()) if isinstance(problem, str) else problem
    if name not in PROBLEMS:
        raise InvalidInputError(f"problem must be one of {', '.join(PROBLEMS)}; received {shortened(problem)}.")
    before = Setting(
        whole_number(micro_batch, "micro-batch"),
        whole_number(accumulation, "accumulation"),
        whole_number(devices, "devices"),
        None if learning_rate is None else checked_learning_rate(learning_rate),
    )
    # The product is what everything is computed from, so it has to be a usable count itself.
    whole_number(before.effective_batch, "effective batch (micro-batch x accumulation x devices)")
    case = Case(
        before,
        rule_for(optimizer),
        None if max_micro_batch is None else whole_number(max_micro_batch, "max micro-batch"),
        None if critical_batch is None else whole_number(critical_batch, "critical batch"),
    )
    _refuse_contradiction(name, case)
    options, further = REMEDIES[name]
    return Advice(name, before, tuple(options(case)), tuple(further(case)), case.rule)


def _refuse_contradiction(problem: str, case: Case) -> None:
    fits, now = case.max_micro_batch, case.before.micro_batch
    if problem == "out-of-memory" and fits is not None and fits >= now:
        raise InvalidInputError(
            f"max micro-batch {fits:,} says that micro-batch {now:,} fits, so it does not run out of memory.",
            remedy="leave out max micro-batch, or give the one that really fits",
        )
    if problem != "out-of-memory" and fits is not None and fits < now:
        raise InvalidInputError(
            f"micro-batch {now:,} is above the largest that fits, {fits:,}: it runs out of memory first.",
            remedy=f"advise out-of-memory with micro-batch {now:,} and max micro-batch {fits:,}",
        )
