"""What the model of time is compared with, on the same rows: peaks, a fixed utilization, and coarse counts.

The coarse model knows of a step only its FLOPs by format, the bytes of its weights, the bytes that its products write
and its kernels; it is fitted to the same rows, by the same loss, with the same sustained rates, and has the same memory
of old software.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from batchwright.timing.collectives import COLLECTIVES

if TYPE_CHECKING:
    from step_cases.fitting import Sample

_UTILIZATION = 0.4
_FORMATS = ("half", "tf32", "fp32")
_STEPS, _RATE = 600, 0.05


def roofline(sample: Sample) -> float:
    """Every operator at the card's peak, or at its nominal bandwidth, whichever is slower."""
    speed = sample.speed
    total = 0.0
    for work, times in sample.counts.items():
        peak = speed.peaks.get(work.number_format) or speed.peaks["fp32"]
        total += times * max(work.flops / peak, work.num_bytes / speed.memory_peak)
    return total


def fixed_utilization(sample: Sample) -> float:
    """40 % of the peak of each format."""
    speed = sample.speed
    return sum(
        times * work.flops / (_UTILIZATION * (speed.peaks.get(work.number_format) or speed.peaks["fp32"]))
        for work, times in sample.counts.items()
    )


def _features(sample: Sample) -> list[float]:
    speed = sample.speed
    by_format = dict.fromkeys(_FORMATS, 0.0)
    written = updated = 0.0
    for work, times in sample.counts.items():
        name = work.number_format if work.number_format in ("tf32", "fp32") else "half"
        rate = speed.sustained.get(work.number_format) or speed.sustained["fp32"]
        by_format[name] += times * work.flops / rate
        written += times * work.written_bytes / speed.memory if work.flops else 0.0
    for work in sample.step.entries:
        if work.phase == "optimizer" and work.kind not in COLLECTIVES:
            updated += work.num_bytes / speed.memory
    kernels = sum(work.kernels for work in sample.step.entries) * 1e-5
    return [*by_format.values(), written, updated, kernels]


def fit_coarse(samples: Sequence[Sample]) -> Callable[[Sample], float]:
    """Fit the coarse model, and return how it predicts."""
    features = torch.tensor([_features(sample) for sample in samples], dtype=torch.float64)
    truth = torch.tensor([sample.row.seconds for sample in samples], dtype=torch.float64).log()
    is_old = torch.tensor([float(sample.row.is_old) for sample in samples], dtype=torch.float64)
    logs = torch.tensor([0.3, 0.5, 0.3, 1.0, 0.0, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        error = (features @ logs[:6].exp()).log() + is_old * logs[6] - truth
        (((error / 0.1) ** 2 + 1).sqrt().mean()).backward()
        optimizer.step()
    weights = logs.detach()

    def predict(sample: Sample) -> float:
        seconds = float(torch.tensor(_features(sample), dtype=torch.float64) @ weights[:6].exp())
        return seconds * float(weights[6].exp()) ** sample.row.is_old

    return predict
