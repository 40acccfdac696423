"""`batchwright explain`."""

from __future__ import annotations

import sys

import click

from batchwright.cli.options import shared
from batchwright.concepts import LANGUAGES, TOPICS, read_page
from batchwright.errors import InvalidInputError
from batchwright.report.display import can_show, print_answer, print_json


@click.command("explain")
@click.argument("topic", required=False)
@click.option(
    "--lang",
    default="en",
    show_default=True,
    metavar=f"[{'|'.join(LANGUAGES)}]",
    help="Language of the page.",
)
@shared("--json")
def command(topic: str | None, lang: str, as_json: bool) -> int:
    """Explain the concepts, in English or Chinese.

    Without TOPIC, lists the topics.

    \b
    batchwright explain accumulation
    batchwright explain critical-batch --lang zh
    """
    if topic is None:
        pages = [read_page(name, lang) for name in TOPICS]
        if as_json:
            topics = [{"topic": page.topic, "title": page.title, "summary": page.summary} for page in pages]
            print_json({"schema": 1, "source": None, "lang": lang, "topics": topics})
        else:
            width = max(map(len, TOPICS))
            click.echo("\n".join(f"{page.topic:<{width}}  {page.summary}" for page in pages))
        return 0
    page = read_page(topic, lang)
    if not as_json and not can_show(page.title):
        raise InvalidInputError(
            f"this terminal or file is written in {sys.stdout.encoding}, which cannot show the page.",
            remedy="PYTHONIOENCODING=utf-8 in front of the command, or --json",
        )
    if as_json:
        print_json(page.to_dict())
    elif sys.stdout.isatty():
        from rich.markdown import Markdown

        print_answer(Markdown(page.text))
    else:
        # The pages are written to be read as they are; nothing is gained by redrawing them in a pipe.
        click.echo(page.text.rstrip("\n"))
    return 0
