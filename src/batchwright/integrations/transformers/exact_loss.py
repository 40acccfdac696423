"""`exact_loss`: a transformers Trainer whose head ignores the item count, made to train right.

Trainer counts the labels of a whole window and passes `num_items_in_batch` to every forward that takes `**kwargs`; it
then divides by nothing itself. A head that drops the count returns the mean over its micro-batch, so the gradient of a
window comes out multiplied by the accumulation count. `check_head` tells which heads do.

Promises:
- a head is asked with one micro-batch and two counts: a loss that uses the count halves when it doubles;
- weights, buffers, gradients, random numbers and the mode of every module are afterwards as they were;
- the gradient of a window is that of its mean loss over all labels, for any split, the last window included, and over
  all ranks (unless `average_tokens_across_devices` is switched off);
- what the head's loss is a mean over is measured on a small batch of the trainer's own data, not assumed: the batch is
  cut in two, and a unit is named only if the loss of the whole is the mean of the parts' losses weighted by it;
- nothing but two methods of this one trainer is replaced, and `undo()` puts them back.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Self

import torch
from torch.utils.data import IterableDataset

from batchwright.device.batches import IGNORED, cut, move_batch, num_samples
from batchwright.device.step import evaluating
from batchwright.errors import InvalidInputError, import_extra
from batchwright.printed_result import PrintedLine
from batchwright.state.process_state import kept_random_state
from batchwright.units import shortened

Verdict = Literal["uses", "ignores", "partly", "divided"]


@dataclass(frozen=True)
class HeadCheck(PrintedLine):
    """What one head does with `num_items_in_batch`."""

    head: str
    """The class of the model."""
    verdict: Verdict
    """It "uses" the count, "ignores" it, does so in a term of its loss ("partly"), or is not given one ("divided")."""
    ignored_share: float | None
    """Which part of the loss stays as it is when the count doubles; None where no count is given."""
    reason: str

    @property
    def ignores_count(self) -> bool | None:
        """Whether Trainer multiplies the gradient by the accumulation count; None where it divides itself."""
        return None if self.verdict == "divided" else self.verdict != "uses"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {**asdict(self), "ignores_count": self.ignores_count}

    def __str__(self) -> str:
        return f"{self.head}: {self.reason}"


def check_head(model: torch.nn.Module, batch: Mapping[str, Any]) -> HeadCheck:
    """Find out whether a head's loss follows the item count, from one micro-batch and two counts.

        check_head(BertForSequenceClassification(config), {"input_ids": ids, "labels": labels}).ignores_count  # True

    `batch` is what a collator returns, on the model's device.
    """
    bare = bare_model(model)
    name = type(bare).__name__
    why_not = not_given_a_count(bare, batch)
    if why_not:
        return HeadCheck(name, "divided", None, f"{why_not}, so Trainer divides by the accumulation count itself")
    count = int((batch["labels"] != IGNORED).sum())
    if not count:
        raise InvalidInputError(f"every label of the batch is {IGNORED}: the loss of no item tells nothing.")
    with as_it_was(bare), torch.no_grad():
        once, twice = _losses(model, batch, count)
    if not math.isfinite(once) or not math.isfinite(twice) or once == 0:
        raise InvalidInputError(f"{name} has a loss of {once} on this batch, which tells nothing.")
    # once = counted + ignored, twice = counted / 2 + ignored.
    share = (2 * twice - once) / once
    # Losses of 16-bit models carry three digits.
    dtype = next((p.dtype for p in bare.parameters() if p.is_floating_point()), torch.float32)
    noise = max(1e-5, 8 * torch.finfo(dtype).eps)
    verdict: Verdict = "uses" if abs(share) <= noise else "ignores" if abs(share - 1) <= noise else "partly"
    reasons = {
        "uses": "its loss halves when the count doubles, so accumulation is exact",
        "ignores": "its loss ignores the count, so Trainer multiplies the gradient by the accumulation count",
        "partly": f"{share:.2%} of its loss ignores the count, and is multiplied by accumulation and ranks",
    }
    return HeadCheck(
        name, verdict, 1.0 if verdict == "ignores" else 0.0 if verdict == "uses" else share, reasons[verdict]
    )


def bare_model(model: Any) -> Any:
    """Return the model within DDP and PEFT wrappers, whose forward Trainer looks at."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def not_given_a_count(model: Any, batch: Mapping[str, Any]) -> str:
    """Say why Trainer gives this forward no count; empty where it does."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is None:
        parameters = inspect.signature(model.forward).parameters.values()
        accepts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not accepts:
            return "its forward takes no **kwargs"
    if not accepts:
        return "it says accepts_loss_kwargs = False"
    if "labels" not in batch:
        return 'the batch has no "labels"'
    if not isinstance(batch["labels"], torch.Tensor):
        return "its labels are no tensor"
    return ""


def loss_at(model: Any, batch: Mapping[str, Any], count: torch.Tensor | None) -> float:
    """Return the loss of a micro-batch, given a count or none; random numbers are drawn as if for the first time."""
    counted = {} if count is None else {"num_items_in_batch": count.to(batch["labels"].device)}
    with kept_random_state(batch["labels"].device):
        outputs = model(**batch, **counted)
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InvalidInputError(f"{type(model).__name__} returned no loss for this batch.")
    return float(loss)


def _losses(model: Any, batch: Mapping[str, Any], count: int) -> tuple[float, float]:
    """Return the losses at a count and at twice that; a pass is repeated, since some models change in their first."""
    once, twice = (loss_at(model, batch, torch.tensor(count * times)) for times in (1, 2))
    for _ in range(2):
        again = loss_at(model, batch, torch.tensor(count))
        if again == once or math.isclose(again, once, rel_tol=1e-6):
            return once, twice
        before, once, twice = once, again, loss_at(model, batch, torch.tensor(2 * count))
    raise InvalidInputError(
        f"{type(model).__name__} gave {before} and {once} for the same batch, count and random numbers: two counts "
        "cannot be compared."
    )


@contextmanager
def as_it_was(model: torch.nn.Module, *, train: bool = True) -> Iterator[None]:
    """Run in train mode, since some terms exist only there, or in eval mode; modes and buffers are put back."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with evaluating(model):
            model.train(train)
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


UNITS = {
    "labels": "the labels that Trainer counts",
    "all labels": "all labels",
    "labels after the first": "the labels after the first of each row",
    "samples": "samples",
}


def count_units(trainer: Any, unit: str, batch: Mapping[str, Any]) -> torch.Tensor:
    """Count the units of a micro-batch, on its device.

    >>> count_units(None, "all labels", {"labels": torch.tensor([[1, 2, -100], [3, -100, -100]])})
    tensor(3)
    """
    labels = batch.get("labels")
    if unit == "samples":
        return torch.tensor(_samples_of(batch) or 0, device=getattr(labels, "device", None))
    if unit == "micro-batches":
        return torch.tensor(1, device=getattr(labels, "device", None))
    assert isinstance(labels, torch.Tensor)
    if unit == "labels" and "shift_labels" in batch:
        labels = batch["shift_labels"]
    elif unit == "labels after the first" or (unit == "labels" and getattr(trainer, "_loss_shifts_labels", False)):
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def _samples_of(batch: Mapping[str, Any]) -> int | None:
    labels = batch.get("labels")
    # What all samples share may be in the batch too; labels, where there are any, are theirs.
    expected = labels.size(0) if isinstance(labels, torch.Tensor) and labels.dim() else None
    return num_samples(dict(batch), expected, remedy="leave what all samples share to the model or the collator")


def measure_unit(trainer: Any, batch: Mapping[str, Any]) -> str:
    """Return the unit of a trainer's loss, "sum" for one that is a sum, "micro-batches" where none of them fits."""
    samples = _samples_of(batch) or 0
    labels = batch.get("labels")
    if samples < 2:
        return "labels" if isinstance(labels, torch.Tensor) else "samples"
    batch = _uneven(batch, samples)
    parts = cut(dict(batch), [1, samples - 1])
    with as_it_was(trainer.model, train=False), torch.no_grad():
        whole, first, rest = (float(trainer.compute_loss(trainer.model, dict(part))) for part in (batch, *parts))
    # Where samples cannot be told apart, in 16 bits or with a head of zeros, the first fits: what Trainer counts.
    close = 2e-5 if next(trainer.model.parameters()).dtype in (torch.float32, torch.float64) else 2e-2
    if math.isclose(first + rest, whole, rel_tol=close):
        return "sum"
    for unit in UNITS:
        if unit != "samples" and not isinstance(labels, torch.Tensor):
            continue
        if unit == "labels after the first" and (labels is None or labels.dim() < 2):
            continue
        weights = [float(count_units(trainer, unit, part)) for part in parts]
        weighted = first * weights[0] + rest * weights[1]
        if sum(weights) and math.isclose(weighted, whole * sum(weights), rel_tol=close):
            return unit
    return "micro-batches"


def _uneven(batch: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Leave out labels of the first sample, as many as it takes for labels and samples to be different measures."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return dict(batch)
    counted = (labels[0].flatten() != IGNORED).nonzero().flatten()
    forms = []
    for kept in {1, 2, len(counted) // 2, len(counted)}:
        changed = labels.clone(memory_format=torch.contiguous_format)
        changed[0].view(-1)[counted[kept:]] = IGNORED
        forms.append({**batch, "labels": changed})
    return max(forms, key=lambda form: _difference(form["labels"], samples))


def _difference(labels: torch.Tensor, samples: int) -> tuple[float, float]:
    """How far the share of the first sample in all labels, and in those after the first, is from that in samples."""
    shares = []
    for kind in (labels, labels[..., 1:]):
        counts = kind.ne(IGNORED).flatten(1).sum(1)
        shares.append(float(counts[0] / counts.sum().clamp(min=1)))
    return min(abs(share - 1 / samples) for share in shares), abs(shares[0] - shares[1])


_SAMPLES = 4


@dataclass(frozen=True)
class ExactLoss(PrintedLine):
    """What was changed on a trainer so that its loss is exact; leaving a `with` block undoes it."""

    head: HeadCheck
    unit: str | None
    """What the head's loss is a mean over, where that was measured."""
    is_exact: bool
    """False where the loss, or a term of it, is no mean over what can be counted: its share is right then, not more."""
    changed: tuple[str, ...]
    """The settings of the trainer that were replaced; empty where nothing had to be."""
    reason: str
    _undo: dict[str, Any] = field(repr=False, compare=False)
    _trainer: Any = field(repr=False, compare=False)

    def undo(self) -> None:
        """Put back the trainer's own methods."""
        for name, replaced in self._undo.items():
            if vars(self._trainer).get(name) is replaced:
                delattr(self._trainer, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        changes = f"changed: {'; '.join(self.changed)}" if self.changed else "nothing was changed"
        return f"{self.head.head}: {self.reason}; {changes}"


def exact_loss(trainer: Any, *, batch: Mapping[str, Any] | None = None) -> ExactLoss:
    """Make a Trainer exact under accumulation where its model's head is not; say what was changed.

        trainer = Trainer(BertForTokenClassification(config), args, train_dataset=data, data_collator=collate)
        print(exact_loss(trainer))
        trainer.train()

    The head is asked with a few samples of the training data, or with `batch`, something its collator returns. A head
    that is right already is left alone.
    """
    _check(trainer)
    if getattr(vars(trainer).get("compute_loss"), "__module__", None) == __name__:
        return _unchanged(trainer, "exact_loss has been here before")
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return _unchanged(
            trainer,
            "the loss is not the head's: Trainer hands the count to the function that computes it; bw.audit(trainer) "
            "tells whether that uses it",
            is_exact=trainer.compute_loss_func is None,
        )
    small = _small_batch(trainer) if batch is None else dict(batch)
    small = move_batch(small, trainer.args.device)
    head = check_head(trainer.model, small)
    if head.verdict == "uses":
        return _unchanged(trainer, "its loss uses the count and is exact already", head)
    if head.verdict == "partly":
        return _changed(trainer, head, None, {"compute_loss": _by_asking_for_more(trainer)})
    unit = measure_unit(trainer, small)
    if unit == "sum":
        return _unchanged(trainer, "its loss is a sum, which adds up over micro-batches by itself", head)
    if unit == "micro-batches" and head.verdict == "divided":
        return _unchanged(trainer, "its loss is no mean over labels or samples; Trainer averages micro-batches", head)
    replaced: dict[str, Any] = {"compute_loss": _by_units(trainer, unit)}
    if head.verdict == "divided" or unit != "labels":
        replaced["_get_num_items_in_batch"] = _counting(trainer, unit)
    return _changed(trainer, head, unit, replaced)


def _changed(trainer: Any, head: HeadCheck, unit: str | None, replaced: dict[str, Any]) -> ExactLoss:
    for name, method in replaced.items():
        setattr(trainer, name, method)
    if unit == "micro-batches":
        reason = "its loss is no mean over labels or samples; each micro-batch of a window now counts alike"
    elif unit is None:
        reason = "a term of its loss ignores the count; it is now averaged over micro-batches and ranks"
    else:
        reason = f"its loss is the mean over {UNITS[unit]}; each micro-batch now counts by them"
    return ExactLoss(
        head=head,
        unit=unit,
        is_exact=unit not in (None, "micro-batches"),
        changed=tuple(f"trainer.{name}" for name in replaced),
        reason=reason,
        _undo=replaced,
        _trainer=trainer,
    )


def _unchanged(trainer: Any, reason: str, head: HeadCheck | None = None, *, is_exact: bool = True) -> ExactLoss:
    head = head or HeadCheck(type(trainer.model).__name__, "divided", None, reason)
    return ExactLoss(head, None, is_exact, (), reason, {}, trainer)


# The methods that take the place of Trainer's.


def _with_a_count(trainer: Any, compute: Callable[..., tuple[torch.Tensor, Any]]) -> Any:
    """Return a `compute_loss` that asks `compute` where Trainer hands it a count, else the trainer's own."""
    original = trainer.compute_loss

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        if num_items_in_batch is None:
            return original(model, inputs, return_outputs=return_outputs, **more)
        loss, outputs = compute(
            partial(original, model, return_outputs=True, **more), model, inputs, num_items_in_batch
        )
        return (loss, outputs) if return_outputs else loss

    return compute_loss


def _by_units(trainer: Any, unit: str) -> Any:
    """Weight the mean of each micro-batch by its units over those of the window."""

    def compute(of_head: Any, model: Any, inputs: Any, count: Any) -> tuple[torch.Tensor, Any]:
        units = count_units(trainer, unit, inputs)
        if unit not in ("samples", "micro-batches"):
            inputs = {**inputs, "labels": _never_empty(inputs["labels"], units)}
        # Without a count Trainer leaves the head's mean as it is; what the count is for comes here, and only here.
        loss, outputs = of_head(inputs)
        total = torch.as_tensor(count, device=loss.device).clamp(min=1)
        return loss * (units * _factor(trainer, model) / total), outputs

    return _with_a_count(trainer, compute)


def _by_asking_for_more(trainer: Any) -> Any:
    """Have the term that ignores the count shrink by the micro-batches and ranks that each bring it once."""

    def compute(of_head: Any, model: Any, inputs: Any, count: Any) -> tuple[torch.Tensor, Any]:
        # The head returns counted / count + ignored. At count = total / shares, and divided by shares, that makes
        # counted / total + ignored / shares, though nobody told us which part is which.
        shares = (trainer.current_gradient_accumulation_steps if model.training else 1) * _ranks(trainer)
        loss, outputs = of_head(inputs, num_items_in_batch=count / shares)
        return loss / shares, outputs

    return _with_a_count(trainer, compute)


def _counting(trainer: Any, unit: str) -> Any:
    """Count what the head's loss is a mean over, where Trainer counts something else or nothing."""

    def _get_num_items_in_batch(batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        if not batch_samples:
            return None
        total = torch.stack([count_units(trainer, unit, inputs).to(device) for inputs in batch_samples]).sum()
        if _ranks(trainer) > 1:
            total = trainer.accelerator.gather(total).sum()
        return total

    return _get_num_items_in_batch


def _factor(trainer: Any, model: Any) -> int:
    """Return what Trainer, or DDP, will divide by once more."""
    factor = _ranks(trainer)
    if not model.training:
        return factor
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    divides = not scaled if scaled is not None else not trainer.model_accepts_loss_kwargs
    return factor * trainer.current_gradient_accumulation_steps if divides else factor


def _ranks(trainer: Any) -> int:
    """Return how many ranks a count is summed over."""
    return int(trainer.args.world_size) if trainer.args.average_tokens_across_devices else 1


def _never_empty(labels: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Give a micro-batch without a single label one of them: it weighs 0, but the mean of nothing is not a number."""
    if labels.is_floating_point():
        return labels
    flat = labels.flatten().clone()
    flat[-1] = torch.where(units == 0, torch.zeros_like(flat[-1]), flat[-1])
    return flat.view_as(labels)


# What is refused, and what is measured first.


def _check(trainer: Any) -> None:
    transformers = import_extra("transformers", extra="transformers", purpose="exact_loss")
    if not isinstance(trainer, transformers.Trainer):
        raise InvalidInputError(f"exact_loss takes a transformers.Trainer; received {shortened(trainer)}.")
    own = vars(trainer).get("compute_loss", type(trainer).compute_loss)
    if own is not transformers.Trainer.compute_loss and own.__module__ != __name__:
        raise InvalidInputError(
            f"{type(trainer).__name__} has a compute_loss of its own: what it divides by is its author's to say.",
            remedy="bw.audit(trainer) shows whether it is right",
        )
    ways = ("get_tp_size", "get_cp_size", "get_sp_size")  # not all of them in earlier versions
    sizes = [getattr(trainer, way)() for way in ways if hasattr(trainer, way)]
    if math.prod(sizes) > 1 or trainer.args.n_gpu > 1:
        raise InvalidInputError("exact_loss is for data-parallel ranks; this trainer splits its batches or its model.")


def _small_batch(trainer: Any) -> dict[str, Any]:
    """Collate a few samples as Trainer would, drawing no random numbers that training would miss."""
    data = trainer.train_dataset
    if data is None:
        raise InvalidInputError("the trainer has no train_dataset.", remedy="exact_loss(trainer, batch=...)")
    columns = trainer._signature_columns
    with kept_random_state(trainer.args.device):
        try:
            if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
                samples = list(itertools.islice(iter(data), _SAMPLES))
            else:
                samples = [data[index] for index in range(min(_SAMPLES, len(data)))]
            collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
            return dict(collate(samples))
        finally:
            trainer._signature_columns = columns
