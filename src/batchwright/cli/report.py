"""`batchwright report`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from batchwright.cli.options import Command, shared
from batchwright.errors import InvalidInputError
from batchwright.report.display import print_json


@click.command("report", cls=Command, moved={"--png": "print the page, or save it as a PDF, in a browser"})
@click.argument("run_file", metavar="RUN.json")
@click.option("-o", "--output", metavar="FILE", help="The page to write.  [default: RUN.html, beside the run]")
@shared("--json")
def command(run_file: str, output: str | None, as_json: bool) -> None:
    """Draw a run of tune as one HTML page.

    The page is one file, needs no network and prints well. A section that the run left out says so in its place.
    Prints the name of the file.

    \b
    batchwright report run.json -o report.html
    """
    from batchwright.report.page.page import draw_page
    from batchwright.tuning.run_file import read_run_file
    from batchwright.user_files import check_place, replace_file

    run = read_run_file(run_file)
    page = Path(output) if output is not None else _place_beside(Path(run_file))
    # os.path: a name that is too long is reported when it is written.
    if page.absolute() == Path(run_file).absolute() or (os.path.exists(page) and page.samefile(run_file)):
        raise InvalidInputError(f"'{page}' is the run itself.", remedy="another name: -o report.html")
    check_place(page, what="the report", option="-o FILE")
    replace_file(page, draw_page(run).encode(), what="the report", option="-o FILE")
    if as_json:
        print_json({"schema": 1, "written": [str(page)]})
    else:
        click.echo(str(page))


def _place_beside(run_file: Path) -> Path:
    if not run_file.is_file() or run_file.absolute().is_relative_to("/dev"):  # such as /dev/stdin
        raise InvalidInputError(f"'{run_file}' is no file that a page could stand beside.", remedy="-o report.html")
    return run_file.with_suffix(".html")
