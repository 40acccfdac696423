"""The concepts behind the numbers: one Markdown page per topic and language, shipped with the package.

A page opens with `# Title`, then one line that sums it up; the rest is Markdown that reads well as plain text.
docs/concepts is made from the same files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchwright.errors import InvalidInputError
from batchwright.units import one_of, shortened

TOPICS = ("batch-size", "effective-batch", "accumulation", "memory", "critical-batch")
LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Page:
    """One concept in one language."""

    topic: str
    lang: str
    title: str
    summary: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return the page as plain data, the same as `batchwright explain TOPIC --json` prints."""
        # A page holds no number of its own making, so it has no source to name.
        return {"schema": 1, "source": None, **asdict(self)}


def read_page(topic: str, lang: str = "en") -> Page:
    """Return the page on a topic.

    >>> read_page("accumulation").title
    'Accumulation'
    """
    lang = one_of("language", lang, LANGUAGES)
    name = topic.lower().replace("_", "-").replace(" ", "-")
    if name not in TOPICS:
        import difflib

        near = difflib.get_close_matches(name, TOPICS, n=1)
        raise InvalidInputError(
            f"no page on {shortened(topic)}; topics are {', '.join(TOPICS)}.", remedy=near[0] if near else ""
        )
    text = (Path(__file__).parent / lang / f"{name}.md").read_text(encoding="utf-8")
    title, summary = (line for line in text.split("\n", 3)[:3] if line)
    return Page(name, lang, title.removeprefix("# "), summary, text)
