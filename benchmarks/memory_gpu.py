"""How exact is the peak of a step on a card that is not there? Published measurements on real GPUs, predicted.

    python benchmarks/memory_gpu.py                       all counted cases, about a quarter of an hour alone
    python benchmarks/memory_gpu.py --only xmem           cases whose id contains this
    python benchmarks/memory_gpu.py --json FILE           also write every case; with --again, take known ones from it

The cases are those of benchmarks/data/gpu_memory_cases.json, each built as a workload by benchmarks/gpu_cases; some
need torchvision and timm in a folder of their own (see gpu_cases/outside_packages.py). Every case that is left out is
listed with its reason. Constants of the simulation may come from the named third of the cases (crc32 of the id
divisible by 3); the other two thirds judge it and are reported apart. A figure that a source printed with few digits is
compared as printed. The exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_cases.case import Case, all_cases, is_calibration

from batchwright.catalogue.cards import find_card
from batchwright.device.step import DEFAULT_STEPS, StepSettings
from batchwright.memory.breakdown import break_down
from batchwright.memory.upper_bound import uncertain_bytes, upper_on_card
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import trace_workload

if TYPE_CHECKING:
    from collections.abc import Iterable

GIB = 2**30
COVERAGE = {"A": 0.6, "B": 0.4}
BARS = {"allocated": (0.005, 0.05), "reserved": (0.03, 0.08), "device": (0.02, 0.08)}


def predict(case: Case) -> dict[str, Any]:
    """Trace one case on its card as it is, near the limit too; with room to spare where it would run out of memory."""
    assert case.build is not None
    start = time.process_time()
    card = SimulatedCard(find_card(case.card))
    # A third micro-batch of a step finds what the second found, unless a case says otherwise.
    accumulation = min(case.options.get("accumulation", 1), case.options.get("distinct", 2))
    devices = case.options.get("devices", 1)
    settings = StepSettings(case.shape, accumulation, case.options.get("clip_norm"), devices=devices)
    steps = case.options.get("steps", DEFAULT_STEPS)
    torch.backends.cudnn.benchmark = bool(case.options.get("cudnn_benchmark", False))
    ran_out = False
    try:
        run = trace_workload(case.build(), case.micro_batch, settings, steps=steps, card=card)
    except torch.OutOfMemoryError:
        ran_out = True
        card = SimulatedCard(find_card(case.card), is_roomy=True)
        run = trace_workload(case.build(), case.micro_batch, settings, steps=steps, card=card)
    peaks, context = card.peak_bytes, card.context
    uncertain = uncertain_bytes(break_down(run.log).parts)
    upper = upper_on_card(peaks, context, uncertain=uncertain, unsure=card.kernels.unsure_bytes)
    assert peaks.allocated is not None
    assert peaks.reserved is not None
    # A source that measured its context is believed; else it is the catalogue's.
    held = case.options.get("context_bytes", context.typical_bytes)
    found = {"allocated": peaks.allocated, "reserved": peaks.reserved, "device": peaks.reserved + held}
    bound = {"allocated": upper.allocated, "reserved": upper.reserved, "device": upper.device}
    if "context_bytes" in case.options:
        assert upper.reserved is not None
        bound["device"] = upper.reserved + held
    return {
        **found,
        "unsure": card.kernels.unsure_bytes,
        "uncertain": uncertain,
        "upper": bound[case.kind],
        "upper_reserved": bound["reserved"],
        "ran_out": ran_out,
        "seconds": time.process_time() - start,
    }


def settle_contexts(cases: list[Case], found: dict[str, Any]) -> None:
    """Take the context of a machine that no source tells from cases on it, of the calibration third: the median.

    This is what `--calibrate` does with one measured run. The cases it comes from are not judged.
    """
    by_id = {case.id: case for case in cases}
    contexts: dict[tuple[str, ...], int] = {}
    for case in cases:
        machine = case.options.get("context_from", ())
        known = [by_id[name] for name in machine if name in by_id and "failed" not in found.get(name, {"failed": 1})]
        if known and machine not in contexts:
            assert all(map(is_calibration, known))
            held = statistics.median(one.measured_bytes - found[one.id]["reserved"] for one in known)
            contexts[machine] = max(round(held), 0)
    for case in cases:
        held = contexts.get(case.options.get("context_from", ()))
        told = found.get(case.id, {"failed": 1})
        if held is not None and "failed" not in told:
            above = told["upper_reserved"] - told["reserved"]
            told["device"], told["upper"] = told["reserved"] + held, told["reserved"] + above + held


def error_of(case: Case, told: dict[str, Any]) -> float:
    """Return the relative error, after what the source's rounding allows."""
    difference = int(told[case.kind]) - case.measured_bytes
    left = max(abs(difference) - case.resolution_bytes, 0)
    return (left if difference > 0 else -left) / case.measured_bytes


def run(cases: Iterable[Case], known: dict[str, Any], save: Path | None) -> dict[str, Any]:
    found = dict(known)
    for case in cases:
        if case.id in found and "failed" not in found[case.id]:
            continue
        try:
            found[case.id] = predict(case)
            told = f"{error_of(case, found[case.id]):+.1%}, {found[case.id]['seconds']:.1f} s"
        except Exception as error:  # a case that fails is a result too
            found[case.id] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            told = found[case.id]["failed"]
            traceback.print_exc(limit=-2, file=sys.stderr)
        print(f"{case.id}: {told}", file=sys.stderr, flush=True)
        if save is not None:
            save.write_text(json.dumps(found, indent=1))
    return found


def table(cases: list[Case], found: dict[str, Any]) -> None:
    print("\n| source | tier | kind | case | measured GiB | predicted | error % | upper / measured | third |")
    print("|---|---|---|---|---:|---:|---:|---:|---|")
    for case in cases:
        told = found.get(case.id, {})
        if "failed" in told or not told:
            print(
                f"| {case.source} | {case.tier} | {case.kind} | {case.id} | | {told.get('failed', 'not run')} | | | |"
            )
            continue
        third = "calibration" if is_calibration(case) else ""
        print(
            f"| {case.source} | {case.tier} | {case.kind} | {case.id} | {case.measured_bytes / GIB:.3f} "
            f"| {told[case.kind] / GIB:.3f} | {100 * error_of(case, told):+.1f} "
            f"| {told['upper'] / case.measured_bytes:.3f} | {third} |"
        )


def summary(name: str, cases: list[Case], found: dict[str, Any]) -> bool:
    """Print one line per kind, and say whether its bar is kept."""
    kept = True
    for kind, (median_bar, most_bar) in BARS.items():
        some = [case for case in cases if case.kind == kind and "failed" not in found.get(case.id, {"failed": 1})]
        if not some:
            continue
        errors = [abs(error_of(case, found[case.id])) for case in some]
        median, within = statistics.median(errors), sum(error <= most_bar for error in errors) / len(errors)
        bounds = [found[case.id]["upper"] / case.measured_bytes for case in some]
        least = (case.measured_bytes - case.resolution_bytes for case in some)
        below = sum(found[case.id]["upper"] < least_it_was for case, least_it_was in zip(some, least, strict=True))
        below, height = below / len(some), statistics.median(bounds)
        good = median <= median_bar and within >= 0.9 and below < 0.02 and height <= 1.10
        kept &= good
        print(
            f"| {name} | {kind} | {len(some)} | {median:.1%} | {within:.0%} within {most_bar:.0%} | {max(errors):.1%} "
            f"| {below:.0%} | {height:.3f} | {'yes' if good else 'no'} |"
        )
    return kept


def conv_nets(name: str, cases: list[Case], found: dict[str, Any]) -> None:
    """Print how far off convolutional classifiers are, beside what xMem's authors estimated for the same."""
    done = [case for case in cases if "failed" not in found.get(case.id, {"failed": 1})]
    if not done:
        return
    ours = statistics.median(abs(error_of(case, found[case.id])) for case in done)
    beside = [case for case in done if "xmem" in case.peers]
    print(f"\nConv nets, {name}: {len(done)}, median error {ours:.1%}.", end="")
    if beside:
        theirs = statistics.median(
            abs(case.peers["xmem"] - case.measured_bytes) / case.measured_bytes for case in beside
        )
        same = statistics.median(abs(error_of(case, found[case.id])) for case in beside)
        print(f" On {len(beside)} with xMem's own estimate: xMem {theirs:.1%}, ours {same:.1%}.")


def peers(cases: list[Case], found: dict[str, Any]) -> None:
    by_peer: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases:
        if "failed" in found.get(case.id, {"failed": 1}):
            continue
        for peer, num_bytes in case.peers.items():
            theirs = abs(num_bytes - case.measured_bytes) / case.measured_bytes
            by_peer[peer].append((theirs, abs(error_of(case, found[case.id]))))
    print("\n| peer | cases | its median error | ours on the same |")
    print("|---|---:|---:|---:|")
    for peer, pairs in by_peer.items():
        theirs, ours = (statistics.median(errors) for errors in zip(*pairs, strict=True))
        print(f"| {peer} | {len(pairs)} | {theirs:.1%} | {ours:.1%} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose id contains this")
    parser.add_argument("--json", type=Path, help="write every case to a file")
    parser.add_argument("--again", action="store_true", help="take known cases from that file")
    parser.add_argument("--calibration", action="store_true", help="only the third from which constants may be taken")
    options = parser.parse_args()
    every = all_cases()
    counted = [case for case in every if case.excluded is None and options.only in case.id]
    if options.calibration:
        counted = [case for case in counted if is_calibration(case)]
    known = json.loads(options.json.read_text()) if options.again and options.json and options.json.exists() else {}
    found = run(counted, known, options.json)
    settle_contexts(counted, found)
    table(counted, found)
    print("\n| cases | kind | number | median error | | largest | upper below truth | upper, median | bar kept |")
    print("|---|---|---:|---:|---|---:|---:|---:|---|")
    judged = [case for case in counted if case.tier in "AB"]
    summary("tiers A and B, calibration third", [case for case in judged if is_calibration(case)], found)
    kept = summary("tiers A and B, the other two thirds", [c for c in judged if not is_calibration(c)], found)
    for source in dict.fromkeys(case.source for case in judged):
        summary(source, [case for case in judged if case.source == source], found)
    for name, is_judged in (("calibration third", False), ("the other two thirds", True)):
        nets = [c for c in judged if c.options.get("is_conv_net") and is_calibration(c) != is_judged]
        conv_nets(name, nets, found)
    peers(judged, found)
    failed = [case.id for case in judged if "failed" in found.get(case.id, {"failed": 1})]
    if failed:
        print(f"\nFailed, and so a miss: {', '.join(failed)}")
    covered = True
    if not options.only and not options.calibration:
        left_out(every)
        covered = is_covered(every)
    return 0 if kept and covered and not failed else 1


def left_out(every: list[Case]) -> None:
    """Print every case that is left out, by its reason."""
    print("\nLeft out:")
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in every:
        if case.excluded:
            by_reason[case.tier, case.excluded].append(case.id)
    for (tier, reason), names in sorted(by_reason.items()):
        print(f"- {len(names)} of tier {tier}: {reason}: {', '.join(names)}")


def is_covered(every: list[Case]) -> bool:
    """Say how many of each tier are counted, and whether that is enough."""
    shares = {}
    for tier in COVERAGE:
        there = [case for case in every if case.tier == tier]
        counted = sum(case.excluded is None for case in there)
        shares[tier] = counted / len(there)
        print(f"\nTier {tier}: {counted} of {len(there)} counted, {shares[tier]:.0%} (at least {COVERAGE[tier]:.0%}).")
    return all(shares[tier] >= least for tier, least in COVERAGE.items())


if __name__ == "__main__":
    raise SystemExit(main())
