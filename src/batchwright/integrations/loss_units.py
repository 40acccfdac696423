"""What the loss of a transformers head is a mean over: found by cutting a batch in two and weighing the parts.

Promises:
- a unit is named only where the loss of the whole is the mean of the parts' losses weighted by it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from batchwright.device.cutting import cut, num_samples
from batchwright.integrations.transformers_heads import as_it_was

if TYPE_CHECKING:
    from collections.abc import Mapping

_IGNORED = -100
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
    return labels.ne(_IGNORED).sum()


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
        if "labels after" in unit and (labels is None or labels.dim() < 2):
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
    counted = (labels[0].flatten() != _IGNORED).nonzero().flatten()
    forms = []
    for kept in {1, 2, len(counted) // 2, len(counted)}:
        changed = labels.clone(memory_format=torch.contiguous_format)
        changed[0].view(-1)[counted[kept:]] = _IGNORED
        forms.append({**batch, "labels": changed})
    return max(forms, key=lambda form: _difference(form["labels"], samples))


def _difference(labels: torch.Tensor, samples: int) -> tuple[float, float]:
    """How far the share of the first sample in all labels, and in those after the first, is from that in samples."""
    shares = []
    for kind in (labels, labels[..., 1:]):
        counts = kind.ne(_IGNORED).flatten(1).sum(1)
        shares.append(float(counts[0] / counts.sum().clamp(min=1)))
    return min(abs(share - 1 / samples) for share in shares), abs(shares[0] - shares[1])
