"""`ScriptRun`: what one run of the user's program did before it was cut, as plain data that crosses processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchwright.catalogue.cards import Card
    from batchwright.timing.collectives import Network
    from batchwright.timing.step_time import NoTime, StepTime
    from batchwright.trace.work import StepWork

# Part of the name of every option that sets an accumulation.
ACCUMULATES = "accum"

# How a run ended.
CUT, FINISHED, OUT_OF_MEMORY, FAILED, EXITED, SILENT, TOO_SMALL = (
    *("cut", "finished", "out_of_memory", "failed"),
    *("exited", "silent", "too_small"),
)


def is_about_batches(name: str) -> bool:
    """Whether an option's name has to do with a batch size or with accumulation.

    >>> [is_about_batches(name) for name in ("batch_size", "train_bs", "gradient_accumulation_steps", "n_layer")]
    [True, True, True, False]
    """
    words = name.lower().replace("-", "_").replace(".", "_").split("_")
    return "batch" in name.lower() or ACCUMULATES in name.lower() or bool({"bs", "bsz", "mbs"} & set(words))


@dataclass(frozen=True)
class ScriptRun:
    """What was seen of a program until its last window: the evidence behind every answer about a script."""

    end: str = SILENT
    windows: str = "optimizer steps"
    """What was counted to cut the run: optimizer steps, zeroed gradients, or forwards."""
    num_windows: int = 0
    optimizers: tuple[str, ...] = ()
    backwards_per_window: tuple[int, ...] = ()
    input_shapes: tuple[tuple[int, ...], ...] = ()
    """The shape of the first tensor of each forward of a top-level module, in order; of those with gradients if any."""
    loader_batch_sizes: tuple[int, ...] = ()
    num_trained: int | None = None
    """Weights in the optimizer that holds the most."""
    learning_rate: float | None = None
    """Of that optimizer; None if its groups have different ones."""
    num_samples: int | None = None
    """In the dataset of the first loader that was made."""
    trained_loader: tuple[int, int] | None = None
    """The batch size and the samples per pass of the loader that had begun when the first backward ran."""
    options: Mapping[str, int] = field(default_factory=dict)
    """Whole numbers among the program's own options that have to do with a batch, by the option that sets them."""
    window_seconds: tuple[float, ...] = ()
    seconds: float = 0.0
    peak_bytes: PeakBytes | None = None
    parts: Mapping[str, int] = field(default_factory=dict)
    """What the peak of a simulated card is made of, in bytes."""
    phase_bytes: Mapping[str, int] = field(default_factory=dict)
    """The peak of each phase; on the host, of the phases that raised the peak of the run."""
    is_replayed: bool = False
    """The peak is of a run's requests on the card as large as it is, though it ran where memory has no end."""
    made_up_reads: int = 0
    """Values that were read back from a simulated card and are not known."""
    files_written: tuple[str, ...] = ()
    """What the program wrote, led to a scratch folder."""
    notes: tuple[str, ...] = ()
    error: str = ""
    traceback: str = ""
    measured: Mapping[str, Any] | None = None
    """What a measure found beside it: plain data and tensors; never part of the JSON."""
    work: StepWork | None = None
    """What the last whole step asked of a simulated card; never part of the JSON."""

    @property
    def was_cut(self) -> bool:
        """Whether the program did what it was run for."""
        return self.end == CUT or (self.end == FINISHED and self.num_windows > 0)

    @property
    def batch_size(self) -> int | None:
        """The first dimension that most forwards had; None if no forward with a tensor was seen."""
        counted = Counter(shape[0] for shape in self.input_shapes if shape)
        return counted.most_common(1)[0][0] if counted else None

    def time_on(self, card: Card, *, devices: int = 1, network: Network | None = None) -> StepTime | NoTime:
        """Return the seconds of one of its windows on a card; of a program that is one of so many ranks."""
        # Here: a program's own process has no use for it.
        from batchwright.device.step import StepSettings
        from batchwright.timing.on_card import time_on
        from batchwright.timing.step_time import NoTime

        if self.windows == "zeroed gradients":
            return NoTime("the program updates its weights by hand, so where a step ends is not seen")
        accumulation = (self.accumulation or 1) if self.windows == "optimizer steps" else 1
        return time_on(card, self.work, self.batch_size or 1, StepSettings({}, accumulation, devices=devices), network)

    @property
    def accumulation(self) -> int | None:
        """Backwards in most windows."""
        counted = Counter(self.backwards_per_window)
        return counted.most_common(1)[0][0] if counted else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without what a measure found."""
        data = asdict(replace(self, measured=None, work=None))
        del data["measured"], data["work"]
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ScriptRun:
        """Read back what `to_dict` wrote, or what JSON made of it.

        >>> run = ScriptRun(end=CUT, input_shapes=((8, 3), (8, 3)), peak_bytes=PeakBytes(allocated=5))
        >>> import json
        >>> ScriptRun.from_dict(json.loads(json.dumps(run.to_dict()))) == run
        True
        """
        known = {entry.name: data[entry.name] for entry in fields(ScriptRun) if entry.name in data}
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in known.items()
        }
        run = ScriptRun(**read)
        peak = known.get("peak_bytes")
        return replace(
            run,
            input_shapes=tuple(tuple(shape) for shape in run.input_shapes),
            peak_bytes=None if peak is None else PeakBytes(**peak),
        )
