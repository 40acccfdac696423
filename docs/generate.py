"""Write the pages that are made from the program itself: `make docs`.

docs/reference/commands.md is the help of every command; docs/concepts/ holds the pages of `batchwright explain`.
A test compares what is written here with what is committed.
"""

from __future__ import annotations

from pathlib import Path

import click

from batchwright import cli
from batchwright.concepts.pages import LANGUAGES, TOPICS, read_page

DOCS = Path(__file__).parent


def generate_pages() -> dict[Path, str]:
    """Return every generated page by its path."""
    pages = {DOCS / "reference" / "commands.md": commands_page()}
    for lang in LANGUAGES:
        for topic in TOPICS:
            pages[DOCS / "concepts" / lang / f"{topic}.md"] = read_page(topic, lang).text
    return pages


def commands_page() -> str:
    """Return the help of the group and of every command."""
    parts = ["# Commands", "", "Written by `make docs` from the help of each command.", ""]
    context = _context(cli.group, "batchwright", None)
    parts += ["```text", "$ batchwright --help", cli.group.get_help(context), "```", ""]
    for name in cli.COMMANDS:
        command = cli.group.get_command(context, name)
        assert command is not None
        text = command.get_help(_context(command, name, context))
        parts += [f"## {name}", "", "```text", f"$ batchwright {name} --help", text, "```", ""]
    return "\n".join(parts)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    # A fixed width, so that the page does not depend on the terminal it was written from.
    return click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=100,
        max_content_width=100,
        help_option_names=["-h", "--help"],
    )


if __name__ == "__main__":
    for path, text in generate_pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS.parent))
