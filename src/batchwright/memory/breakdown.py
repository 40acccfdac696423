"""Read a log of blocks: the peak, what it is made of, when it came and who owns it; and what a change would make of it.

Most changes of the set-up are made to the workload and traced anew. Sharding and a chunked loss are replayed on the log
that is there: the blocks they touch are made smaller, everything else stays where it was.

Promises:
- every byte alive at the peak is in exactly one part;
- activations are what forward left for backward; what was gone before its phase ended is a temporary;
- what a change saves comes from the user's own model and batch; a change that cannot be made to it says why, and the
  others are still answered.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchwright.errors import BatchwrightError
from batchwright.memory.estimate_result import Owner, PeakMoment, PhasePeak, Saving
from batchwright.trace.run import trace_workload
from batchwright.trace.storages import Block, Log, Peak, alive_at, find_peak, peaks_of_phases
from batchwright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.device.step import StepSettings
    from batchwright.memory.on_card import OnCard
    from batchwright.simulated.card import SimulatedCard
    from batchwright.workload import Workload

    Change = Callable[[], tuple[Workload, StepSettings]]


_OF_PHASE = {"build": "weights", "batch": "inputs"}
_RUNS_THE_MODEL = ("forward", "generate", "evaluate")


@dataclass(frozen=True)
class Breakdown:
    """The peak of one log, taken apart."""

    peak_bytes: int
    parts: dict[str, int]
    moment: PeakMoment
    largest: tuple[Owner, ...]
    phases: tuple[PhasePeak, ...]

    def list_parts(self, *, least: int = 0) -> str:
        """Write the parts of `least` bytes or more, the largest first."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{part} {format_bytes(num_bytes)}" for part, num_bytes in parts if num_bytes >= least)


def break_down(log: Log) -> Breakdown:
    """Find the peak of a log and take it apart."""
    peak = find_peak(log)
    return Breakdown(
        peak.num_bytes,
        _parts(peak.alive),
        _moment(log, peak),
        _largest_owners(peak),
        tuple(PhasePeak(phase, num_bytes) for phase, num_bytes in peaks_of_phases(log).items() if phase != "done"),
    )


def parts_at_the_same_moment(log: Log, other: Log) -> dict[str, int]:
    """Take `other`, a run of the same step at another size, apart at the moment where `log` has its peak.

    Its own peak may lie elsewhere: with more samples it moves from the optimizer step to backward.
    """
    moment = find_peak(log).position
    if len(log.changes) != len(other.changes):
        # Some kernel took another path at the other size, so moments do not pair up; phases still do.
        number = sum(start <= moment for _, start in log.phases)
        ends = [start for _, start in other.phases[number:]]
        moment = find_peak(other, until=ends[0] if ends else None, since=other.phases[number - 1][1]).position
    return _parts(alive_at(other, moment))


def _parts(alive: dict[Block, int]) -> dict[str, int]:
    parts: dict[str, int] = defaultdict(int)
    for block, num_bytes in alive.items():
        parts[part_of(block)] += num_bytes
    return dict(parts)


def part_of(block: Block) -> str:
    """Say what a block turned out to be."""
    if block.part is not None:
        return block.part
    if block.phase in _OF_PHASE:
        return _OF_PHASE[block.phase]
    if block.is_recomputed or (block.phase in _RUNS_THE_MODEL and block.died_in != block.phase):
        return "activations"
    return "temporaries"


def _moment(log: Log, peak: Peak) -> PeakMoment:
    started = [phase for phase, start in log.phases if start <= peak.position]
    block = log.changes[peak.position][0] if log.changes else Block(0, "", "", "")
    return PeakMoment(started[-1] if started else "build", block.module, block.operator)


def _largest_owners(peak: Peak) -> tuple[Owner, ...]:
    grouped: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for block, num_bytes in peak.alive.items():
        grouped[(part_of(block), block.module, block.operator, block.phase)].append(num_bytes)
    owners = [Owner(sum(sizes), len(sizes), *place) for place, sizes in grouped.items()]
    return tuple(sorted(owners, key=lambda owner: -owner.num_bytes)[:10])


# Adam with 8-bit state, as far as memory goes: the layout of bitsandbytes' block-wise optimizers.
#
# Two bytes per parameter (one per moment) and, for every block of 256, one float per moment; a tensor of fewer than
# 4,096 elements keeps float moments (Dettmers et al. 2022; bitsandbytes' `min_8bit_size`). The update itself is one
# fused kernel without temporaries. The numbers it computes are not Adam's: it is here to be traced, not to train.

BLOCK = 256
SMALLEST_8_BIT = 4096


class EightBitAdam(torch.optim.Optimizer):
    """Holds the state that 8-bit Adam would hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state where it is missing, and touch the weights."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                for moment in ("first", "second"):
                    state.update(_moment_state(parameter, moment))
            parameter.add_(parameter.grad, alpha=0.0)


def _moment_state(parameter: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    if parameter.numel() < SMALLEST_8_BIT:
        return {name: torch.zeros_like(parameter, dtype=torch.float32)}
    blocks = -(-parameter.numel() // BLOCK)
    return {
        name: torch.zeros_like(parameter, dtype=torch.uint8),
        f"{name}_scale": torch.zeros(blocks, dtype=torch.float32, device=parameter.device),
    }


CHUNKS = 8
SHARDS = 8
_ZERO = {1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "weights")}


def what_if_savings(
    workload: Workload,
    micro_batch: int,
    log: Log,
    step: StepSettings,
    *,
    place: OnCard | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Saving, ...]:
    """Trace or replay every change, and return the peak that each leads to; `step` is how the plain one was traced."""
    device_type = "cpu" if place is None else "cuda"
    # A change is asked about one device, whatever the plain step ran on.
    step = replace(step, devices=1)
    changes: list[tuple[str, Change]] = [
        ("bf16 autocast", lambda: (_with_autocast(workload, device_type), step)),
        ("activation checkpointing", lambda: (_with_checkpointing(workload), step)),
        ("8-bit optimizer", lambda: (_with_8_bit_optimizer(workload), step)),
        ("half the sequence", lambda: (workload, _with_half_the_sequence(workload, step))),
    ]
    savings = []
    for name, change in changes:
        progress(f"tracing with {name}")
        savings.append(_trace_change(name, change, micro_batch, None if place is None else place.roomy()))
    savings.append(_chunked_loss(log))
    savings += [
        Saving(
            f"ZeRO-{stage} over {SHARDS} devices",
            find_peak(log, _sharded(parts)).num_bytes,
            "the layer that is gathered at the moment comes on top" if stage == 3 else "",
        )
        for stage, parts in _ZERO.items()
    ]
    return tuple(savings)


def _trace_change(name: str, change: Change, micro_batch: int, card: SimulatedCard | None) -> Saving:
    try:
        workload, step = change()
        run = trace_workload(workload, micro_batch, step, card=card)
    except (NotApplicableError, BatchwrightError) as error:
        return Saving(name, None, str(error).splitlines()[0])
    return Saving(name, find_peak(run.log).num_bytes)


class NotApplicableError(Exception):
    """A change that this workload gives no handle for."""


def _with_autocast(workload: Workload, device_type: str) -> Workload:
    loss = workload.loss
    if loss is None:
        raise NotApplicableError("there is no loss to run under autocast")

    def under_autocast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device_type, torch.bfloat16):
            return loss(model, batch)

    return replace(workload, loss=under_autocast)


def _with_checkpointing(workload: Workload) -> Workload:
    given = workload.model
    if workload.optimizer is None:
        raise NotApplicableError("there is no backward to recompute activations for")

    def build() -> nn.Module:
        model = given if isinstance(given, nn.Module) else given()
        if isinstance(given, nn.Module):
            raise NotApplicableError("a live module is not rewired; hand in a function that builds it")
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is not None and getattr(model, "supports_gradient_checkpointing", True):
            enable()
            return model.train()
        for layer in _repeated_layers(model):
            # By its class, not its method: the module is copied before it runs; a bound method would stay behind.
            layer.__class__ = _checkpointed(type(layer))
        return model

    return replace(workload, model=build)


def _repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The longest list of layers of one kind: what people put under checkpointing by hand."""
    lists = [list(m.children()) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    alike = [layers for layers in lists if len(layers) > 1 and len({type(layer) for layer in layers}) == 1]
    if not alike:
        raise NotApplicableError("the model has no list of layers of one kind to checkpoint")
    return max(alike, key=lambda layers: sum(p.numel() for layer in layers for p in layer.parameters()))


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    return type(f"Checkpointed{kind.__name__}", (kind,), {"forward": forward})


def _with_8_bit_optimizer(workload: Workload) -> Workload:
    if workload.optimizer is None:
        raise NotApplicableError("there is no optimizer")
    return replace(workload, optimizer=EightBitAdam)


def _with_half_the_sequence(workload: Workload, step: StepSettings) -> StepSettings:
    shape = step.shape
    parameters = inspect.signature(workload.batch).parameters if workload.batch else {}
    lengths = {
        name: shape.get(name, parameter.default)
        for name, parameter in parameters.items()
        if "len" in name and isinstance(shape.get(name, parameter.default), int)
    }
    if not lengths:
        raise NotApplicableError("batch takes no length (such as seq_len=1024) that could be halved")
    return replace(step, shape={**shape, **{name: max(1, length // 2) for name, length in lengths.items()}})


def _chunked_loss(log: Log) -> Saving:
    """Keep one of eight chunks of everything as wide as the logits."""
    change = f"loss in {CHUNKS} chunks"
    widths = [b.shape[-1] for b, _ in log.changes if b.operator.startswith("aten._log_softmax") and b.shape]
    if not widths:
        return Saving(change, None, "no softmax loss was seen in the step")
    width = max(widths)

    def scale(block: Block) -> float:
        is_logits = block.phase in ("forward", "backward") and block.part is None and block.shape[-1:] == (width,)
        return 1 / CHUNKS if is_logits else 1.0

    return Saving(change, find_peak(log, scale).num_bytes, f"tensors {width:,} wide are kept one chunk at a time")


def _sharded(parts: tuple[str, ...]) -> Callable[[Block], float]:
    return lambda block: 1 / SHARDS if part_of(block) in parts else 1.0
