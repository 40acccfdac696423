"""List the published cases, and how a CPU's trace of each compares: `cd benchmarks && python -m gpu_cases`.

The trace is of a CPU, so it is no prediction: no context, no allocator, no workspaces of cuDNN and cuBLAS. It shows a
workload that is not the source's at once, as a factor. Cases under autocast are traced as they are on a CPU, where
`torch.autocast("cuda")` does nothing, so they read too high.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter, defaultdict

import batchwright as bw
from gpu_cases.case import Case, all_cases, is_calibration

_GIB = 2**30


def main() -> None:
    """Print the table of cases and the exclusions."""
    parser = argparse.ArgumentParser(prog="gpu_cases", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="only the cases whose id matches this expression")
    parser.add_argument("--list", action="store_true", help="list without tracing")
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if re.search(arguments.pattern, case.id)]
    print(f"{'case':58} tier kind      measured   traced  ratio   weights     seconds")
    for case in cases:
        if case.build is not None:
            print(f"{case.id:58} {case.tier:4} {case.kind:9} {case.measured_bytes / _GIB:8.3f} ", end="", flush=True)
            print("" if arguments.list else _traced(case), flush=True)
    _print_counts(cases)


def _traced(case: Case) -> str:
    assert case.build is not None
    start = time.perf_counter()
    known = {name: case.options[name] for name in ("accumulation", "clip_norm", "steps") if name in case.options}
    # Two passes show what many do: the second adds to gradients that are there.
    known["accumulation"] = min(known.get("accumulation", 1), 2)
    known.pop("steps", None)
    try:
        workload = case.build()
        estimate = bw.estimate(workload, micro_batch=case.micro_batch, shape=case.shape, on="cpu", **known)
    except Exception as error:
        return f"  failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    peak = estimate.peak_bytes.allocated
    assert peak is not None
    seconds = time.perf_counter() - start
    return f"{peak / _GIB:8.3f}  {peak / case.measured_bytes:5.3f}  {_weights(estimate):8.2f} GiB  {seconds:6.1f}"


def _weights(estimate: bw.Estimate) -> float:
    return (estimate.parts["weights"] or 0) / _GIB


def _print_counts(cases: list[Case]) -> None:
    print()
    for tier in "ABC":
        of_tier = [case for case in cases if case.tier == tier]
        built = [case for case in of_tier if case.build is not None]
        calibration = sum(map(is_calibration, built))
        print(f"tier {tier}: {len(built)} of {len(of_tier)} have a workload, {calibration} of them for calibration")
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        if case.excluded is not None:
            reasons[case.excluded][case.tier] += 1
    print("\nleft out:")
    for reason, tiers in sorted(reasons.items(), key=lambda pair: -sum(pair[1].values())):
        counts = ", ".join(f"{count} {tier}" for tier, count in sorted(tiers.items()))
        print(f"  {counts}: {reason}")


if __name__ == "__main__":
    main()
