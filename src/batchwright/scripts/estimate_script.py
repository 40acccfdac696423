"""What a program takes as it is typed: one run until its second optimizer step, on the host or on a simulated card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.catalogue.cards import names_a_card
from batchwright.device.device import default_device
from batchwright.fitting.request import FitRequest
from batchwright.memory.on_card import card_named
from batchwright.printed_result import PrintedResult
from batchwright.scripts.command import ACCUMULATION, MICRO_BATCH
from batchwright.scripts.fit_script import fit_script
from batchwright.scripts.probe import Probes
from batchwright.scripts.recognise import with_recognised_options
from batchwright.scripts.script_run import OUT_OF_MEMORY, ScriptRun
from batchwright.timing.collectives import read_network
from batchwright.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.scripts.script import Script
    from batchwright.timing.step_time import NoTime, StepTime


@dataclass(frozen=True, repr=False)
class ScriptEstimate(PrintedResult):
    """The peak of a program's own step, and what was seen of it."""

    in_repr = ("name", "on", "micro_batch", "fits")
    drawn_by = "script_text.draw_script_estimate"

    name: str
    command: str
    on: str
    run: ScriptRun
    limit_bytes: int | None
    source: str
    time: StepTime | NoTime | None = None
    """Seconds of a step on the simulated card, or why there are none; None on this machine, where it was timed."""

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
            "parts": dict(run.parts),
            "phase_bytes": dict(run.phase_bytes),
            "windows": run.windows,
            "num_windows": run.num_windows,
            "backwards_per_window": list(run.backwards_per_window),
            "input_shapes": [list(shape) for shape in dict.fromkeys(run.input_shapes)],
            "window_seconds": list(run.window_seconds),
            "time": None if self.time is None else self.time.to_dict(),
            "made_up_reads": run.made_up_reads,
            "options": dict(run.options),
            "files_written": list(run.files_written),
            "notes": list(run.notes),
        }


def estimate_script(
    script: Script,
    *,
    on: str | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    shape: Mapping[str, Any] | None = None,
    memory: str | int | None = None,
    find_max: bool = False,
    devices: int = 1,
    network: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ScriptEstimate:
    """Run a program until its second optimizer step and return what it takes; the arguments are those of `estimate`."""
    place = on or default_device()
    say = progress or (lambda _: None)
    if find_max:
        # The options are recognised once, by the search, which names the command.
        request = FitRequest.read(on=place, memory=memory, shapes=shape, devices=devices)
        micro_batch = fit_script(script, request, say).micro_batch
    turned = {MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
    wanted = [name for name, value in turned.items() if value is not None]
    limit_bytes = None if memory is None else parse_bytes(memory)
    between_nodes, time = read_network(network), None
    with Probes(script, place, devices=devices) as probes:
        script, notes = with_recognised_options(probes, wanted, shape=shape, say=say)
        command = script.at(micro_batch, accumulation=accumulation, shape=shape)
        say(f"running {command} until optimizer step {script.steps}")
        run = probes.run(command, limit_bytes=limit_bytes)
        card = card_named(place, memory=memory) if names_a_card(place) else None
        if card is not None:
            time = run.time_on(card, devices=probes.devices_of(command), network=between_nodes)
    run = replace(run, notes=(*notes, *run.notes))
    source = "predicted" if names_a_card(place) else "measured"
    return ScriptEstimate(script.name, str(command), place, run, limit_bytes, source, time)
