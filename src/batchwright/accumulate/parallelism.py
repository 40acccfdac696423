"""How a model is spread over ranks, and the one exchange between them per window.

Promises:
- who asks whether a model is in one process, under DDP or under FSDP2 asks here, and nowhere else;
- gradients are synchronised in the last backward of a window, and in no other; what the flag was before is put back;
- weights that DDP does not know of, or waits for in vain (it reads them once, when it wraps), are averaged by hand;
- a window takes one collective of a few scalars: all ranks learn the same totals, and the length of the longest;
- a loader that raises ends the epoch on every rank, after the windows before it have stepped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchwright.accumulate.micro_batches import REDUCTIONS, MicroBatch, ReadAhead, Reduction, Totals
from batchwright.errors import BatchwrightError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from batchwright.accumulate.windows import OpenWindow, WeightedMean


class Piece(NamedTuple):
    """What this rank holds of a gradient."""

    values: torch.Tensor
    num_copies: float = 1.0
    """Ranks that hold the same values, of those that share the mesh."""


class SyncFlags:
    """The flags by which the DDP and FSDP2 modules of a model leave out a synchronisation."""

    def __init__(self, model: nn.Module) -> None:
        self._replicated = find_replicated(model)
        self._sharded = find_sharded(model)

    def read(self) -> list[bool]:
        """Return what they are set to now, one per module."""
        return [module.require_backward_grad_sync for module in self._replicated] + [
            _reduces(module) for module in self._sharded
        ]

    def write(self, flags: Sequence[bool]) -> None:
        """Set them, one per module."""
        for module, flag in zip(self._replicated, flags, strict=False):
            module.require_backward_grad_sync = flag
        for sharded, flag in zip(self._sharded, flags[len(self._replicated) :], strict=True):
            sharded.set_requires_gradient_sync(flag, recurse=False)

    def write_all(self, flag: bool) -> None:
        """Set all of them alike."""
        self.write([flag] * (len(self._replicated) + len(self._sharded)))


def _reduces(module: Any) -> bool:
    # There is no public way to ask; a module without weights of its own has no groups, and no say.
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return all(group.reduce_grads for group in groups if group is not None)


class Parallelism:
    """How a model is spread over ranks; what is written here holds for one process, which has nobody to ask."""

    name = "one process"
    size = 1
    is_sharded = False
    """Each rank holds a piece of every weight; forwards gather the pieces, so every rank must run as many."""

    def synchronise_next(self, flag: bool) -> None:
        """Say whether the next backward synchronises gradients; set before its forward."""

    def restore(self) -> None:
        """Put back what `synchronise_next` changed."""

    def gather(self, numbers: Sequence[Any]) -> list[Sequence[Any]]:
        """Return everybody's numbers, one row per rank; those of one process are not read from their device."""
        return [numbers]

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients over ranks by hand, where no backward did."""

    def reaches_all(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether a backward that reaches these weights synchronises them by itself."""
        return True

    def left_out(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of these weights that no backward synchronises."""
        return []

    def autograd_leaves(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what autograd hands the gradient of each weight to, before ranks are synchronised."""
        return list(parameters)

    def piece_of(self, gradient: torch.Tensor) -> Piece:
        """Return what this rank holds of a gradient; tensor parallelism cuts gradients in one process's eyes too.

        >>> Parallelism().piece_of(torch.ones(2))
        Piece(values=tensor([1., 1.]), num_copies=1.0)
        """
        # Most are plain, and asking for their type is the quicker question.
        if type(gradient) is torch.Tensor or not hasattr(gradient, "to_local"):
            return Piece(gradient)
        sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
        return Piece(gradient.to_local(), float(math.prod(size for place, size in sizes if place.is_replicate())))

    def total_square(self, by_rank: Sequence[float]) -> float:
        """Return a squared norm from that of each rank's pieces; whole gradients are alike on all ranks."""
        return by_rank[0]

    def num_shards(self, weights: Iterable[torch.Tensor]) -> int:
        """Count the weights that are pieces now: within a forward of FSDP2 a model shows whole ones instead."""
        return 0

    def check_options(self, *, precise: bool, splits: bool) -> None:
        """Refuse what an Accumulator cannot do here."""

    def count_synchronisations(self, run: Callable[[], object]) -> int | None:
        """Return how often gradients are synchronised while `run` runs; None if that cannot be counted."""
        return None


class _Ranks(Parallelism):
    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.size = dist.get_world_size(group)
        self._flags = SyncFlags(model)
        self._group = group
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        # NCCL moves no host memory.
        self._device = device if "gloo" not in dist.get_backend(group) else torch.device("cpu")

    def synchronise_next(self, flag: bool) -> None:
        self._flags.write_all(flag)

    def gather(self, numbers: Sequence[Any]) -> list[Sequence[Any]]:
        if self.size == 1:
            return [numbers]
        mine = torch.tensor([0.0 if isinstance(n, torch.Tensor) else n for n in numbers], dtype=torch.float64)
        mine = mine.to(self._device)
        for index, number in enumerate(numbers):
            if isinstance(number, torch.Tensor):
                mine[index] = number  # from device to device: the host does not wait
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        table: list[Sequence[Any]] = torch.stack(rows).tolist()
        return table


class DDP(_Ranks):
    """DistributedDataParallel: gradients are averaged in a backward whose forward saw the flag on."""

    name = "DDP"

    def __init__(self, model: nn.Module) -> None:
        modules = find_replicated(model)
        super().__init__(model, modules[0].process_group)
        self._modules = modules
        self._before = self._flags.read()
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

    def restore(self) -> None:
        """Put back the flags as they were when the model was first seen."""
        self._flags.write(self._before)

    def reaches_all(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether DDP gets all the gradients that it waits for: one that was frozen since it wrapped never comes."""
        coming = set(map(id, parameters))
        # One that looks for unused weights does so when the first gradient comes.
        return self._is_known and all(
            bool(known & coming) if module.find_unused_parameters else known <= coming
            for module, known in zip(self._modules, self._known_by_module, strict=True)
        )

    def left_out(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return weights that were unfrozen or created after DDP wrapped, or that lie outside of it."""
        known = set().union(self._ignored, *self._known_by_module)
        return [parameter for parameter in parameters if id(parameter) not in known]

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients by hand, dense ones of one type in one collective."""
        weights = [parameter for parameter in parameters if id(parameter) not in self._ignored]
        # Not every rank has every gradient, or knows of which kind it is elsewhere.
        own_kinds = [
            _NONE if weight.grad is None else _SPARSE if weight.grad.is_sparse else _DENSE for weight in weights
        ]
        kinds = torch.tensor(own_kinds, dtype=torch.float32).to(self._device)
        dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=self._group)
        by_type: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter, kind in zip(weights, kinds.tolist(), strict=True):
            # Not that of the gradient: a rank without one must send what the others send.
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            if kind == _SPARSE:
                self._average_sparse(parameter, dtype)
            elif kind == _DENSE:
                by_type.setdefault((dtype, parameter.device), []).append(parameter)
        for (dtype, _), alike in by_type.items():
            flat = torch.cat(
                [
                    torch.zeros_like(weight, dtype=dtype).flatten() if weight.grad is None else weight.grad.flatten()
                    for weight in alike
                ]
            )
            dist.all_reduce(flat, group=self._group)
            averages = flat.div_(self.size).split([parameter.numel() for parameter in alike])
            for parameter, averaged in zip(alike, averages, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(averaged.view_as(parameter.grad))
                else:
                    parameter.grad = averaged.view_as(parameter).clone()

    def _average_sparse(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        """Average a gradient of rows: afterwards it has those that any rank has, and no others."""
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
        indices = torch.cat([its_rows[:, :number] for its_rows, number in zip(all_rows, numbers, strict=True)], 1)
        joined = torch.cat([its_values[:number] for its_values, number in zip(all_values, numbers, strict=True)])
        parameter.grad = torch.sparse_coo_tensor(indices, joined / self.size, mine.shape).coalesce()

    def count_synchronisations(self, run: Callable[[], object]) -> int | None:
        """Count by a hook in place of DDP's own exchange; it stays, so the wrapped model is of no other use."""
        counts: dict[tuple[int, int], int] = {}

        def count(module: int, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            counts[module, bucket.index()] = counts.get((module, bucket.index()), 0) + 1
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        # DDP looks at the annotations, which are text under `from __future__ import annotations`.
        bucket_kind = dist.GradBucket  # type: ignore[attr-defined]
        count.__annotations__ = {"bucket": bucket_kind, "return": torch.futures.Future[torch.Tensor]}
        for index, module in enumerate(self._modules):
            module.register_comm_hook(index, count)
        run()
        return max(counts.values(), default=0)


class FSDP2(_Ranks):
    """fully_shard: forward and backward gather weights, so every rank must run as many as the others."""

    name = "FSDP2"
    is_sharded = True

    def __init__(self, model: nn.Module) -> None:
        assert dist.group.WORLD is not None
        super().__init__(model, dist.group.WORLD)
        self._model = model

    def restore(self) -> None:
        """Synchronise again, as fully_shard sets it."""
        self.synchronise_next(True)

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse: it is too late."""
        raise InvalidInputError(
            "this window ended before its last micro-batch, and under FSDP2 its gradients are not yet synchronised.",
            remedy="for micro in accumulator.micro_batches(loader): it knows which micro-batch is the last",
        )

    def autograd_leaves(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the unsharded double of each weight: hooks on the shards never fire."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters(remove_duplicate=False)}
        whole: dict[str, torch.Tensor] = {}
        # The doubles are made once and stay; only their memory comes and goes, one group at a time, since all of them
        # may not fit.
        for module in find_sharded(self._model):
            module.unshard()
            try:
                now = self._model.named_parameters(remove_duplicate=False)
                whole.update({name: parameter for name, parameter in now if names.get(id(parameter)) != name})
            finally:
                module.reshard()
        return [whole.get(names.get(id(parameter), ""), parameter) for parameter in parameters]

    def total_square(self, by_rank: Sequence[float]) -> float:
        """Add up what the ranks hold: each element is counted once over all of them."""
        return sum(by_rank)

    def num_shards(self, weights: Iterable[torch.Tensor]) -> int:
        """Count the weights that have a mesh."""
        return sum(hasattr(weight, "device_mesh") for weight in weights)

    def check_options(self, *, precise: bool, splits: bool) -> None:
        """Refuse both."""
        if splits:
            raise InvalidInputError(
                'on_oom="split" cannot work under FSDP2: a rank that runs more micro-batches than others waits '
                "forever.",
                remedy="bw.fit(workload) finds a micro-batch that fits on every rank",
            )
        if precise:
            raise InvalidInputError(
                "precise=True is for weights that a rank holds whole; FSDP2 has its own switch.",
                remedy="MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            )


def find_parallelism(model: nn.Module) -> Parallelism:
    """Find out how a model is spread over ranks.

    >>> find_parallelism(torch.nn.Linear(2, 1)).name
    'one process'
    """
    if find_replicated(model):
        return DDP(model)
    has_ranks = dist.is_available() and dist.is_initialized()
    return FSDP2(model) if has_ranks and find_sharded(model) else Parallelism()


def check_data_parallel(model: nn.Module) -> None:
    """Refuse a model that is spread otherwise than by its data over all ranks."""
    if not dist.is_available() or not dist.is_initialized() or find_replicated(model):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise InvalidInputError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which always synchronises.",
            remedy="torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    shards = (p for module in find_sharded(model) for p in module.parameters() if hasattr(p, "device_mesh"))
    for shard in islice(shards, 1):
        if shard.device_mesh.size() != dist.get_world_size():
            raise InvalidInputError(
                f"the model's mesh has {shard.device_mesh.size()} of {dist.get_world_size()} ranks: not all of them "
                "share the data.",
                remedy="data-parallel ranks only; with tensor parallelism keep your own loop and audit it",
            )


def find_replicated(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the modules that DDP wraps."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def find_sharded(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 shards by themselves; known by a method, since its import is a slow one."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def unwrap(model: nn.Module) -> nn.Module:
    """Return a model without torch.compile and DDP around it, which both put something before the names of weights."""
    inner = getattr(model, "_orig_mod", model)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


_NONE, _DENSE, _SPARSE = 0.0, 1.0, 2.0


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
class WindowReport:
    """What a rank tells the others at the end of a window; the sum of packed reports is the report of all ranks."""

    used: Totals
    ahead: Totals
    """Of the next window."""
    losses: Mapping[Reduction, Any]
    """The weighted sum of each loss that had a share; a number, or still on its device."""
    square: Any
    """Of the norm of the gradient; 0 if nobody needs it."""
    num_ahead: float
    """Micro-batches of the next window."""
    num_failed: float
    """1 where the loader raised."""
    num_ready: float
    """1 where there is a micro-batch to keep step with, or no loader to read."""
    watched: tuple[Any, ...] = ()
    """The watcher's own record, packed."""

    def pack(self, names: Sequence[str]) -> list[Any]:
        """Return it as numbers, as many on every rank; `names` are those that the weight counts apart."""
        kinds = (*REDUCTIONS, *names)
        return [
            *self.used.pack(names),
            *self.ahead.pack(names),
            *(float(kind in self.losses) for kind in kinds),
            *(self.losses.get(kind, 0.0) for kind in kinds),
            self.square,
            self.num_ahead,
            self.num_failed,
            self.num_ready,
            *self.watched,
        ]

    @staticmethod
    def unpack(row: Sequence[float], names: Sequence[str]) -> WindowReport:
        """Read back what `pack` wrote, or the sum of such rows."""
        kinds, numbers = (*REDUCTIONS, *names), iter(row)
        used, ahead, num_with_loss, sums = (list(islice(numbers, len(kinds))) for _ in range(4))
        square, num_ahead, num_failed, num_ready = islice(numbers, 4)
        return WindowReport(
            Totals.unpack(used, names),
            Totals.unpack(ahead, names),
            {kind: loss for kind, number, loss in zip(kinds, num_with_loss, sums, strict=True) if number},
            square,
            num_ahead,
            num_failed,
            num_ready,
            tuple(numbers),
        )


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
    """The squared norm of the gradient; None if nobody needs it."""
    watched: list[Sequence[Any]]
    """The watcher's record of each rank, packed; in one process not yet read either."""


def exchange(
    parallelism: Parallelism,
    window: OpenWindow | None,
    reader: ReadAhead | None,
    ahead: list[MicroBatch],
    *,
    square: torch.Tensor | None = None,
    watched: Sequence[Any] = (),
    names: Sequence[str] = (),
) -> tuple[Used, Planned | None]:
    """Tell the other ranks what `window` used and what is `ahead` for the next one, and learn the same of them.

    Arguments:
        parallelism: how the ranks are reached.
        window: the finished window; None before the first.
        reader: what read ahead; None in a plain loop.
        ahead: the micro-batches of the next window.
        square: the squared norm of this rank's pieces of the gradient.
        watched: the packed record of a watcher, as many numbers on every rank.
        names: what the weight counts apart, the same on every rank.
    """
    counts = sum((micro_batch.counts for micro_batch in ahead), Totals())
    has_failed = reader is not None and reader.error is not None
    used = Totals() if window is None else window.used
    losses = {} if window is None else window.losses
    if parallelism.size == 1:
        has_next = bool(ahead) and not has_failed
        return Used(used, dict(losses), square, [watched]), Planned(ahead, counts, len(ahead)) if has_next else None
    mine = WindowReport(
        used=used,
        ahead=counts,
        losses={kind: loss.weighted_sum() for kind, loss in losses.items()},
        square=0.0 if square is None else square,
        num_ahead=float(len(ahead)),
        num_failed=float(has_failed),
        num_ready=float(reader is None or reader.last is not None or bool(ahead)),
        watched=tuple(watched),
    )
    rows = parallelism.gather(mine.pack(names))
    reports = [WindowReport.unpack(row, names) for row in rows]
    total = WindowReport.unpack([sum(column) for column in zip(*rows, strict=True)], names)
    longest = int(max(report.num_ahead for report in reports))
    if total.num_failed and reader is not None:
        longest = 0
        reader.error = reader.error or BatchwrightError("the loader of another rank raised; see its traceback.")
    if longest and total.num_ready < parallelism.size and reader is not None:
        longest = 0
        empty = ", ".join(str(rank) for rank, report in enumerate(reports) if not report.num_ready)
        reader.error = InvalidInputError(
            f"the loader of rank {empty} is empty: it has no micro-batch to keep step with the other ranks.",
            remedy="a sampler that gives every rank at least one batch, such as DistributedSampler",
        )
    learnt = Used(
        totals=total.used,
        losses={kind: loss / total.used.of(kind) for kind, loss in total.losses.items()},
        square=None if square is None else parallelism.total_square([report.square for report in reports]),
        watched=[report.watched for report in reports],
    )
    return learnt, Planned(ahead, total.ahead, longest) if longest else None
