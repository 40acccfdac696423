"""What a request becomes: its rounded size, and the segment that is asked of the card where nothing cached fits.

Facts of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright.simulated.allocator_settings import AllocatorSettings

SMALLEST_BLOCK = 512
LARGEST_SMALL = 1024 * 1024
"""The largest rounded size that the small pool serves."""
SMALL_SEGMENT = 2 * 1024 * 1024
GRANULE = 2 * 1024 * 1024
"""What the card is handed out in, and what large segments are rounded to."""
OWN_SEGMENT = 10 * 1024 * 1024
"""From this size on a block gets a segment of its own size."""
LARGEST_REQUEST = 1 << 60
"""PyTorch refuses this many bytes before it looks at anything."""


def rounded_size(size: int, settings: AllocatorSettings) -> int:
    """Return the bytes of the block that a request takes.

    >>> from batchwright.simulated.allocator_settings import AllocatorSettings
    >>> rounded_size(1, AllocatorSettings()), rounded_size(513, AllocatorSettings())
    (512, 1024)
    >>> rounded_size(1200 * 1024, AllocatorSettings(roundup_power2_divisions=4)) // 1024
    1280
    """
    if settings.roundup_power2_divisions:
        divisions = settings.divisions_of(size)
        if divisions > 1 and size > SMALLEST_BLOCK * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
    return max(-(-size // SMALLEST_BLOCK), 1) * SMALLEST_BLOCK


def segment_size(rounded: int, settings: AllocatorSettings) -> int:
    """Return the bytes that cudaMalloc is asked for.

    >>> from batchwright.simulated.allocator_settings import AllocatorSettings
    >>> [segment_size(mib << 20, AllocatorSettings()) >> 20 for mib in (1, 2, 9, 10, 11)]
    [2, 20, 20, 10, 12]
    """
    if rounded <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if rounded < OWN_SEGMENT:
        return settings.large_segment_size
    return whole_granules(rounded)


def whole_granules(size: int) -> int:
    """Round up to what the card hands out.

    >>> whole_granules(11 << 20) >> 20
    12
    """
    return -(-size // GRANULE) * GRANULE
