"""`batchwright report`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from batchwright.cli.options import Command, shared
from batchwright.errors import InvalidInputError
from batchwright.report.display import print_json


@click.command("report", cls=Command, moved={"--png": "print the page, or save it as a PDF, in a browser"})
@click.argument("run_files", nargs=-1, required=True, metavar="RUN.json [OTHER.json]")
@click.option("-o", "--output", metavar="FILE", help="The page to write.  [default: RUN.html, beside the run]")
@shared("--json")
def command(run_files: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Draw a run of tune as one HTML page, or two runs side by side.

    The page is one file, needs no network and prints well. A section that the run left out says so in its place. Of
    two runs it shows both answers, and what changed. Prints the name of the file.

    \b
    batchwright report run.json -o report.html
    batchwright report before.json after.json
    """
    if len(run_files) > 2:
        raise InvalidInputError(
            f"a page takes one run or two; received {len(run_files)}.",
            remedy="batchwright report before.json after.json",
        )
    from batchwright.report.page.compare import draw_comparison
    from batchwright.report.page.page import draw_page
    from batchwright.tuning.run_file import read_run_file
    from batchwright.user_files import check_place, replace_file

    runs = [read_run_file(run_file) for run_file in run_files]
    page = Path(output) if output is not None else _place_beside(*map(Path, run_files))
    for run_file in run_files:
        # os.path: a name that is too long is reported when it is written.
        if page.absolute() == Path(run_file).absolute() or (os.path.exists(page) and page.samefile(run_file)):
            raise InvalidInputError(f"'{page}' is the run itself.", remedy="another name: -o report.html")
    check_place(page, what="the report", option="-o FILE")
    text = draw_page(runs[0]) if len(runs) == 1 else draw_comparison(runs[0], runs[1], _short_names(*run_files))
    replace_file(page, text.encode(), what="the report", option="-o FILE")
    if as_json:
        print_json({"schema": 1, "written": [str(page)]})
    else:
        click.echo(str(page))


def _short_names(first: str, second: str) -> tuple[str, str]:
    """Call runs by their file names; two of the same name by their paths."""
    names = Path(first).name, Path(second).name
    return names if names[0] != names[1] else (first, second)


def _place_beside(run_file: Path, other: Path | None = None) -> Path:
    if not run_file.is_file() or run_file.absolute().is_relative_to("/dev"):  # such as /dev/stdin
        raise InvalidInputError(f"'{run_file}' is no file that a page could stand beside.", remedy="-o report.html")
    return run_file.with_suffix(".html") if other is None else run_file.with_name(f"{run_file.stem}-{other.stem}.html")
