"""What a program takes as text: the peak, what the model received, and what has to be known about the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.report.display import Columns, draw_table
from batchwright.report.text.time_text import describe_time
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.scripts.estimate_script import ScriptEstimate

_KINDS = (("allocated", "tensors"), ("reserved", "what PyTorch holds"), ("device", "what the device must have"))


_PHASES = {
    "build": "what comes before the first forward",
    "batch": "between steps",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "the optimizer step",
}


def draw_script_estimate(estimate: ScriptEstimate) -> RenderableType:
    """Draw the answer."""
    return draw_table(summarize_script(estimate), script_columns(estimate), script_remarks(estimate), left=1)


def summarize_script(estimate: ScriptEstimate) -> str:
    """Say the answer in one line."""
    size = "" if estimate.micro_batch is None else f" at micro-batch {estimate.micro_batch:,}"
    if not estimate.fits:
        return f"{estimate.name}: runs out of memory on {estimate.on}{size}"
    peak = estimate.run.peak_bytes
    most = None if peak is None else peak.device if peak.device is not None else peak.allocated
    amount = "its peak is not known" if most is None else f"peak {format_bytes(most)}"
    return f"{estimate.name}: {amount}{size}, {estimate.source} on {estimate.on}"


def script_columns(estimate: ScriptEstimate) -> Columns:
    """A row for each kind of peak that is known."""
    peak = estimate.run.peak_bytes
    if peak is None:
        return []
    rows = [(name, words, value) for name, words in _KINDS if (value := getattr(peak, name)) is not None]
    if estimate.on == "cpu":
        rows = [("process", "private memory above what imports take", value) for _, __, value in rows]
    return [
        ("peak", [name for name, _, __ in rows]),
        ("bytes", [format_bytes(value) for _, __, value in rows]),
        ("of", [words for _, words, __ in rows]),
    ]


def script_remarks(estimate: ScriptEstimate) -> Iterator[str]:
    """What was run and seen."""
    run = estimate.run
    yield f"command: {estimate.command}"
    shapes = ", ".join("x".join(map(str, shape)) for shape in list(dict.fromkeys(run.input_shapes))[:3])
    seen = f"seen: {run.num_windows} {run.windows}"
    if run.optimizers:
        seen += f" of {', '.join(run.optimizers)}"
    if run.accumulation:
        seen += f", {run.accumulation} backward{'s' * (run.accumulation > 1)} each"
    yield f"{seen}; the model received {shapes}" if shapes else seen
    if run.phase_bytes:
        phase = max(run.phase_bytes, key=lambda name: run.phase_bytes[name])
        parts = sorted(run.parts.items(), key=lambda part: -part[1])
        of = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
        yield f"the peak is reached in {_PHASES.get(phase, phase)}{': ' if of else ''}{of}"
    if estimate.time is not None:
        yield from describe_time(estimate.time)
    if run.window_seconds and estimate.source == "measured":
        yield f"time: {run.window_seconds[-1]:.3g} s for the last of the {run.windows}"
    if run.made_up_reads:
        yield f"read back from the card: {run.made_up_reads:,} values that are not known were made up"
    if run.files_written:
        count = len(run.files_written)
        yield f"files: {count} written by the program, in a scratch folder that is gone"
    yield from run.notes
    if run.end == "out_of_memory" and run.error:
        yield run.error
