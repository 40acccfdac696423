"""The docs are true: what is generated is up to date, and every command and option is spoken of."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from batchwright import __version__, cli
from batchwright.cli.options import OF_SCRIPTS

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date() -> None:
    for path, text in load_generator().generate_pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is stale: run make docs"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_and_option_is_spoken_of_on_its_own_page(name: str) -> None:
    command = cli.group.get_command(click.Context(cli.group), name)
    assert command is not None
    page = (DOCS / "guide" / f"{name}.md").read_text(encoding="utf-8")
    assert f"batchwright {name}" in page
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            option = max(parameter.opts, key=len)
            # What is said about a command of the user's own has one page for all.
            where = "scripts" if option in OF_SCRIPTS else name
            spoken = page if where == name else (DOCS / "guide" / "scripts.md").read_text(encoding="utf-8")
            assert option in spoken, f"docs/guide/{where}.md does not speak of {option}"


def test_links_between_pages_lead_to_files_and_headings() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    links = [(page, *link) for page in pages for link in re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", read(page))]
    assert len(links) > 100
    for page, target, anchor in links:
        goal = page.parent / target if target else page
        assert goal.exists(), f"{page.relative_to(ROOT)} links to {target}"
        assert not anchor or anchor in anchors_of(goal), f"{page.relative_to(ROOT)} links to {target}#{anchor}"


def test_every_page_can_be_reached_from_the_index() -> None:
    index = read(DOCS / "README.md")
    for page in DOCS.rglob("*.md"):
        place = str(page.relative_to(DOCS))
        assert place == "README.md" or place.startswith("concepts/zh") or f"({place})" in index, place


def test_users_are_sent_to_public_names_only() -> None:
    pages = [*ROOT.glob("README*.md"), *(DOCS / "guide").glob("*.md"), *(DOCS / "reference").glob("*.md")]
    for page in [*pages, *(ROOT / "examples").glob("*.py")]:
        imported = set(re.findall(r"(?:from|import) batchwright\.(\w+)", read(page)))
        assert imported <= {"integrations"}, f"{page.relative_to(ROOT)} imports from batchwright.{imported}"


def test_the_walks_of_the_architecture_pass_few_files_that_exist() -> None:
    walks = re.split(r"^\d\. ", read(DOCS / "development" / "architecture.md"), flags=re.M)[1:]
    for walk, most in zip(walks, (14, 14, 10, 6), strict=True):
        files = re.findall(r"`([\w/]+\.py)`", walk.partition("\n\n")[0])
        assert 4 <= len(files) <= most
        assert [file for file in files if not (ROOT / "src" / "batchwright" / file).is_file()] == []


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_stays_short() -> None:
    assert len(read(ROOT / "README.md").split()) <= 1000


def test_the_makefile_names_tests_that_exist() -> None:
    lists = re.findall(r"addprefix (tests/\S*test_), ([^)]*)\)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    files = [prefix + name for prefix, names in lists for name in names.replace("\\\n", " ").split()]
    assert len(files) >= 20
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_changelog_speaks_of_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_chinese_readme_has_the_commands_and_figures_of_the_english_one() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    blocks = re.findall(r"^```.*?^```", chinese, re.M | re.S)
    assert len(blocks) >= 5
    assert [block for block in blocks if block not in english] == []
    figures = [
        [sorted(re.findall(r"\d[\d.]*", row)) for row in re.findall(r"^\|.*benchmarks/.*\|$", text, re.M)]
        for text in (english, chinese)
    ]
    assert figures[0] == figures[1]
