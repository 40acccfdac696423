"""The settings of PyTorch's CUDA caching allocator that change how much memory a run takes.

Promises:
- a value that PyTorch 2.13 refuses is refused here, with what was given and what is allowed;
- sizes are bytes, whatever unit the option has in its text;
- an option that cannot change the memory of the card is kept by name in `ignored`, never silently dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.errors import InvalidInputError

MIB = 1024 * 1024
_INTERVALS = 16
"""Powers of two that can be rounded each in its own way, from 1 MiB on; the first is also that of all below."""


@dataclass(frozen=True)
class AllocatorSettings:
    """What PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) sets, as PyTorch 2.13 understands it.

    >>> AllocatorSettings.parse("expandable_segments:True, roundup_power2_divisions:4").divisions_of(5 * MIB)
    4
    >>> AllocatorSettings.parse("max_split_size_mb:8")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: max_split_size is 8 MiB; at least a large segment is allowed, 20 MiB.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks of this many bytes or more are never split; None: every block may be."""
    max_non_split_rounding_size: int | None = None
    """How many bytes larger than asked an unsplittable block may be and still serve; None: a large segment."""
    roundup_power2_divisions: int | tuple[int, ...] = 0
    """Steps between two powers of two that sizes are rounded up to: one number, or one per power from 1 MiB on."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed bytes from which on old cached blocks are given back; 0: never."""
    large_segment_size: int = 20 * MIB
    per_process_memory_fraction: float = 1.0
    """Share of the card that may be reserved; `allowed_bytes` says how many bytes that is."""
    throw_on_cudamalloc_oom: bool = False
    """Past the allowed bytes, raise at once: cached blocks are not given back first."""
    ignored: tuple[str, ...] = ()
    """Options that were given and change nothing on a simulated card."""

    def __post_init__(self) -> None:
        _check_large_segment(self.large_segment_size, self.expandable_segments)
        for name in ("max_split_size", "max_non_split_rounding_size"):
            _check_at_least_a_segment(name, getattr(self, name), self.large_segment_size)
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise InvalidInputError(
                f"garbage_collection_threshold is {self.garbage_collection_threshold}; "
                "allowed is a share between 0 and 1, neither included (leave it out to never collect)."
            )
        if not 0.0 <= self.per_process_memory_fraction <= 1.0:
            raise InvalidInputError(
                f"per_process_memory_fraction is {self.per_process_memory_fraction}; allowed is a share from 0 to 1."
            )
        _check_divisions(self.roundup_power2_divisions)

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the text of PYTORCH_ALLOC_CONF.

        >>> AllocatorSettings.parse("max_split_size_mb:128,pinned_use_background_threads:True").ignored
        ('pinned_use_background_threads:True',)
        """
        from batchwright.simulated.settings_text import fields_of

        return cls(**fields_of(text))

    @property
    def largest_slack(self) -> int:
        """Bytes that an unsplittable block must be larger than asked to be left alone."""
        return self.max_non_split_rounding_size or self.large_segment_size

    def divisions_of(self, size: int) -> int:
        """Return the number of steps that a size is rounded with: 0 and 1 mean multiples of 512 bytes.

        >>> AllocatorSettings.parse("roundup_power2_divisions:[2:4,>:8]").divisions_of(5 * MIB)
        8
        """
        if isinstance(self.roundup_power2_divisions, int):
            return self.roundup_power2_divisions
        power = size.bit_length() - MIB.bit_length()
        return self.roundup_power2_divisions[min(max(power, 0), _INTERVALS - 1)]

    def allowed_bytes(self, total_bytes: int) -> int | None:
        """Return how many bytes of a card of `total_bytes` may be reserved; None where that is not limited.

        >>> AllocatorSettings(per_process_memory_fraction=0.5).allowed_bytes(1001)
        500
        """
        if self.per_process_memory_fraction == 1.0:
            return None
        return int(self.per_process_memory_fraction * total_bytes)


def _check_large_segment(size: int, expandable: bool) -> None:
    if size <= 10 * MIB:
        raise InvalidInputError(f"large_segment_size is {_mib(size)}; more than 10 MiB is allowed.")
    # PyTorch takes the number and the driver then refuses the first page: cuMemCreate wants whole granules of 2 MiB.
    if expandable and size % (2 * MIB):
        raise InvalidInputError(
            f"large_segment_size is {_mib(size)}; with expandable_segments a multiple of 2 MiB is allowed."
        )


def _check_at_least_a_segment(name: str, size: int | None, segment: int) -> None:
    if size is not None and size < segment:
        raise InvalidInputError(f"{name} is {_mib(size)}; at least a large segment is allowed, {_mib(segment)}.")


def _check_divisions(divisions: int | tuple[int, ...]) -> None:
    table = (divisions,) if isinstance(divisions, int) else divisions
    if not isinstance(divisions, int) and len(table) != _INTERVALS:
        raise InvalidInputError(
            f"roundup_power2_divisions has {len(table)} entries; one number is allowed, or {_INTERVALS}, "
            "one for each power of two from 1 MiB on."
        )
    for steps in table:
        if steps < 0 or steps & (steps - 1):
            raise InvalidInputError(
                f"roundup_power2_divisions has {steps} steps; powers of two are allowed, and 0 for none."
            )


def _mib(size: int) -> str:
    return f"{size // MIB} MiB" if size % MIB == 0 else f"{size:,} bytes"
