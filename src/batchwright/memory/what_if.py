"""What each change of the set-up would do to the peak of this very workload.

Most changes are made to the workload and traced anew. Sharding and a chunked loss are replayed on the log that is
there: the blocks they touch are made smaller, everything else stays where it was.

Promises:
- every number comes from the user's own model and batch;
- a change that cannot be made to it says why, and the others are still answered.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchwright.errors import BatchwrightError
from batchwright.memory.breakdown import part_of
from batchwright.memory.estimate_result import Saving
from batchwright.trace.run import trace_workload
from batchwright.trace.storages import find_peak

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.memory.on_card import OnCard
    from batchwright.trace.storages import Block, Log
    from batchwright.workload import Workload


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
                    state.update(_moment(parameter, moment))
            parameter.add_(parameter.grad, alpha=0.0)


def _moment(parameter: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
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
    *,
    shape: Mapping[str, Any] | None = None,
    there: OnCard | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **step: Any,
) -> tuple[Saving, ...]:
    """Trace or replay every change, and return the peak that each leads to; `step` is how the plain one was traced."""
    shape = dict(shape or {})
    device_type = "cpu" if there is None else "cuda"
    changed: list[tuple[str, Callable[[], tuple[Workload, dict[str, Any]]]]] = [
        ("bf16 autocast", lambda: (_with_autocast(workload, device_type), shape)),
        ("activation checkpointing", lambda: (_with_checkpointing(workload), shape)),
        ("8-bit optimizer", lambda: (_with_8_bit_optimizer(workload), shape)),
        ("half the sequence", lambda: (workload, _half_the_sequence(workload, shape))),
    ]
    savings = []
    for change, make in changed:
        progress(f"tracing with {change}")
        savings.append(_traced(change, make, micro_batch, {**step, "card": there and there.roomy()}))
    savings.append(_chunked_loss(log))
    savings += [
        Saving(f"ZeRO-{stage} over {SHARDS} devices", find_peak(log, _sharded(parts)).num_bytes, _note_on(stage))
        for stage, parts in _ZERO.items()
    ]
    return tuple(savings)


def _traced(
    change: str, make: Callable[[], tuple[Workload, dict[str, Any]]], micro_batch: int, step: Mapping[str, Any]
) -> Saving:
    try:
        workload, shape = make()
        run = trace_workload(workload, micro_batch, shape=shape, **step)
    except (NotApplicableError, BatchwrightError) as error:
        return Saving(change, None, str(error).splitlines()[0])
    return Saving(change, find_peak(run.log).num_bytes)


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


def _half_the_sequence(workload: Workload, shape: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(workload.batch).parameters if workload.batch else {}
    lengths = {
        name: shape.get(name, parameter.default)
        for name, parameter in parameters.items()
        if "len" in name and isinstance(shape.get(name, parameter.default), int)
    }
    if not lengths:
        raise NotApplicableError("batch takes no length (such as seq_len=1024) that could be halved")
    return {**shape, **{name: max(1, length // 2) for name, length in lengths.items()}}


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


def _note_on(stage: int) -> str:
    return "the layer that is gathered at the moment comes on top" if stage == 3 else ""
