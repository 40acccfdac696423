"""The settings of PyTorch's CUDA caching allocator that change how much memory a run takes.

Promises:
- every option that PyTorch 2.13 knows for CUDA is known here; any other, and a value that PyTorch refuses, is refused
  with what was given and what is allowed. The last of two values for an option counts, as there;
- sizes are bytes, whatever unit the option has in its text;
- an option that cannot change the memory of the card is kept by name in `ignored`, never silently dropped.

Stricter than PyTorch in three things that it lets pass and nobody means: a separator of the wrong kind, digits followed
by other letters (`30x` is 30 there), and a negative size (which becomes a huge one).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchwright.errors import InvalidInputError

MIB = 1024 * 1024
_INTERVALS = 16
"""Powers of two that can be rounded each in its own way, from 1 MiB on; the first is also that of all below."""

# True/False or a number; none of them changes how many bytes the allocator takes from the card, outside of graphs.
_WITHOUT_EFFECT = {
    "release_lock_on_cudamalloc": True,
    "release_lock_on_hipmalloc": True,
    "graph_capture_record_stream_reuse": True,
    "pinned_use_background_threads": True,
    "pinned_use_cuda_host_register": True,
    "pinned_use_hip_host_register": True,
    "pinned_free_catch_all": True,
    "pinned_num_register_threads": False,
    "pinned_reserve_segment_size_mb": False,
    "pinned_max_round_threshold_mb": False,
    "pinned_max_cached_size_mb": False,
}


def fields_of(text: str) -> dict[str, Any]:
    """Return the fields of AllocatorSettings that a text sets.

    >>> fields_of("max_split_size_mb: 64, garbage_collection_threshold: 0.8")
    {'max_split_size': 67108864, 'garbage_collection_threshold': 0.8}
    """
    fields: dict[str, Any] = {}
    ignored: list[str] = []
    for option, value in _options(text):
        if option in _FIELDS:
            name, reader = _FIELDS[option]
            fields[name] = reader(option, value)
        elif option in _WITHOUT_EFFECT:
            _ = _bool(option, value) if _WITHOUT_EFFECT[option] else _count(option, value)
            ignored.append(f"{option}:{value}")
        elif option == "backend":
            _check_backend(value)
        else:
            raise _unknown(option)
    if ignored:
        fields["ignored"] = tuple(ignored)
    return fields


def _options(text: str) -> list[tuple[str, str]]:
    compact = "".join(text.split())
    # A comma at the very end is allowed there too.
    parts = re.split(r",(?![^\[]*\])", compact.removesuffix(","))
    if parts == [""]:
        return []
    pairs = [part.partition(":") for part in parts]
    for part, (option, _, value) in zip(parts, pairs, strict=True):
        if not option or not value:
            raise InvalidInputError(
                f"'{part}' in '{text}' is no setting; allowed is option:value, with commas between."
            )
    return [(option, value) for option, _, value in pairs]


def _bool(option: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise InvalidInputError(f"{option} is '{value}'; True and False are allowed.")
    return value == "True"


def _count(option: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise InvalidInputError(f"{option} is '{value}'; a whole number is allowed.")
    return int(value)


def _read_mib(option: str, value: str) -> int:
    return _count(option, value) * MIB


def _share(option: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidInputError(f"{option} is '{value}'; a share such as 0.8 is allowed.") from None


def _share_above_zero(option: str, value: str) -> float:
    share = _share(option, value)
    if not share > 0.0:
        raise InvalidInputError(f"{option} is {value}; allowed is a share between 0 and 1, neither included.")
    return share


def _divisions(option: str, value: str) -> int | tuple[int, ...]:
    """One number for all, or `[64:8,256:4,>:1]`: up to 64 MiB by 8, at 128 none, at 256 by 4, from 512 on by 1."""
    if not value.startswith("["):
        steps = _count(option, value)
        if steps == 0:
            raise InvalidInputError(f"{option} is 0; powers of two are allowed, and 0 only in a list.")
        return steps
    if not value.endswith("]"):
        raise InvalidInputError(f"{option} is '{value}'; its list lacks the closing bracket.")
    table = [0] * _INTERVALS
    last, first = 0, True
    for entry in filter(None, value[1:-1].split(",")):
        boundary, colon, text = entry.partition(":")
        if not colon:
            raise InvalidInputError(f"{option} has the entry '{entry}'; allowed is size:steps, sizes in MiB or '>'.")
        steps = _count(option, text)
        _check_steps(steps)  # each entry, as there, even if a later one takes its place
        if boundary == ">":
            table[last + 1 :] = [steps] * (_INTERVALS - last - 1)
            continue
        size = _count(option, boundary)
        if size == 0 or size & (size - 1):
            raise InvalidInputError(f"{option} has the size {boundary}; powers of two are allowed, in MiB, and '>'.")
        last = min(size.bit_length() - 1, _INTERVALS - 1)
        # The first entry is that of all smaller sizes too; gaps between entries stay at 0.
        table[0 if first else last : last + 1] = [steps] * (last + 1 if first else 1)
        first = False
    return tuple(table)


def _check_backend(value: str) -> None:
    if value == "cudaMallocAsync":
        raise InvalidInputError(
            "backend is cudaMallocAsync; only PyTorch's own allocator is simulated, not that of the driver.",
            remedy="backend:native",
        )
    if value != "native":
        raise InvalidInputError(f"backend is '{value}'; native is allowed.")


def _unknown(option: str) -> InvalidInputError:
    known = [*_FIELDS, *_WITHOUT_EFFECT, "backend"]
    near = difflib.get_close_matches(option, known, n=1)
    return InvalidInputError(
        f"'{option}' is no option of PyTorch's CUDA allocator.",
        details=[f"known: {', '.join(sorted(known))}"],
        remedy=near[0] if near else "",
    )


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _bool),
    "max_split_size_mb": ("max_split_size", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _read_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share_above_zero),
    "large_segment_size_mb": ("large_segment_size", _read_mib),
    "per_process_memory_fraction": ("per_process_memory_fraction", _share),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _bool),
}


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
        segment = self.large_segment_size
        for name in ("max_split_size", "max_non_split_rounding_size"):
            size = getattr(self, name)
            if size is not None and size < segment:
                raise InvalidInputError(
                    f"{name} is {_mib(size)}; at least a large segment is allowed, {_mib(segment)}."
                )
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


def _check_divisions(divisions: int | tuple[int, ...]) -> None:
    table = (divisions,) if isinstance(divisions, int) else divisions
    if not isinstance(divisions, int) and len(table) != _INTERVALS:
        raise InvalidInputError(
            f"roundup_power2_divisions has {len(table)} entries; one number is allowed, or {_INTERVALS}, "
            "one for each power of two from 1 MiB on."
        )
    for steps in table:
        _check_steps(steps)


def _check_steps(steps: int) -> None:
    if steps < 0 or steps & (steps - 1):
        raise InvalidInputError(
            f"roundup_power2_divisions has {steps} steps; powers of two are allowed, and 0 for none."
        )


def _mib(size: int) -> str:
    return f"{size // MIB} MiB" if size % MIB == 0 else f"{size:,} bytes"
