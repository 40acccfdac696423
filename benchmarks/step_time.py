"""How exact are seconds per step on a card that is not there? Published step times of real GPUs, predicted.

    python benchmarks/step_time.py --traces FILE           judge: every cell by constants that saw neither its source
                                                           nor its family of cards; then those set aside
    python benchmarks/step_time.py --traces FILE --fit     fit all rows but those set aside, write the constants
    python benchmarks/step_time.py --traces FILE --json F  also write every row
    python benchmarks/step_time.py --traces FILE --written fit nothing: by the constants that are written, how efficient
                                                           more devices are, and how exact a step is once another
                                                           size was measured (rows set aside are left out)

FILE keeps the traces (step_cases/traces.py makes what is missing; torchvision and timm as in
gpu_cases/outside_packages.py). The rows are those of data/throughput_cases.json.gz, built by benchmarks/step_cases;
what is left out is listed with its reason. A tenth of the workloads was set aside by a hash before anything was fitted,
and judges once. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step_cases.baselines import fit_coarse, fixed_utilization, roofline
from step_cases.fitting import Fit, Fitted, Sample, by_cell
from step_cases.published import left_out
from step_cases.traces import Traces, groups

from batchwright.timing.constants import Constants, fitted_constants

CONSTANTS = Path(__file__).parents[1] / "src" / "batchwright" / "timing" / "constants.json"
BARS = {"median": 14.0, "p90 plain": 35.0, "p90 all": 50.0, "inside": 85.0}
_MIDDLE = 0.90


def load(traces: Traces) -> tuple[list[Sample], dict[str, int]]:
    """Return the rows that were traced, and how many were not, by reason."""
    samples: list[Sample] = []
    failed: dict[str, int] = defaultdict(int)
    for group in groups().values():
        for row in group:
            step = traces.step_of(row, group)
            if step is None:
                failed[f"{row.source}: could not be traced"] += 1
            else:
                samples.append(Sample.of(row, step))
    return samples, dict(failed)


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else math.nan


def describe(label: str, samples: Sequence[Sample], seconds: Callable[[Sample], float]) -> dict[str, float]:
    """Print the errors of a way to predict, and return them."""
    errors = [100 * abs(seconds(s) / s.row.seconds - 1) for s in samples]
    bias = 100 * (quantile([seconds(s) / s.row.seconds for s in samples], 0.5) - 1)
    median, p90 = quantile(errors, 0.5), quantile(errors, 0.9)
    print(f"  {label:<46} {len(samples):5}  median {median:5.1f}  p90 {p90:6.1f}  bias {bias:+6.1f}")
    return {"median": median, "p90": p90, "bias": bias}


def cross_fit(samples: Sequence[Sample], prior: Constants) -> dict[str, Fitted]:
    """Return for each row the constants of a fit that saw neither its source nor its family of cards."""
    fits: dict[str, Fitted] = {}
    for (source, family), cell in sorted(by_cell(samples).items()):
        training = [s for s in samples if s.row.source != source and s.speed.family != family]
        start = time.process_time()
        fitted = Fit(training, prior).run()
        fits.update((s.row.id, fitted) for s in cell)
        print(
            f"  {source} on {family}: {len(cell)} rows by {len(training)} others, {time.process_time() - start:.0f} s",
            file=sys.stderr,
        )
    return fits


def cross_coarse(samples: Sequence[Sample]) -> dict[str, float]:
    """Predict each row by coarse counts that saw neither its source nor its family."""
    seconds: dict[str, float] = {}
    for (source, family), cell in by_cell(samples).items():
        predict = fit_coarse([s for s in samples if s.row.source != source and s.speed.family != family])
        seconds.update((s.row.id, predict(s)) for s in cell)
    return seconds


def intervals_of(samples: Sequence[Sample], fits: dict[str, Fitted]) -> dict[str, tuple[float, float]]:
    """Return true over predicted, the middle of it, for steps that are flagged and for others."""
    ratios: dict[str, list[float]] = {"plain": [], "hard": []}
    for sample in samples:
        predicted = fits[sample.row.id].time(sample)
        ratios["hard" if predicted.unsure else "plain"].append(sample.row.seconds / predicted.seconds)
    edge = (1 - _MIDDLE) / 2
    return {name: (quantile(values, edge), quantile(values, 1 - edge)) for name, values in ratios.items()}


def judge(title: str, samples: Sequence[Sample], fits: dict[str, Fitted]) -> dict[str, float]:
    """Print how exact predictions are, and how often the interval holds; return what the bars are about."""
    times = {s.row.id: fits[s.row.id].time(s) for s in samples}
    predicted = {s.row.id: times[s.row.id].seconds for s in samples}
    plain = [s for s in samples if not times[s.row.id].unsure]
    print(f"\n{title}")
    found = {"median": 0.0}
    of_all = describe("every row", samples, lambda s: predicted[s.row.id])
    of_plain = describe(f"not flagged ({1 - len(plain) / len(samples):.0%} are)", plain, lambda s: predicted[s.row.id])
    found.update({"median": of_all["median"], "p90 all": of_all["p90"], "p90 plain": of_plain["p90"]})
    for kind in ("source", "family"):
        cells: dict[str, list[Sample]] = defaultdict(list)
        for s in samples:
            cells[s.row.source if kind == "source" else s.speed.family].append(s)
        for value, chosen in sorted(cells.items()):
            describe(f"{kind} {value}", chosen, lambda s: predicted[s.row.id])
    inside = [times[s.row.id].low <= s.row.seconds <= times[s.row.id].high for s in samples]
    found["inside"] = 100 * sum(inside) / len(inside)
    print(f"  inside the interval: {found['inside']:.1f} %")
    return found


def judge_scaling(samples: Sequence[Sample], predict: Callable[[Sample], float]) -> None:
    """Print how far predicted scaling efficiencies are off: samples per second and device, over those of one device."""
    sweeps: dict[tuple[Any, ...], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for s in samples:
        if s.row.source == "lambda":
            sweep = sweeps[s.row.workload, s.row.card, s.row.precision, s.row.settings, s.row.micro_batch]
            sweep[s.row.devices].append((1 / s.row.seconds, 1 / predict(s)))
    off = []
    for sweep in sweeps.values():
        if 1 in sweep:
            true, predicted = (sum(pair[n] for pair in sweep[1]) / len(sweep[1]) for n in (0, 1))
            others = [pair for devices, pairs in sweep.items() if devices > 1 for pair in pairs]
            off += [100 * abs(p / predicted - t / true) for t, p in others]
    near = sum(points <= 10 for points in off) / max(len(off), 1)
    print(f"\nscaling on one node (lambda): {len(off)} points, median {quantile(off, 0.5):.1f} points off, ", end="")
    print(f"{near:.1%} within 10")


def judge_one_step(samples: Sequence[Sample], predict: Callable[[Sample], float]) -> None:
    """Print how exact steps are after one of another size, of the same workload on the same card, was measured."""
    alike: dict[tuple[Any, ...], list[Sample]] = defaultdict(list)
    for s in samples:
        row = s.row
        alike[row.source, row.workload, row.card, row.precision, row.layout, row.settings, row.devices].append(s)
    before, after = [], []
    for group in alike.values():
        for given in group:
            factor = given.row.seconds / predict(given)
            others = [s for s in group if s.row.micro_batch != given.row.micro_batch]
            before += [s.row.seconds / predict(s) for s in others]
            after += [s.row.seconds / predict(s) / factor for s in others]
    print(f"\none measured step sets the others right: {len(after)} pairs of sizes")
    for label, ratios in (("before", before), ("after", after)):
        off = [100 * abs(1 / ratio - 1) for ratio in ratios]
        ends = ", ".join(f"{quantile(ratios, share):.2f}" for share in (0.05, 0.95))
        print(f"  {label:<46} median {quantile(off, 0.5):5.1f}  p90 {quantile(off, 0.9):6.1f}  true / predicted {ends}")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--aside", action="store_true", help="also judge what was set aside")
    parser.add_argument("--written", action="store_true", help="fit nothing: scaling and one measured step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    traces = Traces(options.traces)
    traces.fill()
    everything, failed = load(traces)
    samples = [s for s in everything if not s.row.is_set_aside]
    aside = [s for s in everything if s.row.is_set_aside]
    print(f"{len(everything)} rows, {len({s.row.workload for s in everything})} workloads, ", end="")
    print(f"{len({s.row.card for s in everything})} cards, {len({s.row.source for s in everything})} sources; ", end="")
    print(f"{len(aside)} rows of {len({s.row.workload for s in aside})} workloads are set aside")
    for reason, count in sorted({**left_out(), **failed}.items(), key=lambda item: -item[1]):
        print(f"  left out {count:4}  {reason}")

    prior = fitted_constants()
    if options.written:
        # What the fit found for hosts and libraries of 2018 to 2020.
        written = Fitted(prior, old_host=1.7)
        judge_scaling(samples, written.seconds)
        judge_one_step(samples, written.seconds)
        return 0
    fits = cross_fit(samples, prior)
    intervals = intervals_of(samples, fits)
    fits = {name: replace(f, constants=replace(f.constants, intervals=intervals)) for name, f in fits.items()}
    found = judge("neither the source nor the family of cards was seen", samples, fits)
    print("\nthe same rows, by other means")
    describe("roofline at peak", samples, roofline)
    describe("utilization of 40 %", samples, fixed_utilization)
    coarse = cross_coarse(samples)
    describe("coarse counts, neither seen", samples, lambda s: coarse[s.row.id])
    fitted = Fit(samples, prior)
    final = fitted.run()
    print(f"\nformulas of fit and answer differ by at most {fitted.check(final):.1e}")
    final = replace(final, constants=replace(final.constants, intervals=intervals))
    describe("all rows, in sample", samples, final.seconds)
    judge_scaling(everything, final.seconds)
    if options.fit:
        write_constants(final)
    if options.aside:
        by_final = {s.row.id: final for s in aside}
        found_aside = judge("set aside: workloads that no fit saw", aside, by_final)
        found.update(inside=min(found["inside"], found_aside["inside"]))
        for label, way in (("roofline at peak", roofline), ("utilization of 40 %", fixed_utilization)):
            describe(label, aside, way)
        describe("coarse counts", aside, fit_coarse(samples))
    if options.json:
        options.json.write_text(json.dumps([_as_dict(s, fits.get(s.row.id, final)) for s in everything], indent=1))
    missed = [
        f"{name} is {found[name]:.1f}, the bar {bar}"
        for name, bar in BARS.items()
        if (found[name] < bar if name == "inside" else found[name] > bar)
    ]
    print("\n" + ("; ".join(missed) or "every bar is met"))
    return int(bool(missed))


def write_constants(fitted: Fitted) -> None:
    """Write constants where answers read them."""
    old = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    new = fitted.constants.to_dict()

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(entry) for key, entry in value.items()}
        return [short(entry) for entry in value] if isinstance(value, list) else float(f"{value:.3g}")

    lines = [f'  "about": {json.dumps(old["about"])}', *(f'  "{k}": {json.dumps(short(v))}' for k, v in new.items())]
    CONSTANTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"old software: device {fitted.old_device:.2f}, host {fitted.old_host:.2f}")


def _as_dict(sample: Sample, fitted: Fitted) -> dict[str, Any]:
    predicted = fitted.time(sample)
    return {
        "id": sample.row.id,
        "workload": sample.row.workload,
        "card": sample.row.card,
        "precision": sample.row.precision,
        "micro_batch": sample.row.micro_batch,
        "devices": sample.row.devices,
        "set_aside": sample.row.is_set_aside,
        "measured_seconds": sample.row.seconds,
        "predicted_seconds": predicted.seconds,
        "low": predicted.low,
        "high": predicted.high,
        "host_share": predicted.host_seconds / (predicted.host_seconds + predicted.device_seconds),
        "waiting_seconds": predicted.waiting_seconds,
        "unsure": list(predicted.unsure),
    }


if __name__ == "__main__":
    sys.exit(main())
