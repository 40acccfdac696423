"""What TensorBoard itself reads in the files of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pathlib import Path


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The values of every scalar, by step."""
    read = EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def texts(folder: Path) -> dict[str, list[str]]:
    """The texts, by the name they were written under."""
    read = EventAccumulator(str(folder)).Reload()
    return {
        tag.removesuffix("/text_summary"): [event.tensor_proto.string_val[0].decode() for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }
