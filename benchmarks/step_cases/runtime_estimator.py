"""torch's own RuntimeEstimator on published rows, beside our prediction of the same rows.

    python -m step_cases.runtime_estimator FILE [SECONDS]     from benchmarks/; FILE as in step_time.py

It asserts that CUDA is there, and reads a GPU's peak and bandwidth from the driver. Here it runs on fake tensors of the
host and is told the numbers of the row's card. So only rows whose format needs no autocast are run, one for each
workload and card, on one device, none of those set aside; as many as there is time for, in an order by a hash.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._runtime_estimation as rates
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.runtime_estimator import RuntimeEstimator

from batchwright.timing.constants import fitted_constants
from step_cases.fitting import Fitted, Sample
from step_cases.language import language_model
from step_cases.traces import Traces, groups
from step_cases.vision import classifier


def estimated(sample: Sample) -> float:
    """Return the seconds of one step by torch's estimator."""
    row, speed = sample.row, sample.speed
    vision = row.source in ("timm", "ryujaehun") or row.model.startswith("ResNet50")
    workload: Any = (classifier if vision else language_model)(row)

    def peak(dtype: torch.dtype) -> float:
        name = "fp16" if dtype == torch.float16 else row.precision
        return (speed.peaks.get(name) or speed.peaks["fp32"]) / 1e12

    with (
        contextlib.redirect_stdout(io.StringIO()),  # it prints its sums
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(rates, "get_device_tflops", peak),
        patch.object(rates, "get_gpu_dram_gbps", lambda: speed.memory_peak / 1e9),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        model = workload.model()
        optimizer = workload.optimizer(model.parameters()) if workload.optimizer is not None else None
        for _ in range(2):
            counted = RuntimeEstimator()
            with counted(estimate_mode_type="operator-level-cost-model"):
                loss = workload.loss(model, workload.batch(row.micro_batch))
                if optimizer is not None:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return counted.total_runtime / 1e3


def main() -> None:
    """Run what there is time for, and print the errors of both."""
    torch.set_num_threads(1)
    traces, most = Traces(Path(sys.argv[1])), float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
    ours = Fitted(fitted_constants(), old_host=1.7)
    chosen: dict[Any, Any] = {}
    for group in groups().values():
        for row in group:
            if row.model.startswith("SSD300"):
                continue
            plain = row.precision in ("fp32", "tf32") or row.source == "vtrain"
            if plain and row.devices == 1 and not row.is_set_aside and row.accumulation == 1:
                chosen.setdefault((row.source, row.workload, row.card, row.precision), (row, group))
    start, off, refused = time.monotonic(), [], dict[str, int]()
    for row, group in sorted(chosen.values(), key=lambda pair: zlib.crc32(pair[0].id.encode())):
        if time.monotonic() - start > most:
            break
        step = traces.step_of(row, group)
        if step is None:
            continue
        sample = Sample.of(row, step)
        try:
            theirs = estimated(sample)
        except Exception as error:
            name = f"{type(error).__name__}: {str(error).splitlines()[0][:70]}" if str(error) else type(error).__name__
            refused[name] = refused.get(name, 0) + 1
            continue
        off.append((theirs / row.seconds, ours.seconds(sample) / row.seconds))
        print(f"{row.id:24} {row.model:24} {row.card:18} theirs {off[-1][0]:.2f} ours {off[-1][1]:.2f}", flush=True)
    for number, name in enumerate(("RuntimeEstimator", "ours, all rows fitted")):
        errors = sorted(100 * abs(pair[number] - 1) for pair in off)
        if errors:
            print(f"{name}: {len(errors)} rows, median {errors[len(errors) // 2]:.1f} %, ", end="")
            print(f"p90 {errors[min(len(errors) - 1, int(0.9 * len(errors)))]:.1f} %")
    print(f"of {len(chosen)} rows; refused: {refused}")


if __name__ == "__main__":
    main()
