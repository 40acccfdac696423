"""Does a transformers head use the item count that Trainer hands it, or ignore it?

Trainer counts the labels of a whole window and passes `num_items_in_batch` to every forward that takes `**kwargs`; it
then divides by nothing itself. A head that drops the count returns the mean over its micro-batch, so the gradient of a
window comes out multiplied by the accumulation count.

Promises:
- one micro-batch, two counts: a loss that uses the count halves when it doubles;
- weights, buffers, gradients, random numbers and the mode of every module are afterwards as they were.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from batchwright.device.step import evaluating
from batchwright.errors import InvalidInputError
from batchwright.printed_result import PrintedLine
from batchwright.state.process_state import kept_random_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


Verdict = Literal["uses", "ignores", "partly", "divided"]
_IGNORED = -100


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
    count = int((batch["labels"] != _IGNORED).sum())
    if not count:
        raise InvalidInputError(f"every label of the batch is {_IGNORED}: the loss of no item tells nothing.")
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


@contextlib.contextmanager
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
