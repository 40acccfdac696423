"""Write the pages that are made from the program itself: `make docs`.

docs/reference/commands.md is the help of every command, docs/reference/library.md the list of public names;
docs/concepts/ holds the pages of `batchwright explain`.
A test compares what is written here with what is committed.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import click

import batchwright as bw
from batchwright import cli
from batchwright.concepts import LANGUAGES, TOPICS, read_page

DOCS = Path(__file__).parent
INTEGRATIONS = ("transformers", "lightning", "accelerate", "trackers")

LIBRARY = """# Library

Written by `make docs`. Only `bw.*` (`import batchwright as bw`), `bw.integrations.*` and the command are public.

| name | what it is |
|---|---|
{rows}

## What results have in common

Every result is frozen and carries its reason. `print(result)` prints what the command prints, a notebook shows it as a
table, `repr(result)` is one short line. `to_dict()` has the keys that the command prints with `--json`: `schema` is 1,
`source` is measured, predicted or formula, bytes are whole numbers; what is infinite, unresolved or unknown is null.

## Errors and exit codes

Every error batchwright raises deliberately is a `bw.BatchwrightError`, and if an argument was wrong a `ValueError` too.
It says what was asked, what happened, and what to do. An error in your own code keeps its traceback.

| exit code | meaning |
|---|---|
| 0 | answered |
| 1 | a clean no: nothing fits, the audit failed, the critical batch has no upper bound yet, a rank failed |
| 2 | wrong usage |
| 3 | your own code raised |
| 130, 143 | interrupted, terminated |
"""


def generate_pages() -> dict[Path, str]:
    """Return every generated page by its path."""
    pages = {
        DOCS / "reference" / "commands.md": commands_page(),
        DOCS / "reference" / "library.md": library_page(),
    }
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


def library_page() -> str:
    """Return the public names, each with the first sentence of its documentation."""
    public = {f"bw.{name}": getattr(bw, name) for name in bw.__all__}
    for framework in INTEGRATIONS:
        module = importlib.import_module(f"batchwright.integrations.{framework}")
        public |= {f"bw.integrations.{framework}.{name}": getattr(module, name) for name in module.__all__}
    rows = []
    for name, value in public.items():
        sentence = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {sentence} |")
    return LIBRARY.format(rows="\n".join(rows))


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
