"""What the peaks of a simulated card stay below, by kind, from what is uncertain about each.

Weights, gradients, optimizer states and batches are known to the byte. Not known are what kernels keep and hold
(activations and temporaries), which kernels cuDNN chooses, how the allocator's segments fall, the machine's context.
Each adds its own margin, so a step that is mostly weights has a close bound and a convolution net a wide one.

Promises:
- a margin is worked out from the calibration third of benchmarks/memory_gpu.py and judged by the other two thirds;
- the bound of a kind is never below the bound of the kind before: allocated, reserved, device;
- where nothing is known of a part (an operator that hides memory, a formula) there is no bound, and it is said so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchwright.catalogue.cards import Context

# Of what kernels keep and hold. In the calibration third (measured - predicted) spreads by 3.6 % of these bytes, 7.3 %
# at most; the share is the largest at which the median bound of every kind stays below 1.10 there: four spreads, as the
# tails are heavy.
_OF_KERNELS = 0.14
# Of what the allocator has reserved, at least: segments that fall otherwise, and what is reserved before the step. The
# largest of the calibration third's reserved figures.
_OF_SEGMENTS = 0.075

_KERNELS = ("activations", "temporaries")


def uncertain_bytes(parts: Mapping[str, int]) -> int:
    """Return how many bytes of a peak kernels decide.

    >>> uncertain_bytes({"weights": 100, "activations": 40, "temporaries": 5})
    45
    """
    return sum(parts.get(part, 0) for part in _KERNELS)


def upper_on_card(peaks: PeakBytes, context: Context, *, uncertain: int, unsure: int = 0) -> PeakBytes:
    """Return what each peak stays below.

    `uncertain` is what kernels decide of the peak, `unsure` by how much it would be higher if every convolution held
    the most that it may.
    """
    allocated, reserved = peaks.of_allocator
    above = max(round(uncertain * _OF_KERNELS), unsure)
    upper = reserved + max(above, round(reserved * _OF_SEGMENTS))
    return PeakBytes(allocated + above, upper, upper + context.high_bytes)
