"""The kinds of peak, apart from everything that needs torch: formulas speak of them too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeakBytes:
    """The three ways to read a peak: handed out, taken from the driver, and what the device itself shows."""

    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
