"""Look at a built site: do its links lead somewhere, is everything on a page, can every page be reached.

python website/check_site.py FOLDER
"""

from __future__ import annotations

import sys
from collections import deque
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click

import batchwright as bw
from batchwright import cli

# Pages that mkdocs makes for the server, and that nobody is sent to.
_UNLINKED = ("404.html",)


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to; and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect addresses and anchors."""
        named = dict(attrs)
        if named.get("id"):
            self.anchors.add(named["id"] or "")
        if tag == "a" and named.get("href"):
            self.links.append(named["href"] or "")
        is_loaded = tag in ("script", "img", "iframe", "source") or "stylesheet" in (named.get("rel") or "")
        address = named.get("src") or (named.get("href") if tag == "link" else None)
        if is_loaded and address:
            self.loads.append(address)

    def handle_data(self, data: str) -> None:
        """Collect words."""
        self.words.append(data)


def find_problems(site: Path) -> tuple[list[str], dict[str, int]]:
    """Return what is wrong with a site, and how much there was to look at."""
    site = site.resolve()
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    problems: list[str] = []
    leads: dict[Path, set[Path]] = {}
    num_links = 0
    for file, page in pages.items():
        name = file.relative_to(site).as_posix()
        leads[file] = set()
        for address in page.links:
            goal, problem = _follow(site, file, address, pages)
            num_links += 1
            if problem:
                problems.append(f"{name}: {problem}")
            if goal is not None:
                leads[file].add(goal)
        for address in page.loads:
            if urlsplit(address).netloc:
                problems.append(f"{name} loads {address} from another origin")
            elif not address.startswith("data:") and _follow(site, file, address, pages)[1]:
                problems.append(f"{name} loads {address}, which is not there")
    clicks = _count_clicks(site / "index.html", leads)
    for file in pages:
        far = clicks.get(file)
        if file.name not in _UNLINKED and (far is None or far > 2):
            problems.append(f"{file.relative_to(site)} takes {far or 'no number of'} clicks")
    problems += _missing(pages, site)
    counts = {"pages": len(pages), "links": num_links, "public names": len(bw.__all__), "options": len(list(options()))}
    return problems, counts


def _follow(site: Path, file: Path, address: str, pages: dict[Path, Page]) -> tuple[Path | None, str]:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None, ""  # elsewhere: not asked
    path = unquote(parts.path)
    goal = file if not path else (site / path.lstrip("/") if path.startswith("/") else file.parent / path).resolve()
    if goal.is_dir():
        goal = goal / "index.html"
    if not goal.is_file():
        return None, f"the link to {address} leads nowhere"
    if parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].anchors:
        # mkdocs-material's own switches of its drawers are labels, not links.
        return goal, "" if parts.fragment.startswith("__") else f"{address} has no such anchor"
    return goal, ""


def _count_clicks(start: Path, leads: dict[Path, set[Path]]) -> dict[Path, int]:
    clicks, waiting = {start.resolve(): 0}, deque([start.resolve()])
    while waiting:
        file = waiting.popleft()
        for goal in leads.get(file, ()):
            if goal not in clicks:
                clicks[goal] = clicks[file] + 1
                waiting.append(goal)
    return clicks


def options() -> list[tuple[str, str]]:
    """Return every option with its command."""
    found = []
    for name in cli.COMMANDS:
        command = cli.group.get_command(click.Context(cli.group), name)
        assert command is not None
        found += [(name, max(p.opts, key=len)) for p in command.params if isinstance(p, click.Option)]
    return found


def _missing(pages: dict[Path, Page], site: Path) -> list[str]:
    """Name what no page speaks of: a public name has its docstring's anchor, an option stands in its command's help."""
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    homes = {name: f"batchwright.{bw._HOMES[name]}.{name}" for name in bw.__all__}
    missing = [f"bw.{name} is on no page" for name, home in homes.items() if home not in anchors]
    if 'id="question"' not in (site / "calculator" / "index.html").read_text(encoding="utf-8"):
        missing.append("calculator/index.html is not the calculator")
    commands = "".join(pages[site / "reference" / "commands" / "index.html"].words)
    behind = {name: commands.partition(f"batchwright {name} --help")[2] for name in cli.COMMANDS}
    helps = {name: text.partition("$ batchwright")[0] for name, text in behind.items()}
    return missing + [f"{name} {option} is on no page" for name, option in options() if option not in helps[name]]


if __name__ == "__main__":
    found, looked_at = find_problems(Path(sys.argv[1]))
    print(looked_at, *found, sep="\n")
    sys.exit(1 if found else 0)
