"""How often the 95 % interval of the noise scale covers its present value, with drift and without.

    python benchmarks/noise_coverage.py --repeats 200

Gradients are Gaussian (or, for heavy tails, each sample's has a lognormal length) in 50 dimensions, so that the noise T
and the signal |G|^2 of every step are known. For each case: coverage of the value at the last step, the median of the
estimate over that value, the width of the interval beside that of the ratio of means over the same window (in 1/B,
which is always finite), and how often there is an upper end. In brackets the ratio of means.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np

from batchwright.noise.interval import Interval, fieller

DIMENSIONS = 50


@dataclass(frozen=True)
class Case:
    """One course of T and |G|^2 over a window."""

    name: str
    signal: float = 1.0
    """|G|^2 in the end, relative to the start."""
    trace: float = 1.0
    batch: int = 64
    parts: int = 4
    steps: int = 100
    start: float = 100.0
    """The noise scale in the beginning, in samples."""
    tails: float = 0.0
    shape: str = "exponential"

    def course(self, end: float) -> np.ndarray:
        """Return a level along the window, 1 in the beginning."""
        along = np.linspace(0, 1, self.steps)
        if self.shape == "linear":
            return 1 + (end - 1) * along
        if self.shape == "one over time":
            return 1 / (1 + (1 / end - 1) * along)
        if self.shape == "step":
            return np.where(along < 0.5, 1.0, end)
        return end**along


CASES = [
    *(Case(f"signal x 1/{fall:g}", 1 / fall) for fall in (1, 1.2, 1.5, 2, 3, 4, 6, 10, 20)),
    *(Case(f"signal x 1/{fall:g}, batch 256", 1 / fall, batch=256) for fall in (1, 2, 4, 10)),
    *(Case(f"signal x 1/{fall:g}, batch 16", 1 / fall, batch=16) for fall in (1, 2, 4, 10)),
    *(Case(f"signal x 1/{fall:g}, single examples", 1 / fall, parts=64) for fall in (1, 4)),
    *(Case(f"signal x 1/{fall:g}, halves", 1 / fall, parts=2) for fall in (1, 4)),
    Case("signal x 4", 4.0),
    Case("noise x 4", trace=4.0),
    Case("noise x 2, signal x 1/4", 1 / 4, 2.0),
    Case("both x 1/4", 1 / 4, 1 / 4),
    *(Case(f"signal x 1/{fall:g}, 20 steps", 1 / fall, steps=20) for fall in (1, 4)),
    *(Case(f"signal x 1/{fall:g}, 200 steps", 1 / fall, steps=200) for fall in (1, 4)),
    *(Case(f"signal x 1/{fall:g}, heavy tails", 1 / fall, tails=1.0) for fall in (1, 4)),
    Case("signal x 1/4, linear", 1 / 4, shape="linear"),
    Case("signal x 1/4, a step", 1 / 4, shape="step"),
    Case("signal x 1/10, one over time", 1 / 10, shape="one over time"),
]


def observed(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return T and |G|^2 of each step, unbiased."""
    traces, signals = case.course(case.trace), case.course(case.signal) / case.start
    size = case.batch // case.parts
    spread = np.sqrt(traces / DIMENSIONS / size)[:, None, None]
    if case.tails:
        lengths = np.exp(case.tails * rng.standard_normal((case.steps, case.parts, size)) - case.tails**2)
        spread = spread * np.sqrt((lengths**2).mean(-1))[..., None]
    gradients = spread * rng.standard_normal((case.steps, case.parts, DIMENSIONS))
    gradients[:, :, 0] += np.sqrt(signals)[:, None]
    squares, of_mean = (gradients**2).sum(-1).mean(-1), (gradients.mean(1) ** 2).sum(-1)
    found = case.batch / (case.parts - 1) * (squares - of_mean)
    return found, of_mean - found / case.batch


def width(interval: Interval) -> float:
    """Return the width of an interval in 1/B."""
    return 1 / max(interval.low, 1e-9) - (1 / interval.high if math.isfinite(interval.high) else 0.0)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    print("| in the window | covers the present | value / present | width, over that of means | resolved |")
    print("|---|---|---|---|---|")
    for case in CASES:
        rng = np.random.default_rng(0)
        truth = float(case.course(case.trace)[-1] / case.course(case.signal)[-1] * case.start)
        pairs = []
        for _ in range(repeats):
            a, c = observed(case, rng)
            now, means = fieller(a, c), fieller(a, c, drifts=False)
            assert now is not None
            assert means is not None
            pairs.append((now, means))
        covers = [np.mean([each[i].low <= truth <= each[i].high for each in pairs]) for i in (0, 1)]
        values = [np.median([each[i].value / truth for each in pairs]) for i in (0, 1)]
        wider = np.median([width(now) / width(means) for now, means in pairs])
        resolved = np.mean([now.resolved for now, _ in pairs])
        print(
            f"| {case.name} | {100 * covers[0]:.0f} % ({100 * covers[1]:.0f}) | {values[0]:.2f} ({values[1]:.2f}) "
            f"| {wider:.2f} | {100 * resolved:.0f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
