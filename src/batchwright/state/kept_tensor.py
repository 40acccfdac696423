"""One tensor as it was before a probe: its memory, flags, gradient and bytes.

Promises:
- it comes back bit for bit, in the tensor object and the storage that it was in;
- bytes are copied once, to the CPU, however many tensors name them; of the meta device nothing is copied;
- bytes that are still the same are not written.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes that are kept already, by storage, first byte and length. The tensor keeps the storage alive: its address is
# unique only as long as it is.
Spans = dict[tuple[int, int, int], torch.Tensor]


class KeptTensor:
    """Everything of a tensor but its elements, as it was when this was made.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> kept = KeptTensor(weight)
    >>> weight.data = torch.zeros(3)
    >>> weight.requires_grad_(False)
    tensor([0., 0., 0.])
    >>> kept.put_back()
    >>> weight
    tensor([1., 1.], requires_grad=True)
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._kind = type(tensor)
        self._inner: dict[str, torch.Tensor] = {}
        if is_traceable_wrapper_subclass(tensor):
            # A shard or a quantized weight has no memory of its own, only its parts do.
            self._inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
        # Names the storage, so that it outlives `.data = ...` and `.to(...)`.
        self._data = None if self._inner else tensor.data
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None

    @property
    def parts(self) -> tuple[Any, ...]:
        """What else is to be kept with it; attributes too, for gradient buckets and the like hang on parameters."""
        return (vars(self._tensor), self._gradient, *self._inner.values())

    def put_back(self) -> None:
        """Give the tensor back its memory, class, flags and gradient, once its parts and elements are back."""
        tensor, data = self._tensor, self._data
        for name, part in self._inner.items():
            if getattr(tensor, name) is not part:
                setattr(tensor, name, part)
        if data is not None and (type(tensor) is not self._kind or _place(tensor) != _place(data)):
            tensor.data = data
        turn_into(tensor, self._kind)
        if self._is_leaf:
            # A buffer that a step multiplied by a weight, in place, has a history since.
            if not tensor.is_leaf:
                tensor.detach_()
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient

    def copy_elements(self, spans: Spans) -> Callable[[], object] | None:
        """Copy the elements and return what writes them back; None where there are none, or `spans` has them."""
        data = self._data
        if data is None or is_lazy(self._tensor) or data.device.type == "meta":
            return None
        if data.layout is not torch.strided:
            return partial(data.copy_, data.to("cpu", copy=True))
        # As bytes, from the first element to the last: exact for any dtype and NaN, and elements that several names
        # share (views, expanded tensors) are copied once.
        storage = data.untyped_storage()
        start = int(data.storage_offset()) * data.itemsize
        reach = sum((size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True)) + 1
        num_bytes = reach * data.itemsize if data.numel() else 0
        key = (storage._cdata, start, num_bytes)
        # A sharded model frees storages that tensors still name; there is nothing to copy in those.
        if num_bytes == 0 or key in spans or start + num_bytes > storage.nbytes():
            return None
        span = torch.empty(0, dtype=torch.uint8, device=data.device).set_(storage, start, (num_bytes,), (1,))
        spans[key] = span
        return partial(_put_back_bytes, span, span.to("cpu", copy=True), storage.nbytes())


def loaded_again(load: Callable[[Any], object], state: Any) -> Callable[[], None]:
    """Copy a state, tensors to the CPU; what is returned loads it, each tensor on its device again.

    >>> state = {"shadow": torch.ones(2), "steps": [1]}
    >>> put_back = loaded_again(state.update, state)
    >>> state["shadow"] += 1
    >>> state["steps"].append(2)
    >>> put_back()
    >>> state
    {'shadow': tensor([1., 1.]), 'steps': [1]}
    """
    leaves, form = tree_flatten(state)
    copies = [
        (leaf.device, leaf.detach().to("cpu", copy=True))
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta
        else (None, copy.deepcopy(leaf))
        for leaf in leaves
    ]

    def put_back() -> None:
        # A copy again, each time: whoever loads a state may go on to change it.
        made = [copy.deepcopy(leaf) if device is None else leaf.to(device, copy=True) for device, leaf in copies]
        load(tree_unflatten(made, form))

    return put_back


def turn_into(thing: Any, kind: type) -> None:
    """Give an object its class back: what is lazy, module or parameter, becomes another in its first forward."""
    if type(thing) is not kind:
        thing.__class__ = kind


def _place(tensor: torch.Tensor) -> object:
    """Where a tensor's elements are; equal to nothing where that cannot be told."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return object()
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _put_back_bytes(span: torch.Tensor, before: torch.Tensor, storage_bytes: int) -> None:
    storage = span.untyped_storage()
    if storage.nbytes() != storage_bytes:
        storage.resize_(storage_bytes)
    # Written only where it differs: weights mapped from a file would become private memory, or are read-only.
    if span.device.type != "cpu" or not torch.equal(span, before):
        span.copy_(before)
