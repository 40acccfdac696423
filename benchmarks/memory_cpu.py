"""The memory of a step, predicted without running it, against what the allocator really gave out.

    python benchmarks/memory_cpu.py             every case; some minutes
    python benchmarks/memory_cpu.py LSTM U-Net  the cases whose name contains one of these
    python benchmarks/memory_cpu.py --fan-in    networks in which gradients of one tensor meet; a minute
    python benchmarks/memory_cpu.py --large     time against running at 8 GiB; 4B and 8B models, time and memory

The real peak is the largest sum of the profiler's memory events over the same two steps, from before the model is
built. `MemTracker` of torch.distributed._tools is given the very same step, with fake parameters made by us, because
most models cannot be built under its FakeTensorMode. Seconds are CPU seconds; those of running leave out building the
model, those of predicting do not. Bars: median error 0.1 %, worst 1 %; at 8 GiB predicting at least 20 times faster
than running; 4B and 8B models in 60 CPU seconds and 4 GB.
"""

from __future__ import annotations

import os

# Threads that spin while they wait would count as CPU time of the real run, in our favour.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import statistics
import warnings

from memory_cases import Case, all_cases, hf
from memory_fan_in import fan_in_cases
from memory_large import compare_at_8_gib, predict_billions
from memory_measure import measure, predict, print_head, print_row


def compare(every: list[Case], names: list[str]) -> None:
    cases = [case for case in every if not names or any(name in case.name for name in names)]
    predict(cases[0])  # what torch imports when it first traces is no part of a case
    print_head()
    errors = []
    for case in cases:
        row = measure(case)
        errors.append(abs(row.error_percent))
        print_row(row)
    print(f"\n{len(errors)} cases: median error {statistics.median(errors):.4f} %, worst {max(errors):.3f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run only the cases whose name contains one of these")
    parser.add_argument("--fan-in", action="store_true", help="networks in which gradients meet instead")
    parser.add_argument("--large", action="store_true", help="the large models instead")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    if chosen.large:
        predict_billions()
        compare_at_8_gib()
    else:
        compare(fan_in_cases() if chosen.fan_in else all_cases(), chosen.names)


if __name__ == "__main__":
    main()
