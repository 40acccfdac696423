"""What the formulas of others read on the same gradients: re-runs that are faithful to the formula, not their code.

A window's average is plain for everybody, where most of them have an exponential one: that is no matter of bias. The
estimators of AdaptDL and k-diffusion are, for equal micro-batches on as many ranks, those of ours, and their clamps
come after the average; they are left out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
from noise_accuracy_problems import BATCH, PART_SIZE, PARTS, SEQUENCE

from batchwright.noise.observations import Observation, Squares

if TYPE_CHECKING:
    from noise_accuracy_problems import Array, Draws

OURS = "ours"
OF_STEPS = ("mean of the steps' ratios", "median of the steps' ratios")


def observed(draws: Draws) -> Observation:
    """Our estimates of every step: the library's own function, on arrays instead of numbers."""
    squares: Any = draws.squares
    of_mean: Any = draws.of_mean
    found = Squares.of(squares, [PART_SIZE] * PARTS).observe(of_mean)
    assert found is not None
    return found


def terms_of(draws: Draws) -> dict[str, tuple[Array, Array]]:
    """Return, for every formula, what it averages over steps and divides: (repeats, looks) each."""
    ours: Any = observed(draws)
    mean_square = np.mean(draws.squares, axis=0)
    last = draws.of_mean[:, SEQUENCE - 1 :: SEQUENCE]
    return {
        OURS: (ours.trace, ours.signal),
        "GPT-NeoX: 5 steps, the last is small": two_batches(last, BATCH, draws.of_sequence, SEQUENCE * BATCH),
        "KungFu: the own rank is small": two_batches(draws.squares[0], PART_SIZE, draws.of_mean, BATCH),
        "FairScale: clamped, then averaged": (np.maximum(ours.trace, 1e-6), np.maximum(ours.signal, 0.0)),
        "signal not corrected (2602.03001, Cockpit's NormTest)": (ours.trace, draws.of_mean),
        "(E|g_i|^2 - |mean|^2) / |mean|^2": (mean_square - draws.of_mean, draws.of_mean),
    }


def two_batches(small: Array, small_size: int, large: Array, large_size: int) -> tuple[Array, Array]:
    """T and |G|^2 by appendix A.1 of McCandlish et al. 2018."""
    trace = (small - large) / (1 / small_size - 1 / large_size)
    return trace, (large_size * large - small_size * small) / (large_size - small_size)


def readings(draws: Draws) -> dict[str, Array]:
    """Return what each formula reads after one window: infinite where its signal is not above 0."""
    found = {name: _divided(top.mean(1), bottom.mean(1)) for name, (top, bottom) in terms_of(draws).items()}
    ours: Any = observed(draws)
    ratios = ours.trace / ours.signal
    return {**found, OF_STEPS[0]: ratios.mean(1), OF_STEPS[1]: np.median(ratios, axis=1)}


def _divided(top: Array, bottom: Array) -> Array:
    found: Array = np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1.0), np.inf)
    return found


def fairscale_says(gradients: Array) -> tuple[float, float] | None:
    """T/|G|^2 that FairScale's own AdaScale has after these (steps, parts, numbers), and our re-run of its formula.

    None where it is not installed.
    """
    try:
        scale = importlib.import_module("fairscale.optim").AdaScale
    except ImportError:
        return None
    import torch

    weight = torch.nn.Parameter(torch.zeros(gradients.shape[-1], dtype=torch.float64))
    optimizer = scale(
        torch.optim.SGD([weight], lr=0.0), num_gradients_to_accumulate=PARTS, smoothing=0.999999, debias_ewma=False
    )
    sums = np.zeros(2)
    for step in gradients:
        for part in step:
            (weight @ torch.from_numpy(part.astype(np.float64)) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes = [PART_SIZE] * PARTS
        seen = Squares.of([float(part @ part) for part in step.astype(np.float64)], sizes).observe(
            float((step.astype(np.float64).mean(0) ** 2).sum())
        )
        assert seen is not None
        sums += max(seen.trace, 1e-6), max(seen.signal, 0.0)
    return PART_SIZE * optimizer._grad_var_avg() / optimizer._grad_sqr_avg(), float(sums[0] / sums[1])
