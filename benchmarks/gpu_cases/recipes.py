"""How each source trained: the recipes of every family, by the id of the case."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import batchwright as bw

FAMILIES = (
    "torchvision_cnns",
    "timm_models",
    "transformers_lms",
    "hf_bert_large",
    "litgpt_config_hub",
    "litgpt_resource_tables",
    "litgpt_sharded",
    "torchtune_llama",
    "torchtitan_llama",
    "segmentation_cnns",
    "segmentation_transformers",
    "dense_detectors",
)


@dataclass(frozen=True)
class Recipe:
    """What is needed to trace a case: its workload, its size, and how the loop around it ran."""

    build: Callable[[], bw.Workload]
    micro_batch: int
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def recipes() -> dict[str, Recipe]:
    """Return the recipe of every case that has one."""
    found: dict[str, Recipe] = {}
    for name in FAMILIES:
        made: dict[str, Recipe] = import_module(f"gpu_cases.{name}").recipes()
        twice = found.keys() & made.keys()
        assert not twice, f"two recipes for {sorted(twice)}"
        found.update(made)
    return found
