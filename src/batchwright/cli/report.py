"""`batchwright report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchwright.cli.options import json_option, print_json

if TYPE_CHECKING:
    from batchwright.errors import BatchwrightError


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

    run = read_run_file(run_file)
    page = Path(output) if output is not None else _beside(Path(run_file))
    _check_places(Path(run_file), page, None if png is None else Path(png))
    if png is not None:
        from batchwright.report.run_png import check_png

        check_png(png)
    written = [_write(page, draw_page(run))]
    if png is not None:
        from batchwright.report.run_png import draw_png

        draw_png(run, png)
        written.append(png)
    if as_json:
        print_json({"schema": 1, "written": written})
    else:
        click.echo("\n".join(written))


def _check_places(run_file: Path, page: Path, png: Path | None) -> None:
    """Refuse to write over the run, or one file over the other."""
    from batchwright.errors import InvalidInputError

    for place in (page, *([] if png is None else [png])):
        # os.path: a name that is too long is told of when it is written.
        if place.absolute() == run_file.absolute() or (os.path.exists(place) and place.samefile(run_file)):
            raise InvalidInputError(f"'{place}' is the run itself.", remedy="another name: -o report.html")
    if png is not None and png.absolute() == page.absolute():
        raise InvalidInputError(
            f"the page and the picture cannot both be '{png}'.", remedy="another name for one of them"
        )
    for place in (page, *([] if png is None else [png])):
        if not place.absolute().parent.is_dir():
            raise _cannot_write(place, "there is no such folder", option="--png" if place is png else "-o")


def _beside(run_file: Path) -> Path:
    from batchwright.errors import InvalidInputError

    if not run_file.is_file() or run_file.absolute().is_relative_to("/dev"):  # such as /dev/stdin
        raise InvalidInputError(f"'{run_file}' is no file that a page could stand beside.", remedy="-o report.html")
    return run_file.with_suffix(".html")


def _write(page: Path, text: str) -> str:
    from batchwright.tuning.run_file import replace_file

    try:
        replace_file(page, text.encode())
    except OSError as error:
        raise _cannot_write(page, error.strerror or str(error)) from None
    return str(page)


def _cannot_write(place: Path, why: str, *, option: str = "-o") -> BatchwrightError:
    from batchwright.errors import BatchwrightError

    return BatchwrightError(
        f"the report cannot be written to '{place}': {why[:1].lower()}{why[1:]}.",
        remedy=f"another place: {option} FILE, in a folder that exists and has room",
    )
