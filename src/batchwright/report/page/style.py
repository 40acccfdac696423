"""The page's style sheet, which is put into the page."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def style_sheet() -> str:
    """Return page.css without its comments.

    >>> "/*" in style_sheet(), "prefers-color-scheme: dark" in style_sheet()
    (False, True)
    """
    text = files("batchwright.report.page").joinpath("page.css").read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/\s*", "", text, flags=re.DOTALL).strip()
