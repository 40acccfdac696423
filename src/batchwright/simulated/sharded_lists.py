"""Multi-tensor operators on sharded tensors, run on the shards at once.

An optimizer updates hundreds of sharded tensors in one call. torch asks for each of them how it is sharded, against all
the others: in a model of 80 layers that takes longer than the rest of the step. An operator that works element by
element leaves every tensor sharded as it was, so its shards can be handed to it as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

# These reduce each tensor to a number, so ranks would have to talk to each other.
_REDUCE = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


def on_shards(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], dispatch: Callable[..., Any]) -> Any:
    """Dispatch a multi-tensor operator on the shards; NotImplemented where it is none, or not element by element."""
    name: str = func._schema.name  # type: ignore[attr-defined]
    if not name.startswith("aten::_foreach_") or name in _REDUCE or not args:
        return NotImplemented
    first = args[0]
    if not all(isinstance(tensor, DTensor) and _is_plain(tensor) for tensor in first):
        return NotImplemented
    if not all(_is_sharded_as(value, first) for value in (*args, *kwargs.values())):
        return NotImplemented
    made = dispatch(func, (), tuple(map(_shards, args)), {key: _shards(value) for key, value in kwargs.items()})
    if name.endswith("_"):
        return made  # in place: the shards are changed
    if not isinstance(made, list | tuple) or len(made) != len(first):
        return NotImplemented
    return [DTensor(shard, given._spec, requires_grad=False) for shard, given in zip(made, first, strict=True)]


def _is_plain(tensor: DTensor) -> bool:
    return all(isinstance(placement, Shard | Replicate) for placement in tensor.placements)


def _is_sharded_as(value: Any, first: list[DTensor]) -> bool:
    if isinstance(value, DTensor):
        return False
    if not isinstance(value, list | tuple) or not any(isinstance(entry, DTensor) for entry in value):
        return True
    return len(value) == len(first) and all(
        isinstance(entry, DTensor) and entry._spec == given._spec for entry, given in zip(value, first, strict=True)
    )


def _shards(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [entry._local_tensor if isinstance(entry, DTensor) else entry for entry in value]
    return value
