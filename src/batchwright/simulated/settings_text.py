"""Reads the text of PYTORCH_ALLOC_CONF: `option:value,option:[size:value,...],...`, spaces anywhere.

Stricter than PyTorch in three things that it lets pass and nobody means: a separator of the wrong kind, digits followed
by other letters (`30x` is 30 there), and a negative size (which becomes a huge one).

Promises:
- every option that PyTorch 2.13 knows for CUDA is known here; any other is refused by its name;
- the last of two values for an option counts, as there.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1024 * 1024
_INTERVALS = 16

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


def _mib(option: str, value: str) -> int:
    return _count(option, value) * _MIB


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
        if steps & (steps - 1):
            raise InvalidInputError(f"{option} has {steps} steps; powers of two are allowed, and 0 for none.")
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
    "max_split_size_mb": ("max_split_size", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share_above_zero),
    "large_segment_size_mb": ("large_segment_size", _mib),
    "per_process_memory_fraction": ("per_process_memory_fraction", _share),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _bool),
}
