"""What a program takes as it is typed: one run until its second optimizer step, on the host or on a simulated card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.device.device import default_device
from batchwright.printed_result import PrintedResult
from batchwright.scripts.probe import DEFAULT_SECONDS, DEFAULT_WINDOWS, ScriptProbe, check_that_it_ran
from batchwright.scripts.script_run import OUT_OF_MEMORY, ScriptRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType

    from batchwright.scripts.script import Script


@dataclass(frozen=True, repr=False)
class ScriptEstimate(PrintedResult):
    """The peak of a program's own step, and what was seen of it."""

    in_repr = ("name", "on", "micro_batch", "fits")

    name: str
    command: str
    on: str
    run: ScriptRun
    limit_bytes: int | None
    source: str

    @property
    def micro_batch(self) -> int | None:
        """The samples that the model received."""
        return self.run.batch_size

    @property
    def fits(self) -> bool:
        """Whether the program ran to its cut."""
        return self.run.end != OUT_OF_MEMORY

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, the same as `batchwright estimate --json -- COMMAND` prints."""
        run = self.run
        return {
            "schema": 1,
            "source": self.source,
            "name": self.name,
            "command": self.command,
            "on": self.on,
            "fits": self.fits,
            "micro_batch": self.micro_batch,
            "accumulation": run.accumulation,
            "peak_bytes": None if run.peak_bytes is None else asdict(run.peak_bytes),
            "limit_bytes": self.limit_bytes,
            "windows": run.windows,
            "num_windows": run.num_windows,
            "backwards_per_window": list(run.backwards_per_window),
            "input_shapes": [list(shape) for shape in dict.fromkeys(run.input_shapes)],
            "window_seconds": list(run.window_seconds),
            "made_up_reads": run.made_up_reads,
            "options": dict(run.options),
            "files_written": list(run.files_written),
            "notes": list(run.notes),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.text.script_text import draw_script_estimate

        return draw_script_estimate(self)

    def _repr_html_(self) -> str:
        from batchwright.report.display import table_to_html
        from batchwright.report.text.script_text import script_columns, script_remarks, summarize_script

        return table_to_html(summarize_script(self), script_columns(self), script_remarks(self))


def estimate_script(
    script: Script,
    *,
    on: str | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    shape: Mapping[str, Any] | None = None,
    limit_bytes: int | None = None,
    steps: int = DEFAULT_WINDOWS,
    seconds: float = DEFAULT_SECONDS,
    show_output: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ScriptEstimate:
    """Run a program until its second optimizer step and return what it takes.

    Args:
        script: the program as it is typed.
        on: where: cpu, or a card of the catalogue, which is simulated. Default: the accelerator here, else cpu.
        micro_batch: fills {micro_batch}, or the script's batch option; default: as it is typed.
        accumulation: likewise.
        shape: values of further placeholders.
        limit_bytes: a budget: of the process on the host, of the card on a card.
        steps: optimizer steps after which the program is cut.
        seconds: the longest that it may take.
        show_output: show what the program prints, on stderr.
        progress: called with what is being done.
    """
    place = on or default_device()
    command = script.at(micro_batch, accumulation=accumulation, shape=shape)
    if progress is not None:
        progress(f"running {command} until optimizer step {steps}")
    probe = ScriptProbe(command, place, Path(script.cwd), steps, seconds, show_output)
    run = probe.run(limit_bytes=limit_bytes)
    check_that_it_ran(run, command, seconds=seconds)
    source = "measured" if place == "cpu" else "predicted"
    return ScriptEstimate(script.name, str(command), place, run, limit_bytes, source)
