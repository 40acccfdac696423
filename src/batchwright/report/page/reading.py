"""Reads a run's JSON for drawing.

Promises:
- what is missing, null, infinite, absurd or of another kind than expected is None or empty, never an error: a page of
  half a run is better than none.
"""

from __future__ import annotations

from typing import Any

Data = dict[str, Any]


def section_of(run: Data, name: str) -> Data | None:
    """Return a section that holds an answer.

    >>> section_of({"fit": {"skipped": "asked for"}}, "fit")
    """
    found = run.get(name)
    # Only words: the section of the noise has a `skipped` of its own, the windows it left out.
    is_skipped = isinstance(found, dict) and isinstance(found.get("skipped"), str)
    return found if isinstance(found, dict) and found and not is_skipped else None


def why_missing(run: Data, name: str) -> str:
    """Return why a section holds no answer.

    >>> why_missing({"fit": {"skipped": "asked for"}}, "fit"), why_missing({}, "fit")
    ('asked for', 'the file says nothing of it')
    """
    return in_one_line(text_in(run, name, "skipped")) or "the file says nothing of it"


def in_one_line(why: str) -> str:
    """Return why a stage gave nothing: of a traceback what stands behind its frames, of a message all of it.

    >>> in_one_line("failed: Traceback (most recent call last):\\n  File 'train.py'\\nValueError: no")
    'failed: ValueError: no'
    >>> in_one_line("failed: data= holds 0 samples.\\n  try: a dataset that is not empty")
    'failed: data= holds 0 samples. try: a dataset that is not empty'
    """
    before, trace, after = why.rpartition("Traceback (most recent call last):")
    lines = (after if trace else why).splitlines()
    if trace:
        frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
        lines = lines[frames[-1] + 1 :] if frames else lines
        before = before.partition("Traceback")[0]  # of errors that caused it
    return before + " ".join(line.strip() for line in lines if line.strip())


def number_in(data: object, *path: str) -> float | None:
    """Return the number at a path.

    >>> number_in({"peak": {"device": 512}}, "peak", "device"), number_in({"peak": None}, "peak", "device")
    (512, None)
    """
    value = _at(data, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Beyond it the arithmetic of a drawing overflows, and nobody measured it; infinite and not-a-number fail it too.
    return value if value == 0 or 1e-30 <= abs(value) <= 1e30 else None


def text_in(data: object, *path: str) -> str:
    """Return the text at a path, with no space around it.

    >>> text_in({"name": " tiny "}, "name"), text_in({"name": 3}, "name")
    ('tiny', '')
    """
    value = _at(data, path)
    return value.strip() if isinstance(value, str) else ""


def texts_in(data: object, *path: str) -> list[str]:
    """Return the texts in the list at a path."""
    return [each.strip() for each in _list_at(data, path) if isinstance(each, str) and each.strip()]


def rows_in(data: object, *path: str) -> list[Data]:
    """Return the objects in the list at a path."""
    return [each for each in _list_at(data, path) if isinstance(each, dict)]


def mapping_in(data: object, *path: str) -> Data:
    """Return the object at a path."""
    value = _at(data, path)
    return value if isinstance(value, dict) else {}


def span_in(data: object, *path: str) -> tuple[float, float] | None:
    """Return the two ends at a path.

    >>> span_in({"range": [28, 61]}, "range"), span_in({"range": [28, None]}, "range")
    ((28, 61), None)
    """
    ends = [number_in({"end": each}, "end") for each in _list_at(data, path)]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return None
    return ends[0], ends[1]


def _list_at(data: object, path: tuple[str, ...]) -> list[Any]:
    value = _at(data, path)
    return value if isinstance(value, list) else []


def _at(data: object, path: tuple[str, ...]) -> object:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data
