"""What each rank of test_parallelism.py does: every case under DDP and under FSDP2, against the big batch of all ranks.

Rank r has every second micro-batch of one list, so both know what the other has.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.micro_batches import LossTerm
from batchwright.errors import BatchwrightError
from tests.accumulate.tagging import Batch, Tagger, count_tokens, make_batches, make_tagger, token_loss
from tests.oracle.big_batch import big_batch_gradient, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RANKS = 2
SIZES = [3, 1, 2, 4, 2, 3, 1]


class Counted:
    """How many collectives this rank has taken part in, by kind."""

    def __init__(self) -> None:
        self.gradients = self.scalars = 0
        # FSDP2 has called its reduction by both names.
        for name in ("all_gather", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"):
            if hasattr(dist, name):
                self._wrap(name)

    def _wrap(self, name: str) -> None:
        plain = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            # What kind of gradients ranks have, before they average by hand, is a small thing.
            self.gradients += name != "all_gather" and kwargs.get("op") != dist.ReduceOp.MAX
            self.scalars += name == "all_gather"
            return plain(*args, **kwargs)

        setattr(dist, name, counted)

    def clear(self) -> None:
        self.gradients = self.scalars = 0


class Case:
    """A model on all ranks, its twin on this one, and what the optimizer got."""

    def __init__(self, kind: str, counted: Counted, accumulation: Any = 2, **options: Any) -> None:
        dtype = options.pop("dtype", torch.float64)
        self.twin, self.kind, self.counted = make_tagger(dtype), kind, counted
        tagger = make_tagger(dtype)
        if "frozen" in options:
            getattr(tagger, options.pop("frozen")).requires_grad_(False)
        self.model: Any = tagger
        if kind.startswith("ddp"):
            self.model = DistributedDataParallel(tagger, find_unused_parameters="unused" in kind)
            # It averages as DDP does, which by itself does so past Python, uncounted.
            self.model.register_comm_hook(None, allreduce_hook)
        elif kind == "fsdp":
            fully_shard(tagger.inner)
            fully_shard(tagger.outer)
            fully_shard(tagger)
        else:
            fully_shard(tagger)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(self._see)
        self.seen: list[list[torch.Tensor]] = []
        self.accumulator = Accumulator(self.model, self.optimizer, accumulation, **options)
        self.steps: list[Any] = []
        counted.clear()

    def _see(self, *_: Any) -> None:
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        self.seen.append([g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in gradients])

    def read(self, batches: Sequence[Batch], loss: Callable[..., Any] = token_loss) -> None:
        """Train on this rank's share."""
        for batch in self.accumulator.micro_batches(mine(batches), count_tokens):
            self.note(self.accumulator.backward(loss(self.model, batch)))

    def note(self, step: Any) -> None:
        self.steps += [step] if step else []

    def errors(self, windows: Sequence[Sequence[Batch]], loss: Callable[..., Any] = token_loss) -> list[float]:
        """Train the twin on the big batch of each window; return how far each gradient was from its own."""
        optimizer = torch.optim.SGD(self.twin.parameters(), lr=0.1)
        found = []
        for gradient, window in zip(self.seen, windows, strict=True):
            reference = big_batch_gradient(self.twin, window, loss)
            found.append(relative_error(gradient, reference))
            for weight, value in zip(self.twin.parameters(), reference, strict=True):
                weight.grad = value
            optimizer.step()
        return found


def mine(batches: Sequence[Any]) -> list[Any]:
    return [batch for index, batch in enumerate(batches) if index % RANKS == dist.get_rank()]


def windows_of(batches: Sequence[Batch], accumulation: int) -> list[list[Batch]]:
    """Return what all ranks together use in each step: rank 0 may have one micro-batch more."""
    span = accumulation * RANKS
    return [list(batches[start : start + span]) for start in range(0, len(batches), span)]


# --- the cases: each returns plain data that is the same on every rank


def ragged(kind: str, counted: Counted) -> Any:
    told = []
    for accumulation in (1, 2, 3, 5):
        batches = make_batches(SIZES, empty=[4])
        case = Case(kind, counted, accumulation, clip_norm=1e9)
        case.read(batches)
        windows = windows_of(batches, accumulation)
        told.append(
            {
                "error": max(case.errors(windows)),
                "steps": [(step.micro_batches, step.samples, step.units) for step in case.steps],
                "expected": [(len(w), sum(len(b[0]) for b in w), sum(map(count_tokens, w))) for w in windows],
                "losses": [step.loss for step in case.steps],
                "norms": [step.gradient_norm for step in case.steps],
                "collectives": (counted.gradients, counted.scalars),
            }
        )
    return told


def no_units(kind: str, counted: Counted) -> Any:
    """Rank 1 has no token in the first window, nobody has one in the second."""
    batches = make_batches([2] * 8, empty=[1, 3, 4, 5, 6, 7])
    case = Case(kind, counted)
    case.read(batches)
    return max(case.errors([batches[:4]])), [step.skipped for step in case.steps]


def term_without_tokens(kind: str, counted: Counted) -> Any:
    """The last micro-batch of rank 1 has a penalty on one layer, and no token to reach the others by."""

    def tagger(model: nn.Module) -> Tagger:
        found = model.module if isinstance(model, DistributedDataParallel) else model
        assert isinstance(found, Tagger)
        return found

    def score(model: nn.Module, batch: Batch) -> torch.Tensor:
        result: torch.Tensor = tagger(model).inner(batch[0]).square().mean()
        return result

    def whole(model: nn.Module, batch: Batch) -> torch.Tensor:
        return token_loss(model, batch) + score(model, batch)

    def terms(model: nn.Module, batch: Batch) -> list[LossTerm]:
        return [LossTerm(token_loss(model, batch)), LossTerm(score(model, batch), over="samples")]

    batches = make_batches([2, 3, 1, 2], empty=[3])
    case = Case(kind, counted)
    case.read(batches, terms)
    return max(case.errors([batches], whole)), counted.gradients


def clipped(kind: str, counted: Counted) -> Any:
    batches = make_batches([2, 3, 1, 2])
    case = Case(kind, counted, clip_norm=0.05)
    case.read(batches)
    reference = big_batch_gradient(case.twin, batches, token_loss)
    norm = sum(gradient.square().sum().item() for gradient in reference) ** 0.5
    wanted = [gradient * 0.05 / (norm + 1e-6) for gradient in reference]
    return relative_error(case.seen[0], wanted), case.steps[0].gradient_norm / norm - 1


def infinity_on_one_rank(kind: str, counted: Counted) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    case = Case(kind, counted, scaler=scaler)
    for index, batch in enumerate(case.accumulator.micro_batches(mine(make_batches([2] * 8)), count_tokens)):
        loss = token_loss(case.model, batch)
        case.note(case.accumulator.backward(loss * float("inf") if index == 0 and dist.get_rank() == 1 else loss))
    return [bool(step.skipped) for step in case.steps], scaler.get_scale(), len(case.seen)


def plain_loop(kind: str, counted: Counted) -> Any:
    batches = make_batches([3, 1, 2, 4])
    case = Case(kind, counted)
    for batch in mine(batches):
        case.note(case.accumulator.backward(token_loss(case.model, batch), weight=count_tokens(batch)))
    return max(case.errors([batches])), counted.gradients, counted.scalars


def flushed_tail(kind: str, counted: Counted) -> Any:
    batches = make_batches([3, 1])
    case = Case(kind, counted, 3)
    for batch in mine(batches):
        case.accumulator.backward(token_loss(case.model, batch), weight=count_tokens(batch))
    try:
        case.note(case.accumulator.flush())
    except BatchwrightError as error:
        return str(error)
    return max(case.errors([batches])), counted.gradients, counted.scalars


def skip_that_others_wait_for(kind: str, counted: Counted) -> Any:
    case = Case(kind, counted, 1)
    for batch in case.accumulator.micro_batches(mine(make_batches([1, 1])), count_tokens):
        try:
            case.accumulator.skip()
        except BatchwrightError as error:
            told = str(error)
        case.accumulator.backward(token_loss(case.model, batch), weight=0)
    return told


def loader_that_raises_on_one_rank(kind: str, counted: Counted) -> Any:
    def loader() -> Iterator[Batch]:
        for index, batch in enumerate(mine(make_batches([1] * 12))):
            if index == 3 and dist.get_rank() == 1:
                raise OSError("the disk is gone")
            yield batch

    case = Case(kind, counted)
    try:
        for batch in case.accumulator.micro_batches(loader(), count_tokens):
            case.note(case.accumulator.backward(token_loss(case.model, batch)))
    except (OSError, BatchwrightError):
        return len(case.steps), "raised"
    return len(case.steps), "went on"


def changed_at_a_boundary(kind: str, counted: Counted) -> Any:
    batches = make_batches([1] * 12)
    case = Case(kind, counted, 1)
    for batch in case.accumulator.micro_batches(mine(batches), count_tokens):
        step = case.accumulator.backward(token_loss(case.model, batch))
        case.note(step)
        if step and step.number <= 2:
            case.accumulator.accumulation = step.number + 1
    return max(case.errors([batches[:2], batches[2:6], batches[6:]])), counted.gradients


def precise(kind: str, counted: Counted) -> Any:
    """Rank 1 has nothing to add, and must still send as many bytes as rank 0."""
    batches = make_batches([2] * 4, torch.bfloat16, empty=[1, 3])
    case = Case(kind, counted, dtype=torch.bfloat16, precise=True)
    case.read(batches)
    return [step.skipped for step in case.steps], {str(g.dtype) for g in case.seen[0]} == {"torch.float32"}


def out_of_memory_on_one_rank(kind: str, counted: Counted) -> Any:
    def full(model: nn.Module, batch: Batch) -> torch.Tensor:
        if dist.get_rank() == 1 and len(batch[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return token_loss(model, batch)

    batches = make_batches([2, 3, 2, 2])
    case = Case(kind, counted, on_oom="split")
    for batch in case.accumulator.micro_batches(mine(batches), count_tokens):
        case.note(case.accumulator.run(batch, full))
    splits = [None] * RANKS
    dist.all_gather_object(splits, case.steps[0].splits)
    return max(case.errors([batches])), counted.gradients, splits


def flag_is_put_back(kind: str, counted: Counted) -> Any:
    case = Case(kind, counted, 3)
    flags = []
    for batch in case.accumulator.micro_batches(mine(make_batches([1] * 8)), count_tokens):
        flags.append(case.model.require_backward_grad_sync)
        case.accumulator.backward(token_loss(case.model, batch))
    return flags, case.model.require_backward_grad_sync


def weights_that_change(kind: str, counted: Counted) -> Any:
    """A layer is frozen when DDP or FSDP2 wraps, then it is unfrozen, then the other is frozen."""
    told = {}
    batches = make_batches([2, 3, 1, 2])
    for reads in (True, False):
        case = Case(kind, counted, clip_norm=0.05, frozen="inner")
        errors = []
        for train in ({"outer"}, {"inner", "outer"}, {"inner"}, {"inner", "outer"}):
            for model in (case.model, case.twin):
                for name, weight in model.named_parameters():
                    weight.requires_grad_(any(part in name for part in train))
            if reads:
                case.read(batches)
            else:
                for batch in mine(batches):
                    case.note(case.accumulator.backward(token_loss(case.model, batch), weight=count_tokens(batch)))
            reference = big_batch_gradient(case.twin, batches, token_loss)
            norm = sum(gradient.square().sum().item() for gradient in reference) ** 0.5
            wanted = [gradient * min(1.0, 0.05 / (norm + 1e-6)) for gradient in reference]
            errors.append(relative_error([g for g in case.seen[-1] if g is not None], wanted))
            for weight, gradient in zip([w for w in case.twin.parameters() if w.requires_grad], wanted, strict=True):
                weight.data -= 0.1 * gradient
        told["micro_batches" if reads else "plain loop"] = max(errors)
    return told


def frozen_before_the_only_micro_batch(kind: str, counted: Counted) -> Any:
    """In a plain loop nobody can tell DDP before the forward; through micro_batches it is told."""
    case = Case(kind, counted, 1)
    batches = make_batches([2, 3])
    case.accumulator.backward(token_loss(case.model, mine(batches)[0]), weight=1)
    case.model.module.inner.requires_grad_(False)
    try:
        case.accumulator.backward(token_loss(case.model, mine(batches)[0]), weight=1)
    except BatchwrightError as error:
        return str(error)
    return "went on"


def a_weight_outside_of_the_wrapped_model(kind: str, counted: Counted) -> Any:
    """A temperature that only the loss and the optimizer know must not drift apart."""
    case = Case(kind, counted)
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    case.optimizer.add_param_group({"params": [temperature]})

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch[0]) * temperature
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    batches = make_batches([2, 3, 1, 2])
    for _ in range(3):
        case.read(batches, loss)
    values = [None] * RANKS
    dist.all_gather_object(values, temperature.item())
    return values[0] == values[1] != 1.0


def rows_and_complex_numbers(kind: str, counted: Counted) -> Any:
    """A flush averages by hand: gradients of rows, of which each rank has others or none, and of complex weights."""

    class Odd(nn.Module):
        def __init__(self, *, sparse: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(20, 3, sparse=sparse, dtype=torch.float64)
            self.spare = nn.Embedding(20, 3, sparse=sparse, dtype=torch.float64)
            self.turn = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.table(x)
            rows = rows + self.spare(x) if int(x.min()) == 0 else rows  # on one rank only
            result: torch.Tensor = (rows.to(self.turn.dtype) @ self.turn).abs().square().sum((1, 2)).mean()
            return result

    x = torch.tensor([[0, 3], [1, 3], [7, 9], [9, 2]])
    plain = Odd(sparse=False)
    shares = [plain(x[:2]), plain(x[2:])]
    (sum(shares) / 2).backward()
    odd = Odd(sparse=True)
    model = DistributedDataParallel(odd, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found: dict[str, Any] = {}
    optimizer.register_step_pre_hook(lambda *_: found.update({n: p.grad for n, p in odd.named_parameters()}))
    accumulator = Accumulator(model, optimizer, 3, clip_norm=1e9)
    accumulator.backward(model(x[2 * dist.get_rank() : 2 * dist.get_rank() + 2]), weight=2)
    accumulator.flush()
    errors = []
    for name, weight in plain.named_parameters():
        gradient = found[name].to_dense() if found[name].is_sparse else found[name]
        errors.append(float((gradient - weight.grad).abs().max()))
    return max(errors), found["table.weight"].is_sparse, found["spare.weight"].coalesce().indices().flatten().tolist()


def terms_with_counts_of_their_own(kind: str, counted: Counted) -> Any:
    """Tokens of even and of odd tags are means of their own; some micro-batches have none of a kind."""

    def loss_of(model: nn.Module, batch: Batch, odd: int) -> torch.Tensor:
        tags = batch[1].masked_fill((batch[1] % 2 != odd) | (batch[1] < 0), -100)
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), tags.flatten(), ignore_index=-100)

    def count(batch: Batch, odd: int) -> int:
        return int(((batch[1] % 2 == odd) & (batch[1] >= 0)).sum())

    def whole(model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss_of(model, batch, 0) + loss_of(model, batch, 1)

    batches = make_batches([2, 3, 1, 2, 3], empty=[1])
    case = Case(kind, counted, 3)
    weight = {"even": lambda batch: count(batch, 0), "odd": lambda batch: count(batch, 1)}
    for batch in case.accumulator.micro_batches(mine(batches), weight):
        terms = [LossTerm(loss_of(case.model, batch, odd), over=name) for odd, name in enumerate(weight)]
        case.note(case.accumulator.backward(terms))
    return max(case.errors([batches], whole))


CASES: dict[str, tuple[Callable[[str, Counted], Any], tuple[str, ...]]] = {
    "ragged": (ragged, ("ddp", "fsdp", "fsdp root only")),
    "no_units": (no_units, ("ddp", "fsdp")),
    "term_without_tokens": (term_without_tokens, ("ddp",)),
    "clipped": (clipped, ("ddp", "fsdp")),
    "infinity_on_one_rank": (infinity_on_one_rank, ("ddp", "fsdp")),
    "plain_loop": (plain_loop, ("ddp", "fsdp")),
    "flushed_tail": (flushed_tail, ("ddp", "fsdp")),
    "skip_that_others_wait_for": (skip_that_others_wait_for, ("ddp", "fsdp")),
    "loader_that_raises_on_one_rank": (loader_that_raises_on_one_rank, ("ddp", "fsdp")),
    "changed_at_a_boundary": (changed_at_a_boundary, ("ddp", "fsdp")),
    "precise": (precise, ("ddp",)),
    "out_of_memory_on_one_rank": (out_of_memory_on_one_rank, ("ddp",)),
    "flag_is_put_back": (flag_is_put_back, ("ddp",)),
    "weights_that_change": (weights_that_change, ("ddp", "ddp, unused found", "fsdp", "fsdp root only")),
    "frozen_before_the_only_micro_batch": (frozen_before_the_only_micro_batch, ("ddp",)),
    "a_weight_outside_of_the_wrapped_model": (a_weight_outside_of_the_wrapped_model, ("ddp",)),
    "terms_with_counts_of_their_own": (terms_with_counts_of_their_own, ("ddp",)),
    "rows_and_complex_numbers": (rows_and_complex_numbers, ("ddp",)),
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    counted = Counted()
    told = {f"{name}, {kind}": run(kind, counted) for name, (run, kinds) in CASES.items() for kind in kinds}
    Path(sys.argv[1], str(dist.get_rank())).write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    # A plain end now and then hangs in gloo's threads.
    os._exit(0)


if __name__ == "__main__":
    main()
