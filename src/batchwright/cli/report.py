"""`batchwright report`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from batchwright.cli.options import json_option, print_json


@click.command("report")
@click.argument("run_file", metavar="RUN.json")
@click.option("-o", "--output", metavar="FILE", help="The page to write.  [default: RUN.html, beside the run]")
@click.option("--png", metavar="FILE", help="Draw the main charts to a .png file too; needs batchwright[plot].")
@json_option
def command(run_file: str, output: str | None, png: str | None, as_json: bool) -> None:
    """Draw a run of tune as one HTML page.

    The page is one file that asks nothing of the network. What the run left out is said in its place. Prints the files
    that were written.

    \b
    batchwright report run.json -o report.html
    batchwright report run.json --png report.png
    """
    from batchwright.report.page.page import draw_page
    from batchwright.tuning.run_file import read_run_file
    from batchwright.user_files import replace_file

    run = read_run_file(run_file)
    page = Path(output) if output is not None else _beside(Path(run_file))
    _check_places(Path(run_file), page, None if png is None else Path(png))
    if png is not None:
        from batchwright.report.pictures import check_png

        check_png(png)
    replace_file(page, draw_page(run).encode(), what="the report", option="-o FILE")
    written = [str(page)]
    if png is not None:
        from batchwright.report.pictures import draw_png

        draw_png(run, png)
        written.append(png)
    if as_json:
        print_json({"schema": 1, "written": written})
    else:
        click.echo("\n".join(written))


def _check_places(run_file: Path, page: Path, png: Path | None) -> None:
    """Refuse to write over the run, or one file over the other."""
    from batchwright.errors import InvalidInputError
    from batchwright.user_files import check_place

    for place in (page, *([] if png is None else [png])):
        # os.path: a name that is too long is told of when it is written.
        if place.absolute() == run_file.absolute() or (os.path.exists(place) and place.samefile(run_file)):
            raise InvalidInputError(f"'{place}' is the run itself.", remedy="another name: -o report.html")
    if png is not None and png.absolute() == page.absolute():
        raise InvalidInputError(
            f"the page and the picture cannot both be '{png}'.", remedy="another name for one of them"
        )
    check_place(page, what="the report", option="-o FILE")
    if png is not None:
        check_place(png, what="the picture", option="--png FILE")


def _beside(run_file: Path) -> Path:
    from batchwright.errors import InvalidInputError

    if not run_file.is_file() or run_file.absolute().is_relative_to("/dev"):  # such as /dev/stdin
        raise InvalidInputError(f"'{run_file}' is no file that a page could stand beside.", remedy="-o report.html")
    return run_file.with_suffix(".html")
