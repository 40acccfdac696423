"""Problems whose noise scale is known in closed form, drawn step by step: what the parts of a batch give, many at once.

| problem | gradient of a sample | T | \\|G\\|^2 |
|---|---|---|---|
| Gaussian mean | w - x, x ~ N(mu, S) | tr S | \\|w - mu\\|^2 |
| linear regression | x (x'd - e), x ~ N(0, H), e ~ N(0, s2) | (d'Hd + s2) tr H + \\|Hd\\|^2 | \\|Hd\\|^2 |

The second is drawn exactly in distribution, but not sample by sample: given the residuals of a micro-batch, the mean of
z r over it, where x = H^(1/2) z, is normal in all directions but that of H^(1/2) d, with the variance sum(r^2)/b^2.
That takes a fifth of the random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Array = npt.NDArray[Any]

DIMENSIONS = 20
PARTS, PART_SIZE = 4, 8
BATCH = PARTS * PART_SIZE
SEQUENCE = 5
"""Steps that GPT-NeoX takes for one large batch."""


@dataclass(frozen=True)
class Problem:
    """Where a training stands, and how to draw the gradients of its micro-batches."""

    name: str
    trace: float
    signal: float
    draw: Callable[[np.random.Generator, int], Array]
    """Gradients of (steps, PARTS) micro-batches of PART_SIZE samples."""

    @property
    def noise_scale(self) -> float:
        """T/|G|^2."""
        return self.trace / self.signal


@dataclass(frozen=True)
class Draws:
    """What a measurement may know of steps in a row, repeated: arrays of (repeats, steps)."""

    squares: list[Array]
    """|g|^2 of each micro-batch."""
    of_mean: Array
    """|mean g|^2 of each step."""
    of_sequence: Array
    """|mean g|^2 over SEQUENCE steps in a row: (repeats, steps // SEQUENCE)."""


def spectrum(is_spread: bool) -> Array:
    """Return eigenvalues: all 1, or over two orders of magnitude."""
    return np.geomspace(0.1, 10.0, DIMENSIONS) if is_spread else np.ones(DIMENSIONS)


def gaussian_mean(noise_scale: float) -> Problem:
    """Sit at a distance from the mean at which the noise scale is as asked; the covariance is spread."""
    variances = spectrum(is_spread=True)
    trace = float(variances.sum())
    direction = np.ones(DIMENSIONS) / math.sqrt(DIMENSIONS)
    gradient = direction * math.sqrt(trace / noise_scale)
    deviation = np.sqrt(variances / PART_SIZE).astype(np.float32)

    def draw(random: np.random.Generator, steps: int) -> Array:
        noise: Array = random.standard_normal((steps, PARTS, DIMENSIONS), dtype=np.float32)
        noise *= deviation
        noise += gradient.astype(np.float32)
        return noise

    return Problem("Gaussian mean", trace, trace / noise_scale, draw)


def regression(noise_scale: float, *, is_spread: bool) -> Problem:
    """Choose the noise of the labels so that the noise scale is as asked; the error d is of length 1."""
    eigenvalues = spectrum(is_spread)
    # Along the larger eigenvalues, since d'Hd tr H/|Hd|^2 alone must stay below the smallest noise scale.
    error = np.sqrt(eigenvalues) / math.sqrt(eigenvalues.sum())
    signal = float(((eigenvalues * error) ** 2).sum())
    explained = float((eigenvalues * error**2).sum())
    label_variance = (noise_scale - 1) * signal / float(eigenvalues.sum()) - explained
    assert label_variance >= 0, f"{noise_scale} is below the least noise scale of this problem"
    root = np.sqrt(eigenvalues).astype(np.float32)
    along = (np.sqrt(eigenvalues) * error / math.sqrt(explained)).astype(np.float32)

    def draw(random: np.random.Generator, steps: int) -> Array:
        each: Array = random.standard_normal((2, steps, PARTS, PART_SIZE), dtype=np.float32)
        inputs, labels = each
        residuals = inputs * np.float32(math.sqrt(explained)) + labels * np.float32(math.sqrt(label_variance))
        found: Array = random.standard_normal((steps, PARTS, DIMENSIONS), dtype=np.float32)
        found *= np.sqrt(np.einsum("spi,spi->sp", residuals, residuals))[..., None] / PART_SIZE
        found += (np.einsum("spi,spi->sp", inputs, residuals) / PART_SIZE - found @ along)[..., None] * along
        found *= root
        return found

    name = "regression, " + ("spread spectrum" if is_spread else "H = I")
    return Problem(name, noise_scale * signal, signal, draw)


PROBLEMS: list[Callable[[float], Problem]] = [
    gaussian_mean,
    lambda scale: regression(scale, is_spread=False),
    lambda scale: regression(scale, is_spread=True),
]


def draws_of(problem: Problem, random: np.random.Generator, *, repeats: int, steps: int) -> Draws:
    """Draw `repeats` measurements of `steps` steps each."""
    gradients = problem.draw(random, repeats * steps)
    squares = np.einsum("spd,spd->sp", gradients, gradients, dtype=np.float64).reshape(repeats, steps, PARTS)
    means = gradients.mean(1, dtype=np.float64)
    of_mean = np.einsum("sd,sd->s", means, means).reshape(repeats, steps)
    longer = means.reshape(repeats, steps // SEQUENCE, SEQUENCE, -1).mean(2)
    return Draws([squares[..., part] for part in range(PARTS)], of_mean, np.einsum("rnd,rnd->rn", longer, longer))
