"""The job behind `fit --then`: checked before anything runs, filled in and run at each answer."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING

import click

from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batchwright.fitting.result import Fit

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class JobFailedError(BatchwrightError):
    """The command behind --then failed: it has told of itself already."""

    exit_code = 3


def run_jobs(template: str, rows: Iterable[Fit], *, as_json: bool) -> None:
    """Run the user's job at each answer, its output behind ours; on stderr where stdout is JSON."""
    import subprocess

    for row in rows:
        if row.micro_batch is None:
            continue
        job = fill_in(template, {"micro_batch": row.micro_batch, **row.shape})
        click.echo(f"running {job}", err=True)
        sys.stdout.flush()
        # The number, not sys.stderr: a job writes past Python's own streams.
        code = subprocess.run(job, shell=True, stdout=2 if as_json else None).returncode
        if code:
            raise JobFailedError(f"the job ended with exit code {code}: {job}")


def check_job(template: str, names: list[str]) -> None:
    """Refuse a job with braces that nothing can be filled into.

    >>> check_job("python eval.py --batch {size}", ["micro_batch"])
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: --then has '{size}'; what can be filled in: {micro_batch}.
      try: {{ and }} for braces that are meant for the shell
    """
    for match in _BRACES.finditer(template):
        if match[0] not in ("{{", "}}") and match[1] not in names:
            raise InvalidInputError(
                f"--then has {shortened(match[0])}; what can be filled in: {', '.join(f'{{{n}}}' for n in names)}.",
                remedy="{{ and }} for braces that are meant for the shell",
            )


def fill_in(template: str, values: Mapping[str, object]) -> str:
    """Fill values into a job that was checked, quoted for the shell.

    >>> fill_in("eval -b {micro_batch} -c {max_crops} > ${{OUT}}", {"micro_batch": 19, "max_crops": 12})
    'eval -b 19 -c 12 > ${OUT}'
    """
    return _BRACES.sub(lambda match: match[0][0] if match[1] is None else shlex.quote(str(values[match[1]])), template)
