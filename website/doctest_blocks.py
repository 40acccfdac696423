"""A griffe extension: the doctests of a docstring become code blocks, which Markdown would take for quotations."""

from __future__ import annotations

from typing import Any

import griffe


def fence_doctests(text: str) -> str:
    """Put fences around each run of lines that begins with `>>>` and ends at an empty line.

    >>> print(fence_doctests("Add.\\n\\n>>> 1 + 1\\n2\\n\\nMore.").replace("`", "'"))
    Add.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    <BLANKLINE>
    More.
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        begins = line.lstrip().startswith(">>>")
        indent = line[: len(line) - len(line.lstrip())]
        if begins and not inside:
            lines.append(f"{indent}```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class FenceDoctests(griffe.Extension):  # type: ignore[misc]  # griffe is of the extra `site`
    """Changes docstrings as they are loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)
