"""The one exchange between ranks per window: what the finished one used, and what the next one will hold.

Promises:
- all ranks learn the same totals, and how many micro-batches the longest of them has;
- a loader that raises ends the epoch on every rank, after the windows before it have stepped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchwright.accumulate.loss_terms import REDUCTIONS, Reduction, Totals
from batchwright.errors import BatchwrightError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from batchwright.accumulate.loader import MicroBatch, ReadAhead
    from batchwright.accumulate.window import OpenWindow, WeightedMean


# How a model is spread over ranks, and the little that accumulation asks of that: DDP, FSDP2, or one process.
#
# Promises:
# - gradients are synchronised in the last backward of a window, and in no other; what the flag was before is put back;
# - weights that DDP does not know of, or waits for in vain (it reads them once, when it wraps), are averaged by hand;
# - ranks exchange a few scalars once per window, all of them in one collective.


class OneProcess:
    """No other ranks: nothing to synchronise, nobody to ask."""

    name = "one process"
    size = 1
    gathers_in_forward = False

    def synchronise_next(self, flag: bool) -> None:
        """Say whether the next backward synchronises gradients."""

    def restore(self) -> None:
        """Put back what `synchronise_next` changed."""

    def gather(self, numbers: Sequence[Any]) -> list[list[float]]:
        """Return everybody's numbers, one row per rank."""
        return [[float(number) for number in numbers]]

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients over ranks, where no backward did."""

    def finishes(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether a backward that reaches these weights can synchronise them by itself."""
        return True

    def left_out(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of these weights that no backward synchronises."""
        return []


class _Ranks(OneProcess):
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.size = dist.get_world_size(group)
        self._group = group
        # NCCL moves no host memory.
        self._device = device if "gloo" not in dist.get_backend(group) else torch.device("cpu")

    def gather(self, numbers: Sequence[Any]) -> list[list[float]]:
        mine = torch.tensor([0.0 if isinstance(n, torch.Tensor) else n for n in numbers], dtype=torch.float64)
        mine = mine.to(self._device)
        for index, number in enumerate(numbers):
            if isinstance(number, torch.Tensor):
                mine[index] = number  # from device to device: the host does not wait
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        table: list[list[float]] = torch.stack(rows).tolist()
        return table


class DDP(_Ranks):
    """DistributedDataParallel: gradients are averaged in a backward whose forward saw the flag on."""

    name = "DDP"

    def __init__(self, modules: list[DistributedDataParallel], device: torch.device) -> None:
        super().__init__(modules[0].process_group, device)
        self._modules = modules
        self._before = [module.require_backward_grad_sync for module in modules]
        known = [_known_to(module) for module in modules]
        self._is_known = None not in known
        self._known_by_module = [{id(weight) for weight in weights or ()} for weights in known]
        # Names that the user took out of the exchange: they stay out.
        self._ignored = {
            id(weight)
            for module in modules
            for name, weight in module.module.named_parameters()
            if name in module.parameters_to_ignore
        }

    def synchronise_next(self, flag: bool) -> None:
        """Set the flag that `no_sync` sets, so that it covers the forward too."""
        for module in self._modules:
            module.require_backward_grad_sync = flag

    def restore(self) -> None:
        """Put back the flags as they were found."""
        for module, flag in zip(self._modules, self._before, strict=True):
            module.require_backward_grad_sync = flag

    def finishes(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether DDP gets all the gradients that it waits for: one that was frozen since it wrapped never comes."""
        there = set(map(id, parameters))
        # One that looks for unused weights does so when the first gradient comes.
        return self._is_known and all(
            bool(known & there) if module.find_unused_parameters else known <= there
            for module, known in zip(self._modules, self._known_by_module, strict=True)
        )

    def left_out(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return weights that were unfrozen or made after DDP wrapped, or that lie outside of it."""
        known = set().union(self._ignored, *self._known_by_module)
        return [parameter for parameter in parameters if id(parameter) not in known]

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients by hand, dense ones of one type in one collective."""
        weights = [parameter for parameter in parameters if id(parameter) not in self._ignored]
        # Not every rank has every gradient, or knows of which kind it is elsewhere.
        kinds = torch.tensor([_kind(parameter.grad) for parameter in weights], dtype=torch.float32)
        kinds = kinds.to(self._device)
        dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=self._group)
        by_type: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter, kind in zip(weights, kinds.tolist(), strict=True):
            # Not that of the gradient: a rank without one must send what the others send.
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            if kind == _SPARSE:
                self._reduce_sparse(parameter, dtype)
            elif kind == _DENSE:
                by_type.setdefault((dtype, parameter.device), []).append(parameter)
        for (dtype, _), alike in by_type.items():
            flat = torch.cat([_gradient(parameter, dtype).flatten() for parameter in alike])
            dist.all_reduce(flat, group=self._group)
            averages = flat.div_(self.size).split([parameter.numel() for parameter in alike])
            for parameter, averaged in zip(alike, averages, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(averaged.view_as(parameter.grad))
                else:
                    parameter.grad = averaged.view_as(parameter).clone()

    def _reduce_sparse(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        """Average a gradient of rows: those that any rank has are there afterwards, and no others."""
        mine = parameter.grad
        if mine is None:
            mine = torch.zeros_like(parameter, dtype=dtype).to_sparse(1)
        elif not mine.is_sparse:  # dense here, sparse elsewhere: as a whole it is still right
            mine = mine.to_sparse(1)
        mine = mine.coalesce()
        # Rows differ between ranks, and not every backend adds up sparse tensors: rows and values travel apart.
        counts = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        counts[dist.get_rank(self._group)] = mine.indices().shape[1]
        dist.all_reduce(counts, group=self._group)
        most = int(counts.max())
        rows = mine.indices().new_zeros((mine.indices().shape[0], most))
        rows[:, : mine.indices().shape[1]] = mine.indices()
        values = mine.values().new_zeros((most, *mine.values().shape[1:]))
        values[: mine.values().shape[0]] = mine.values()
        all_rows = [torch.empty_like(rows) for _ in range(self.size)]
        all_values = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(all_rows, rows, group=self._group)
        dist.all_gather(all_values, values, group=self._group)
        numbers = counts.tolist()
        indices = torch.cat([each[:, :number] for each, number in zip(all_rows, numbers, strict=True)], 1)
        together = torch.cat([each[:number] for each, number in zip(all_values, numbers, strict=True)])
        parameter.grad = torch.sparse_coo_tensor(indices, together / self.size, mine.shape).coalesce()


class FSDP2(_Ranks):
    """fully_shard: forward and backward gather weights, so every rank must run as many as the others."""

    name = "FSDP2"
    gathers_in_forward = True

    def __init__(self, modules: list[Any], group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._modules = modules

    def synchronise_next(self, flag: bool) -> None:
        """Say whether the next backward reduces gradients into shards."""
        for module in self._modules:
            module.set_requires_gradient_sync(flag, recurse=False)

    def restore(self) -> None:
        """Synchronise again."""
        # It cannot be asked what the flag was; on is what fully_shard sets.
        self.synchronise_next(True)

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Say that it is too late."""
        raise InvalidInputError(
            "this window ended before its last micro-batch, and under FSDP2 its gradients are not yet synchronised.",
            remedy="for micro in accumulator.micro_batches(loader): it knows which micro-batch is the last",
        )


def how_spread(model: nn.Module) -> OneProcess:
    """Find out how a model is spread over ranks.

    >>> how_spread(torch.nn.Linear(2, 1)).name
    'one process'
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    replicated = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if replicated:
        return DDP(replicated, device)
    if not dist.is_available() or not dist.is_initialized():
        return OneProcess()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise InvalidInputError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which always synchronises.",
            remedy="torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return OneProcess()
    mesh = next(p.device_mesh for module in sharded for p in module.parameters() if hasattr(p, "device_mesh"))
    if mesh.size() != dist.get_world_size():
        raise InvalidInputError(
            f"the model's mesh has {mesh.size()} of {dist.get_world_size()} ranks: not all of them share the data.",
            remedy="data-parallel ranks only; with tensor parallelism keep your own loop and audit it",
        )
    assert dist.group.WORLD is not None
    return FSDP2(sharded, dist.group.WORLD, device)


_NONE, _DENSE, _SPARSE = 0.0, 1.0, 2.0


def _kind(gradient: torch.Tensor | None) -> float:
    return _NONE if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


def _gradient(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=dtype) if parameter.grad is None else parameter.grad


def _known_to(module: DistributedDataParallel) -> list[torch.Tensor] | None:
    """Return the weights that DDP synchronises: those that required a gradient when it wrapped; None if unsure."""
    now = [
        weight
        for name, weight in module.module.named_parameters()
        if weight.requires_grad and name not in module.parameters_to_ignore
    ]
    # DDP does not say which they were, but how many, and of how many bytes.
    facts = module._get_ddp_logging_data()
    num_bytes = sum(weight.numel() * weight.element_size() for weight in now)
    is_sure = facts.get("num_parameter_tensors") == len(now) and facts.get("total_parameter_size_bytes") == num_bytes
    return now if is_sure else None


@dataclass(frozen=True)
class Planned:
    """A window that was read ahead."""

    micro_batches: list[MicroBatch]
    totals: Totals
    """On all ranks."""
    longest: int
    """Micro-batches of the rank that has most."""


@dataclass(frozen=True)
class Used:
    """What a finished window used on all ranks; losses and square are not yet read in one process."""

    totals: Totals
    losses: dict[Reduction, WeightedMean | float]
    """The mean of each reduction that had any."""
    square: Any
    """The squared norm of the gradient; None where nobody asked."""
    watched: list[Sequence[Any]]
    """What the watcher of each rank told; in one process not yet read either."""


def exchange(
    spread: OneProcess,
    window: OpenWindow | None,
    square: torch.Tensor | None,
    reader: ReadAhead | None,
    size_of: Callable[[], int],
    pieces: Callable[[], int],
    watched: Sequence[Any] = (),
    names: Sequence[str] = (),
) -> tuple[Used, Planned | None]:
    """Tell the other ranks what `window` used, read the next one of `size_of()` micro-batches, and learn of both.

    `watched` are numbers of a watcher, as many on every rank; `pieces` says what a single micro-batch is cut into;
    `names` are those that the weight counts apart, the same on every rank.
    """
    ahead = [] if reader is None else reader.read_window(size_of, pieces)
    counts = sum((micro_batch.counts for micro_batch in ahead), Totals())
    has_failed = reader is not None and reader.error is not None
    used = Totals() if window is None else window.used
    losses = {} if window is None else window.losses
    if spread.size == 1:
        has_next = bool(ahead) and not has_failed
        return Used(used, dict(losses), square, [watched]), Planned(ahead, counts, len(ahead)) if has_next else None
    kinds = (*REDUCTIONS, *names)
    told = [
        *(counts.of(kind) for kind in kinds),
        float(len(ahead)),
        float(has_failed),
        *(used.of(kind) for kind in kinds),
        *(float(kind in losses) for kind in kinds),
        *(losses[kind].weighted_sum() if kind in losses else 0.0 for kind in kinds),
        0.0 if square is None else square,
        float(reader is None or reader.can_fill or bool(ahead)),
        *watched,
    ]
    rows = spread.gather(told)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    # In the order of `told`.
    number = len(kinds)
    at_length, at_failed, at_used = number, number + 1, number + 2
    at_has, at_losses, at_square = at_used + number, at_used + 2 * number, at_used + 3 * number
    at_fill, at_watched = at_square + 1, at_square + 2
    longest = int(max(row[at_length] for row in rows))
    if sums[at_failed] and reader is not None:
        longest = 0
        reader.error = reader.error or BatchwrightError("the loader of another rank raised; see its traceback.")
    if longest and sums[at_fill] < spread.size and reader is not None:
        longest = 0
        empty = ", ".join(str(rank) for rank, row in enumerate(rows) if not row[at_fill])
        reader.error = InvalidInputError(
            f"the loader of rank {empty} is empty: it has no micro-batch to keep step with the other ranks.",
            remedy="a sampler that gives every rank at least one batch, such as DistributedSampler",
        )
    totals = _totals(sums[at_used:at_has], names)
    found = zip(kinds, sums[at_has:at_losses], sums[at_losses:at_square], strict=True)
    learnt = Used(
        totals=totals,
        losses={kind: loss / totals.of(kind) for kind, is_there, loss in found if is_there},
        # Where every rank holds whole gradients they are alike; shards add up.
        square=None if square is None else sums[at_square] if spread.gathers_in_forward else rows[0][at_square],
        watched=[row[at_watched:] for row in rows],
    )
    return learnt, Planned(ahead, _totals(sums[:number], names), longest) if longest else None


def _totals(sums: Sequence[float], names: Sequence[str]) -> Totals:
    units, samples, window, *named = sums
    return Totals(units, samples, window, dict(zip(names, named, strict=True)))
