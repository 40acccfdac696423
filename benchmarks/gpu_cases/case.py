"""A published measurement, and the workload that stands for it.

Promises:
- each of the published cases is there once: with a workload, or with the reason why it has none;
- `measured_bytes` is in bytes whatever the source printed, and `resolution_bytes` is half of its last digit;
- nothing is built, and neither transformers nor torchvision imported, before a case's `build` is called.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_cases.exclusions import reason_to_exclude
from gpu_cases.recipes import recipes

if TYPE_CHECKING:
    from collections.abc import Callable

    import batchwright as bw

DATA = Path(__file__).parent.parent / "data" / "gpu_memory_cases.json"

_GIB = 2**30
_MIB = 2**20

# The first that is found in what a source says of its cards; sizes as the makers call them.
_CARDS = (
    ("RTX 3060", "rtx-3060-12gb"),
    ("RTX 4060", "rtx-4060-8gb"),
    ("RTX 4070 Ti SUPER", "rtx-4070-ti-super-16gb"),
    ("RTX 4090", "rtx-4090-24gb"),
    ("A10G", "a10g-24gb"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("A100 SXM4 40GB", "a100-40gb"),
    ("A100 40GB", "a100-40gb"),
    # DGX and the unnamed ones: what they hold (40 to 66 GiB) needs the larger card.
    ("A100", "a100-80gb"),
    ("A6000", "a6000-48gb"),
    ("V100-SXM2-16GB", "v100-16gb"),
    # MMSegmentation and detectron2 name no size; one case holds 18.4 GB, so the larger.
    ("V100", "v100-32gb"),
    ("MMDetection", "v100-32gb"),
    ("L40S", "l40s-48gb"),
    ("H100 96GB", "h100-96gb"),
    ("H100", "h100-80gb"),
    ("H200", "h200-141gb"),
    ("MI300X", "mi300x-192gb"),
    ("B200", "b200-180gb"),
    ("24 GB class", "rtx-4090-24gb"),
    # One case, of a model that is only built: any card.
    ("single GPU", "rtx-4090-24gb"),
)

_SOURCES = (
    ("xmem-", "xMem"),
    ("hf-bertlarge", "Hugging Face guide"),
    ("titan-", "torchtitan"),
    ("ao-", "torchao"),
    ("tune-", "torchtune"),
    ("litgpt-", "litgpt"),
    ("peft-", "PEFT"),
    ("megatron-", "Megatron-LM"),
    ("gpumemnet-", "GPUMemNet"),
    ("mmseg-", "MMSegmentation"),
    ("mmdet-", "MMDetection"),
    ("d2-", "detectron2"),
)


@dataclass(frozen=True)
class Case:
    """One published peak: what was measured, on which card, and how to build the step that was measured.

    `kind` is what the figure counts: "allocated" (tensors), "reserved" (what the caching allocator holds) or "device"
    (what the driver reports; `options["device_holds"]` says whether the context is in it). `options` are those of the
    run: accumulation, clip_norm, steps, and what is doubtful about it under "doubt". `peers` are the estimates that
    the source published beside its measurement.
    """

    id: str
    source: str
    tier: str
    card: str
    kind: str
    measured_bytes: int
    resolution_bytes: int
    micro_batch: int
    shape: dict[str, Any]
    build: Callable[[], bw.Workload] | None
    options: dict[str, Any] = field(default_factory=dict)
    excluded: str | None = None
    peers: dict[str, int] = field(default_factory=dict)


def all_cases() -> list[Case]:
    """Return every published case, in the order of the file."""
    known = recipes()
    published = json.loads(DATA.read_text(encoding="utf-8"))
    unknown = set(known) - {row["id"] for row in published}
    assert not unknown, f"recipes for cases that are not in the file: {sorted(unknown)}"
    return [_case(row, known.get(row["id"])) for row in published]


def is_calibration(case: Case) -> bool:
    """Whether constants may be taken from this case; the other two thirds judge them."""
    return zlib.crc32(case.id.encode()) % 3 == 0


def _case(row: dict[str, Any], recipe: Any) -> Case:
    measured, resolution = _measured(row)
    reason = None if recipe is not None else reason_to_exclude(row)
    assert recipe is not None or reason, f"{row['id']} has neither a recipe nor a reason to have none"
    options = {} if recipe is None else dict(recipe.options)
    return Case(
        id=row["id"],
        source=next(name for start, name in _SOURCES if row["id"].startswith(start)),
        tier=row["tier"],
        card=next(card for text, card in _CARDS if text in row["gpu"]),
        kind=options.pop("kind", None) or _kind(row["metric"]),
        measured_bytes=measured,
        resolution_bytes=resolution,
        micro_batch=row["batch"] or 0 if recipe is None else recipe.micro_batch,
        shape={} if recipe is None else dict(recipe.shape),
        build=None if recipe is None else recipe.build,
        options=options,
        excluded=reason,
        peers={name: round(gib * _GIB) for name, gib in row.get("peer_estimates_gib", {}).items()},
    )


def _kind(metric: str) -> str:
    if "NVML" in metric or "nvidia-smi" in metric:
        return "device"
    # "active" counts blocks that wait for another stream too; on one stream that is what is allocated.
    return "reserved" if "reserved" in metric and "max_memory_allocated" not in metric else "allocated"


def _measured(row: dict[str, Any]) -> tuple[int, int]:
    """Return the figure and half of its last printed digit, both in bytes."""
    metric = row["metric"]
    if found := re.search(r"exact bytes (\d+)", metric):
        return int(found[1]), 0
    if found := re.search(r"printed ([\d.]+) GB.*(?:1e9)", metric):
        # litgpt prints two decimals always, so its 13.5 is 13.50.
        decimals = 2 if row["id"].startswith("litgpt") else len(found[1].partition(".")[2])
        return round(float(found[1]) * 1e9), round(0.5 * 10**-decimals * 1e9)
    if found := re.search(r"(\d+) MiB", metric):
        return int(found[1]) * _MIB, _MIB // 2
    printed = row["measured_gib"]
    decimals = len(repr(printed).partition(".")[2])
    # torchao's ViT script prints bytes / 1e9 (benchmarks/benchmark_low_bit_adam.py, last line).
    unit = 10**9 if row["id"].startswith("ao-vit") else _GIB
    return round(printed * unit), round(0.5 * 10**-decimals * unit)
