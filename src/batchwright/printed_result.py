"""What every result shares: `print(result)` is the text that the command prints, a notebook shows the same, and
`repr(result)` is one short line.

Promises:
- the text is that of a pipe: no colour codes, no folding, the same whatever the terminal's width;
- `repr` names what the result answers, and leaves its evidence out.
"""

from __future__ import annotations

import importlib
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from batchwright.units import shortened

if TYPE_CHECKING:
    from rich.console import RenderableType


class PrintedLine:
    """A result whose `str` is one line."""

    def _repr_html_(self) -> str:
        from batchwright.report.display import text_to_html

        return text_to_html(str(self))


class PrintedResult:
    """A result that prints itself; a dataclass that inherits from it is made with `repr=False`.

    >>> class Answer(PrintedResult):
    ...     in_repr = ("batch",)
    ...     batch = 43
    ...     def __rich__(self): return "[bold]43[/bold] samples"
    >>> print(Answer())
    43 samples
    >>> Answer()
    Answer(batch=43)
    """

    in_repr: ClassVar[tuple[str, ...]]
    """The attributes that `repr` shows."""

    drawn_by: ClassVar[str]
    """The function of `report/text` that draws it, as `module.function`: report/ stands above, so it loads late."""

    def __rich__(self) -> RenderableType:
        """Return what is printed."""
        module, function = self.drawn_by.split(".")
        draw: Any = getattr(importlib.import_module(f"batchwright.report.text.{module}"), function)
        drawn: RenderableType = draw(self)
        return drawn

    def __str__(self) -> str:
        from batchwright.report.display import render_plain

        return render_plain(self)

    def _repr_html_(self) -> str:
        from batchwright.report.display import Drawing, text_to_html

        drawn = self.__rich__()
        return drawn.to_html() if isinstance(drawn, Drawing) else text_to_html(str(self))

    def __repr__(self) -> str:
        values = {name: getattr(self, name, None) for name in self.in_repr}
        # What is a record itself, a critical batch say, has a line of text that is shorter than its fields.
        shown = (f"{k}={v if is_dataclass(v) else shortened(v)}" for k, v in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"
