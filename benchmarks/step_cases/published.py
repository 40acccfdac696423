"""The published rows: which can be built, which are set aside, and why the others are left out.

Promises:
- every row of data/throughput_cases.json.gz is either built or has a reason why not;
- the tenth of the workloads that is set aside is chosen by a hash of the workload's name, before anything is fitted.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data" / "throughput_cases.json.gz"

# Of timm's 900 rows, all of one card, this share of its models: the others would only weigh it more.
_SHARE_OF_TIMM = 0.08
# With other hosts in between, or more than one of them: nothing of that kind is simulated.
_PARALLEL = {"none", "DDP", "FSDP FULL_SHARD"}
_SILENT = {
    "Mask R-CNN R50 FPN": "its image sizes and its numbers of boxes vary, and are not published",
    "switchxl4": "its routing of experts is not published",
}


@dataclass(frozen=True)
class Row:
    """One published step time, and the workload that it is of."""

    id: str
    source: str
    card: str
    model: str
    precision: str
    layout: str
    length: int
    micro_batch: int
    accumulation: int
    devices: int
    checkpointing: bool
    trains: bool
    settings: str
    """What else decides the workload: FSDP's mixed precision, or the framework's age."""
    seconds: float

    @property
    def workload(self) -> str:
        """The workload, whatever its size and card."""
        return f"{self.source}:{self.model}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What a trace depends on, besides the micro-batch and the card's generation."""
        # What replicas send does not depend on how many they are; on one device it is left out.
        spread = self.devices if "FSDP" in self.settings else 2
        settings = self.settings if "FSDP" in self.settings else ""
        return (
            *(self.source, self.model, self.precision, self.layout, self.length, spread),
            *(self.checkpointing, self.trains, settings),
        )

    @property
    def is_set_aside(self) -> bool:
        """Whether this row judges once, at the end."""
        return zlib.crc32(self.workload.encode()) % 10 == 0

    @property
    def is_old(self) -> bool:
        """Whether it was run with torch 1.0 to 1.7."""
        return self.source == "ryujaehun" or (self.source == "lambda" and "v0" in self.settings)


@cache
def published() -> tuple[dict[str, Any], ...]:
    """Return every published row, as it was collected."""
    return tuple(json.loads(gzip.decompress(DATA.read_bytes()))["cases"])


def rows() -> tuple[Row, ...]:
    """Return the rows that can be built."""
    return tuple(row for row, _ in _sorted() if row is not None)


def left_out() -> dict[str, int]:
    """Return the reasons why rows are left out, with how many each."""
    counts: dict[str, int] = {}
    for _, reason in _sorted():
        if reason:
            counts[reason] = counts.get(reason, 0) + 1
    return counts


@cache
def _sorted() -> tuple[tuple[Row | None, str], ...]:
    return tuple(_sort_all())


def _sort_all() -> Iterator[tuple[Row | None, str]]:
    for case in published():
        reason = _reason_against(case)
        yield (None, reason) if reason else (_row(case), "")


def _reason_against(case: dict[str, Any]) -> str:
    source, model = case["source"], case["model"]
    if source in ("detectron2", "litgpt", "torchtune"):
        return f"{source}: sizes or lengths are not published, or compiled"
    if model in _SILENT:
        return f"{model}: {_SILENT[model]}"
    if case["compiled"]:
        return "compiled: its fused kernels are not simulated here"
    if source == "vtrain" and not re.fullmatch(r"TP1 DP\d+ PP1 \(1F1B\)", case["parallelism"]):
        return "vtrain: tensor or pipeline parallel"
    if source != "vtrain" and case["parallelism"] not in _PARALLEL:
        return f"{source}: {re.sub('[0-9_]+', '', case['parallelism'])}, which is not simulated"
    if source == "llm-foundry" and case["num_devices"] > 8:
        return "llm-foundry: more than one node"
    if not case["micro_batch"] or not case["step_seconds"]:
        return f"{source}: no micro-batch or no step time"
    if source == "timm" and zlib.crc32(model.encode()[::-1]) % 100 >= 100 * _SHARE_OF_TIMM:
        return "timm: eleven of twelve models of this one card"
    if source == "llm-foundry" and zlib.crc32(case["id"].encode()) % 2:
        return "llm-foundry: one of two rows, as each takes a trace of its own"
    return ""


def _row(case: dict[str, Any]) -> Row:
    source, notes = case["source"], case["notes"]
    length = int(re.search(r"\d+", case["shape"])[0])  # type: ignore[index]
    settings = ""
    if source == "lambda":
        settings = "v0" if case["framework"].startswith("v0") else "v1"
    elif source == "llm-foundry":
        settings = f"FSDP {notes.rpartition(' ')[2]}"
    layout = "nhwc" if source == "timm" and notes.startswith("nhwc") else "nchw"
    return Row(
        case["id"],
        source,
        case["card"],
        case["model"].removeprefix("torchvision "),
        case["precision"].split(" ")[0].removeprefix("amp-") if source == "ryujaehun" else case["precision"],
        layout,
        length,
        case["micro_batch"],
        case["accumulation"] or 1,
        case["num_devices"],
        bool(case["checkpointing"]),
        not (source == "neusight" and "inference" in case["optimizer"]),
        settings,
        case["step_seconds"],
    )
