"""The pages of the site, put together from the repository: nothing is written here that stands there already.

Promises:
- every page of docs/, the READMEs, the changelog and the guide for contributors is a page, each under one address;
- a link to another file of the repository leads to a page that shows that file;
- every public name has a page made from its docstring, and the navigation names every page.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

import batchwright as bw

ROOT = Path(__file__).parents[1]
# Where files of the repository stand on the site; the rest of docs/ keeps its place.
MOVED = {
    "docs/README.md": "contents.md",
    "README.md": "readme.md",
    "README.zh.md": "readme.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "SECURITY.md": "development/security.md",
    "LICENSE": "license.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".json": "json", ".mjs": "js", ".css": "css"}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)
INTEGRATIONS = ("accelerate", "lightning", "trackers", "transformers")


def stage_pages(folder: Path) -> dict[str, str]:
    """Write every page into a folder, and return the text of each by its place."""
    pages = {"index.md": (ROOT / "website" / "pages" / "index.md").read_text(encoding="utf-8")}
    origins = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
    origins |= {name: ROOT / name for name in MOVED if (ROOT / name).is_file()}
    waiting = list(origins)
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        text = (
            show_source(name) if name not in origins or name == "LICENSE" else origins[name].read_text(encoding="utf-8")
        )
        if name in origins and name != "LICENSE":
            text, linked = move_links(name, text)
            waiting += [other for other in linked if other not in seen]
            seen |= set(linked)
        pages[place_of(name)] = text
    pages |= api_pages()
    for place, text in pages.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for image in (ROOT / "docs" / "images").iterdir():
        (folder / "images").mkdir(exist_ok=True)
        shutil.copy(image, folder / "images" / image.name)
    for name in ("site.css", "site.js"):
        shutil.copy(ROOT / "website" / name, folder / name)
    (folder / "images" / "favicon.svg").write_text(FAVICON, encoding="utf-8")
    for schema in sorted((ROOT / "docs" / "reference" / "schemas").glob("*.json")):
        (folder / "reference" / "schemas").mkdir(parents=True, exist_ok=True)
        shutil.copy(schema, folder / "reference" / "schemas" / schema.name)
    return pages


FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#4b2a8a"/>'
    '<path d="M3 12V9h2v3zm4 0V6h2v6zm4 0V3h2v9z" fill="#fff"/></svg>\n'
)


def place_of(name: str) -> str:
    """Return where a file of the repository stands on the site.

    >>> place_of("docs/guide/fit.md"), place_of("examples/ddp.py"), place_of("README.md")
    ('guide/fit.md', 'source/examples/ddp.py.md', 'readme.md')
    """
    if name in MOVED:
        return MOVED[name]
    inside = name.removeprefix("docs/")
    is_page = name.startswith("docs/") and PurePosixPath(name).suffix in (".md", ".png", ".svg", ".json")
    return inside if is_page else f"source/{name}.md"


def move_links(name: str, text: str) -> tuple[str, list[str]]:
    """Write the links of a page for its place on the site; also return the files that need a page to be shown on."""
    shown: list[str] = []
    here = PurePosixPath(place_of(name)).parent

    def move(match: re.Match[str]) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        if not target or ":" in target:
            return match[0]
        goal = os.path.normpath(PurePosixPath(name).parent / target)
        file = ROOT / goal
        if file.is_dir():
            file, goal = file / "README.md", f"{goal}/README.md"
        if not file.is_file():
            raise SystemExit(f"{name} links to {target}, which is not there")
        place = place_of(goal)
        if place.startswith("source/"):
            shown.append(goal)
        return f"{before}{os.path.relpath(place, here)}{anchor})"

    pieces, end = [], 0
    for fence in FENCE.finditer(text):
        pieces += [LINK.sub(move, text[end : fence.start()]), fence[0]]
        end = fence.end()
    pieces.append(LINK.sub(move, text[end:]))
    moved = "".join(pieces)
    # A list right below a paragraph is one on GitHub, and for Markdown proper needs an empty line.
    return re.sub(r"(?m)^(?![-*|#>\s\d`]|$)(.*\S)\n(?=(?:- |\d+\. )\S)", r"\1\n\n", moved), shown


def show_source(name: str) -> str:
    """Return a page that shows a file of the repository."""
    text = (ROOT / name).read_text(encoding="utf-8")
    language = LANGUAGES.get(PurePosixPath(name).suffix, "text")
    return f"# {name}\n\n`````{language}\n{text.rstrip()}\n`````\n"


def api_pages() -> dict[str, str]:
    """Return a page for every public name, made from its docstring, and one that lists them."""
    lower = [name.lower() for name in bw.__all__]

    def file_of(name: str) -> str:
        # `Plan` and `plan` would be one file where case does not count.
        return f"{name}-class" if lower.count(name.lower()) > 1 and name[0].isupper() else name

    level = "    options:\n      heading_level: 1\n"
    pages = {file_of(name): f"::: batchwright.{bw._HOMES[name]}.{name}\n{level}" for name in bw.__all__}
    rows = [f"- [`bw.{name}`]({file_of(name)}.md)" for name in bw.__all__]
    for name in INTEGRATIONS:
        title, options = f"bw.integrations.{name}", "    options:\n      show_root_heading: false\n"
        pages[f"integrations-{name}"] = f"# {title}\n\n::: batchwright.integrations.{name}\n{options}"
        rows.append(f"- [`{title}`](integrations-{name}.md)")
    head = "# API\n\nEvery public name, from its docstring. `import batchwright as bw` imports nothing heavy.\n\n"
    pages["index"] = head + "\n".join(rows) + "\n"
    return {f"reference/api/{file}.md": text for file, text in pages.items()}


def navigation(pages: dict[str, str]) -> list[dict[str, object]]:
    """Return the navigation: every page, under the part that it belongs to."""

    def part(folder: str, first: tuple[str, ...] = ()) -> list[dict[str, str]]:
        places = sorted(place for place in pages if PurePosixPath(place).parent.as_posix() == folder)
        places = [place for place in places if place != "guide/calculator.md"]
        ordered = [f"{folder}/{name}.md" for name in first if f"{folder}/{name}.md" in pages]
        return [
            {title_of(pages[place], place): place} for place in [*ordered, *(p for p in places if p not in ordered)]
        ]

    concepts = ("batch-size", "effective-batch", "accumulation", "memory", "critical-batch")
    sources = sorted(place for place in pages if place.startswith("source/"))
    return [
        {"Home": [{"batchwright": "index.md"}, {"Start": "readme.md"}, {"All pages": "contents.md"}]},
        {"Calculator": "guide/calculator.md"},
        {"Guide": part("guide", ("scripts", "tune", "estimate", "fit", "plan", "audit", "accumulate", "noise"))},
        {"Concepts": part("concepts/en", concepts)},
        {"Reference": [*part("reference", ("commands", "library")), {"API": part("reference/api", ("index",))}]},
        {"Development": [*part("development"), {"Changes": "changelog.md"}, {"Licence": "license.md"}]},
        {"中文": [{"开始": "readme.zh.md"}, *part("concepts/zh", concepts)]},
        {"Source": [{place.removeprefix("source/").removesuffix(".md"): place} for place in sources]},
    ]


def title_of(text: str, place: str) -> str:
    """Return a page's first heading."""
    match = re.search(r"^# (.+)$", text, re.M)
    if match is None:
        documented = re.search(r"^::: .*\.(\w+)$", text, re.M)
        return f"bw.{documented[1]}" if documented else PurePosixPath(place).stem
    return match[1].replace("`", "")
