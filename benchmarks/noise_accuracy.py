"""Is the noise scale right, and does its interval hold the truth as often as it says? The formulas of others beside it.

    python benchmarks/noise_accuracy.py                      everything; about twenty minutes of one core
    python benchmarks/noise_accuracy.py --part closed        problems with a closed form, and the formulas of others
    python benchmarks/noise_accuracy.py --part capture       every way to get at gradients, against the tests' oracle
    python benchmarks/noise_accuracy.py --part training      intervals along trainings on a finite set
    python benchmarks/noise_accuracy.py --quick              minutes, with larger standard errors

    pip install fairscale==0.4.13 --no-deps                  for a look at its own class beside its formula

Closed form. A batch of 32 in four micro-batches of 8, windows of 100 steps with the weights standing still, the true
noise scale at 1, 3, 17 and 80 batches (noise_accuracy_problems.py). The bias of T and of |G|^2 is that of the mean over
all steps, with its standard error; the repeats are as many as bring that error below 1 %. Coverage, the share of
intervals with an upper end and the median of upper to lower end among them are of up to 20,000 windows.

Capture: noise_capture_worker.py. Training: noise_accuracy_training.py. The exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from noise_accuracy_peers import fairscale_says, observed, readings, terms_of
from noise_accuracy_problems import BATCH, PROBLEMS, draws_of, gaussian_mean
from noise_accuracy_training import BATCH as BATCH_TRAINED
from noise_accuracy_training import OPTIMIZERS, ORDERS, check_exact, trained
from noise_capture_worker import DTYPES, cases_of, from_one_process, launched, run

from batchwright.noise.interval import fieller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from noise_accuracy_problems import Array, Draws, Problem
    from noise_accuracy_training import Window

STEPS, CHUNK, MOST_WINDOWS = 100, 2000, 20_000
# Windows for each ratio of the true noise scale to the batch; the error of |G|^2 grows in proportion to it.
REPEATS = {1: 10_000, 3: 10_000, 17: 20_000, 80: 250_000}
LONG_STEPS, LONG_RATIO = 2000, 80
BIAS_BAR, COVERAGE_BAND, CAPTURE_BAR = 0.02, (0.93, 0.97), 1e-6
SEEDS, WINDOWS = 10, 20


# --- closed form


class Intervals:
    """What is said of windows, against the truth."""

    def __init__(self, truth: float) -> None:
        self.truth = truth
        self.windows: list[tuple[float, float, float]] = []

    def add(self, traces: Array, signals: Array) -> None:
        """Take windows of steps, as many as are still wanted."""
        for trace, signal in list(zip(traces, signals, strict=True))[: MOST_WINDOWS - len(self.windows)]:
            found = fieller(trace, signal, drifts=False)  # nothing drifts here, and there are many thousands
            assert found is not None
            self.windows.append((self.truth, found.low, found.high))


def summary_of(windows: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Return how often the truth is in, how often there is an upper end, and how wide it is, of (truth, low, high)."""
    number = len(windows)
    covered = sum(low <= truth <= high for truth, low, high in windows) / number
    widths = [high / low if low else math.inf for _, low, high in windows if math.isfinite(high)]
    return {
        "windows": number,
        "coverage": covered,
        "error": math.sqrt(covered * (1 - covered) / number),
        "resolved": len(widths) / number,
        "width": float(np.median(widths)) if widths else math.nan,
        "too_low": sum(high < truth for truth, _, high in windows) / number,
        "too_high": sum(low > truth for truth, low, _ in windows) / number,
    }


def measured(problem: Problem, ratio: int, repeats: int, seed: int) -> dict[str, Any]:
    """Draw windows in chunks; return bias, coverage and what each formula reads."""
    random = np.random.Generator(np.random.SFC64([seed, ratio]))
    short, long = Intervals(problem.noise_scale), Intervals(problem.noise_scale)
    means: list[Array] = []
    sums: dict[str, Array] = {}
    read: dict[str, list[Array]] = {}
    for start in range(0, repeats, CHUNK):
        draws: Draws = draws_of(problem, random, repeats=CHUNK, steps=STEPS)
        seen: Any = observed(draws)
        means.append(np.stack([seen.trace.mean(1), seen.signal.mean(1)]))
        short.add(seen.trace, seen.signal)
        if ratio == LONG_RATIO:
            long.add(seen.trace.reshape(-1, LONG_STEPS), seen.signal.reshape(-1, LONG_STEPS))
        for name, (top, bottom) in terms_of(draws).items():
            sums[name] = sums.get(name, np.zeros(2)) + np.array([top.mean(), bottom.mean()])
        if start < MOST_WINDOWS:
            for name, values in readings(draws).items():
                read.setdefault(name, []).append(values / problem.noise_scale)
    by_window = np.concatenate(means, 1) / np.array([[problem.trace], [problem.signal]])
    return {
        "problem": problem.name,
        "ratio": ratio,
        "bias": list(by_window.mean(1) - 1),
        "error": list(by_window.std(1) / math.sqrt(by_window.shape[1])),
        "short": summary_of(short.windows),
        "long": summary_of(long.windows) if long.windows else None,
        "in_the_long_run": {name: top / bottom / problem.noise_scale for name, (top, bottom) in sums.items()},
        "after_a_window": {
            name: np.quantile(np.concatenate(values), [0.25, 0.5, 0.75], method="nearest").tolist()  # some are infinite
            for name, values in read.items()
        },
    }


def closed_form(share: float) -> tuple[dict[str, Any], list[str]]:
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    print("\n| problem | true / B | bias of T | bias of \\|G\\|^2 | steps | coverage | resolved | high / low |")
    print("|---|---|---|---|---|---|---|---|")
    for index, make in enumerate(PROBLEMS):
        for ratio, number in REPEATS.items():
            repeats = max(CHUNK, round(number * share) // CHUNK * CHUNK)
            row = measured(make(float(ratio * BATCH)), ratio, repeats, index)
            rows.append(row)
            cell = f"{row['problem']}, {ratio}"
            shown = [f"{b:+.2%} +- {e:.2%}" for b, e in zip(row["bias"], row["error"], strict=True)]
            print(
                f"| {row['problem']} | {ratio} | {' | '.join(shown)} | {STEPS} | {_shown(row['short'])} |", flush=True
            )
            if row["long"]:
                print(f"| {row['problem']} | {ratio} | | | {LONG_STEPS} | {_shown(row['long'])} |", flush=True)
            failures += [f"{cell}: bias {b:+.2%}" for b in row["bias"] if not abs(b) <= BIAS_BAR]
            failures += [f"{cell}: coverage {s['coverage']:.1%}" for s in (row["short"], row["long"]) if not _is_in(s)]
    print(f"\nWhat is read, as a multiple of the truth: in the long run; the quartiles after {STEPS} steps.\n")
    print("| problem | formula | " + " | ".join(f"true / B = {ratio}" for ratio in REPEATS) + " |")
    print("|---" * (len(REPEATS) + 2) + "|")
    for problem in dict.fromkeys(row["problem"] for row in rows):
        here = [row for row in rows if row["problem"] == problem]
        for name in here[0]["after_a_window"]:
            print(f"| {problem} | {name} | " + " | ".join(_read(row, name) for row in here) + " |")
    said = fairscale_says(gaussian_mean(17.0 * BATCH).draw(np.random.default_rng(0), 200))
    if said:
        print(f"\nFairScale's own AdaScale after 200 steps: {said[0]:.6g}; its formula, re-run: {said[1]:.6g}.")
    return {"closed_form": rows, "fairscale": said}, failures


def _read(row: dict[str, Any], formula: str) -> str:
    long_run = row["in_the_long_run"].get(formula)
    quartiles = " .. ".join(f"{value:.2g}" for value in row["after_a_window"][formula])
    return ("-" if long_run is None else f"{long_run:.3g}") + f"; {quartiles}"


def _is_in(summary: dict[str, float] | None) -> bool:
    return summary is None or COVERAGE_BAND[0] <= summary["coverage"] <= COVERAGE_BAND[1]


def _shown(summary: dict[str, float]) -> str:
    width = f"{summary['width']:.3g}" if summary["resolved"] else "-"
    return f"{summary['coverage']:.1%} +- {summary['error']:.1%} | {summary['resolved']:.1%} | {width}"


# --- every way to get at gradients


def capture() -> tuple[dict[str, Any], list[str]]:
    rows = [run(case, "one process", dtype) for dtype in DTYPES for case in cases_of(1)]
    for ranks in (2, 4):
        rows += launched(ranks)
    print("\nLargest error over six steps, of T / of |G|^2.\n")
    print("| gradients | ranks | " + " | ".join(DTYPES) + " |\n|---|---|---|---|")
    failures = []
    for kind, ranks, path in dict.fromkeys((row["kind"], row["ranks"], row["path"]) for row in rows):
        here = [row for row in rows if (row["kind"], row["ranks"], row["path"]) == (kind, ranks, path)]
        name = path if kind == "one process" else f"{kind}, {path}"
        cells = [f"{row['trace']:.0e} / {row['signal']:.0e}" for row in here]
        print(f"| {name} | {ranks} | " + " | ".join(cells) + " |")
        worst = max(max(row["trace"], row["signal"]) for row in here)
        failures += [f"{name}, {ranks} ranks: {worst:.1e}"] if not worst <= CAPTURE_BAR else []
    for dtype in DTYPES:
        worst = max(from_one_process(row) for row in rows if row["ranks"] > 1 and row["dtype"] == dtype)
        print(
            f"\nRanks against one process on the same data, {dtype}: the critical batch differs by {worst:.0e} at most."
        )
        failures += [f"ranks against one process, {dtype}: {worst:.1e}"] if not worst <= CAPTURE_BAR else []
    return {"capture": rows}, failures


# --- along a training


def training(share: float) -> tuple[dict[str, Any], list[str]]:
    print(f"\nThe exact T and |G|^2 against torch.func, one gradient per sample: {check_exact():.0e} apart.\n")
    print("| drawn | optimizer | true / B | windows | coverage | resolved | high / low | too low | too high |")
    print("|---|---|---|---|---|---|---|---|---|")
    windows, failures = [], []
    for order in ORDERS:
        of_order: list[Window] = []
        for optimizer in [*OPTIMIZERS, "both"]:
            here = of_order
            if optimizer != "both":
                seeds = range(max(2, round(SEEDS * share)))
                here = [w for seed in seeds for w in trained(optimizer, order, seed, num_windows=WINDOWS)]
                of_order += here
            found = summary_of([(each.truth, each.low, each.high) for each in here])
            ratios = [each.truth / BATCH_TRAINED for each in here]
            shown = f"{min(ratios):.2g} .. {max(ratios):.2g} | {len(here)} | {_shown(found)}"
            print(f"| {order} | {optimizer} | {shown} | {found['too_low']:.1%} | {found['too_high']:.1%} |", flush=True)
        failures += [] if _is_in(found) else [f"training, {order}: coverage {found['coverage']:.1%}"]
        windows += of_order
    return {"training": [window.to_dict() for window in windows]}, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("closed", "capture", "training"), help="by default all of them")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}")
    share = 0.1 if options.quick else 1.0
    parts: dict[str, Any] = {
        "closed": lambda: closed_form(share),
        "capture": capture,
        "training": lambda: training(share),
    }
    told: dict[str, Any] = {}
    failures: list[str] = []
    for name, part in parts.items():
        if options.part in (None, name):
            found, missed = part()
            told |= found
            failures += missed
    if options.json:
        options.json.write_text(json.dumps({**told, "failures": failures}, indent=1) + "\n")
    print("\n" + ("\n".join(failures) if failures else "Every bar is kept."))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
