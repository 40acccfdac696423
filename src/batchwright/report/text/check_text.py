"""A check of the machine as text: made to be pasted into an issue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.checkup.check_result import FAILED
from batchwright.report.display import or_dash, table_lines
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from batchwright.checkup.check_result import Check


def draw_check(check: Check) -> RenderableType:
    """Draw the machine, the parts, and predicted against measured."""
    from rich.console import Group
    from rich.text import Text

    summary, *lines = _lines(check)
    return Group(Text(summary, style="bold"), *(Text(line, no_wrap=True, overflow="ignore") for line in lines))


def summarize_check(check: Check) -> str:
    """Say it in one line."""
    failed = [part.name for part in check.parts if part.verdict == FAILED]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "every part that can be tried here works"
    return f"batchwright {check.version}: {verdict} ({check.seconds:.0f} s)"


def _lines(check: Check) -> Iterator[str]:
    yield summarize_check(check)
    yield ""
    for name, value in check.machine.items():
        yield f"{name + ':':<13}{value}"
    packages = [f"{name} {version}" for name, version in check.versions.items() if version]
    missing = [name for name, version in check.versions.items() if version is None]
    yield f"{'packages:':<13}{', '.join(packages)}"
    if missing:
        yield f"{'without:':<13}{', '.join(missing)}"
    for device in check.devices:
        memory = "" if device.total_bytes is None else f", {format_bytes(device.total_bytes)}"
        free = "" if device.free_bytes is None else f", {format_bytes(device.free_bytes)} free"
        card = "" if device.name == "cpu" else f", in the catalogue: {device.card or 'no'}"
        yield f"{device.name + ':':<13}{device.product}{memory}{free}{card}"
    yield ""
    width = max((len(part.name) for part in check.parts), default=0)
    for part in check.parts:
        verdict = part.verdict.upper() if part.verdict == FAILED else part.verdict
        yield f"{part.name:<{width}}  {verdict:<8}  {part.seconds:>5.1f} s  {part.detail}"
    yield from _probe_lines(check)
    for part in check.parts:
        if part.error:
            yield ""
            yield f"{part.name} failed:"
            yield from (f"  {line}" for line in part.error.splitlines())
    yield ""
    yield f"what fit and calibrate remember is in {check.cache_folder}; nothing else is kept outside the package."


def _probe_lines(check: Check) -> Iterator[str]:
    if not check.probes:
        return
    rows = [(probe, *pair) for probe in check.probes for pair in probe.pairs]
    yield ""
    yield f"predicted and measured: {check.workload}, micro-batch {check.probes[0].micro_batch}"
    yield ""
    yield from _table(
        ("device", [probe.device for probe, *_ in rows]),
        ("peak", [kind for _, kind, *_ in rows]),
        ("predicted", [or_dash(format_bytes, predicted) for *_, predicted, _ in rows]),
        ("measured", [or_dash(format_bytes, measured) for *_, measured in rows]),
        ("off by", [f"{bytes_ / ran - 1:+.1%}" if bytes_ is not None and ran else "-" for *_, bytes_, ran in rows]),
        ("seconds\n/step", [or_dash("{:.3g}".format, probe.seconds) for probe, *_ in rows]),
    )
    yield from (f"{probe.device}: {probe.detail}" for probe in check.probes if probe.detail)


def _table(*columns: tuple[str, list[str]]) -> Iterator[str]:
    for line in table_lines(list(columns), left=2):
        yield from line.split("\n")
