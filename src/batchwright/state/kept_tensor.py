"""One tensor as it was before a probe: its memory, flags, gradient, hooks and bytes.

Promises:
- it comes back bit for bit, in the tensor object and the storage that it was in; sparse ones in those of their parts;
- bytes are copied once, to the CPU, however many tensors name them; of the meta device nothing is copied;
- bytes that are still the same are not written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
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
        # A shard or a quantized weight has no memory of its own, only its parts do.
        names: Any = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
        self._inner: dict[str, torch.Tensor] = {name: getattr(tensor, name) for name in names}
        # Names the storage, so that it outlives `.data = ...` and `.to(...)`.
        self._data = None if self._inner else tensor.data
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._hooks = {name: getattr(tensor, name, None) for name in _HOOKS}
        self._sparse = _parts_of_sparse(self._data)
        self._is_coalesced = bool(self._sparse) and tensor.layout is torch.sparse_coo and tensor.is_coalesced()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What else is to be kept with it; attributes too, for gradient buckets and the like hang on parameters."""
        return (vars(self._tensor), self._gradient, *self._inner.values(), *self._hooks.values(), *self._sparse)

    def put_back(self) -> None:
        """Give the tensor back its memory, class, flags and gradient, once its parts and elements are back."""
        tensor, data = self._tensor, self._data
        for name, part in self._inner.items():
            if getattr(tensor, name) is not part:
                setattr(tensor, name, part)
        if data is not None and (type(tensor) is not self._kind or _place(tensor) != _place(data)):
            if data.layout is torch.sparse_coo and self._sparse:
                # Its parts are back in place; which of them a tensor has, an in-place addition changes.
                indices, values = self._sparse
                data = torch.sparse_coo_tensor(
                    indices, values, data.shape, is_coalesced=self._is_coalesced, check_invariants=False
                )
            if data.layout in (torch.strided, torch.sparse_coo):
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
        for name, hooks in self._hooks.items():
            now = getattr(tensor, name, None)
            if now is not hooks:
                # Emptied as well: what torch holds for the tensor may still be the dictionary of the probe.
                if now is not None:
                    now.clear()
                setattr(tensor, name, hooks)

    def copy_elements(self, spans: Spans) -> Callable[[], object] | None:
        """Copy the elements and return what writes them back; None if there are none, or `spans` has them."""
        data = self._data
        if data is None or is_lazy(self._tensor) or data.device.type == "meta" or self._sparse:
            return None
        if isinstance(data, FakeTensor):  # of a trace: it has none
            return None
        if data.layout is not torch.strided:
            return partial(_replace_opaque, self._tensor, data.clone())
        # As bytes, from the first element to the last: exact for any dtype and NaN, and elements that several names
        # share (views, expanded tensors) are copied once.
        storage = data.untyped_storage()
        if data.is_nested:
            # Its tensors lie one after the other, and it has no strides to tell where.
            return _kept_span(data, storage, 0, storage.nbytes(), spans)
        start = int(data.storage_offset()) * data.itemsize
        reach = sum((size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True)) + 1
        num_bytes = reach * data.itemsize if data.numel() else 0
        return _kept_span(data, storage, start, num_bytes, spans)


def _kept_span(
    data: torch.Tensor, storage: torch.UntypedStorage, start: int, num_bytes: int, spans: Spans
) -> Callable[[], object] | None:
    key = (storage._cdata, start, num_bytes)
    # A sharded model frees storages that tensors still name; there is nothing to copy in those.
    if num_bytes == 0 or key in spans or start + num_bytes > storage.nbytes():
        return None
    span = torch.empty(0, dtype=torch.uint8, device=data.device).set_(storage, start, (num_bytes,), (1,))
    spans[key] = span
    return partial(_put_back_bytes, span, span.to("cpu", copy=True), storage.nbytes())


def hooks_taken_back(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Note which hooks tensors have; what is returned takes away those that came later.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> take_back = hooks_taken_back([weight])
    >>> _ = weight.register_post_accumulate_grad_hook(lambda weight: print("a gradient"))
    >>> take_back()
    >>> weight.sum().backward()
    """
    noted = [(tensor, name, getattr(tensor, name, None)) for tensor in tensors for name in _HOOKS]
    before = [(tensor, name, hooks, dict(hooks or {})) for tensor, name, hooks in noted]

    def take_back() -> None:
        for tensor, name, hooks, entries in before:
            now = getattr(tensor, name, None)
            if hooks is not None:
                hooks.clear()
                hooks.update(entries)
            if now is not hooks:
                if now is not None:
                    now.clear()
                setattr(tensor, name, hooks)

    return take_back


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the memory that a tensor names, whatever its layout; 0 if it has none.

    >>> num_bytes_of(torch.zeros(3)), num_bytes_of(torch.zeros(3, device="meta"))
    (12, 0)
    """
    return sum(num_bytes for _, num_bytes in storages_of(tensor))


def storages_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The address and the bytes of each storage that a tensor names."""
    if is_lazy(tensor) or tensor.device.type == "meta":
        return []
    if is_traceable_wrapper_subclass(tensor):
        return [pair for name in tensor.__tensor_flatten__()[0] for pair in storages_of(getattr(tensor, name))]
    if parts := _parts_of_sparse(tensor):
        return [pair for part in parts for pair in storages_of(part)]
    if tensor.layout is not torch.strided:
        return [(id(tensor), tensor.numel() * tensor.element_size())]
    storage = tensor.untyped_storage()
    return [(storage.data_ptr(), storage.nbytes())]


def _parts_of_sparse(tensor: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse one is made of."""
    if tensor is None or tensor.layout in (torch.strided, torch._mkldnn):  # type: ignore[attr-defined]
        return ()
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


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
        again = [copy.deepcopy(leaf) if device is None else leaf.to(device, copy=True) for device, leaf in copies]
        load(tree_unflatten(again, form))

    return put_back


def turn_into(thing: Any, kind: type) -> None:
    """Give an object its class back: what is lazy, module or parameter, becomes another in its first forward."""
    if type(thing) is not kind:
        thing.__class__ = kind


def _place(tensor: torch.Tensor) -> object:
    """Where a tensor's elements are; equal to nothing if that cannot be told."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return object()
    storage = tensor.untyped_storage()._cdata
    if tensor.is_nested:
        return storage, tensor.dtype, tensor.device
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _replace_opaque(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Give a tensor in a layout of oneDNN's own a copy of its elements: such memory is nobody's to write to."""
    tensor.data = before.clone()


def _put_back_bytes(span: torch.Tensor, before: torch.Tensor, storage_bytes: int) -> None:
    storage = span.untyped_storage()
    if storage.nbytes() != storage_bytes:
        storage.resize_(storage_bytes)
    # Written only where it differs: weights mapped from a file would become private memory, or are read-only.
    if span.device.type != "cpu" or not torch.equal(span, before):
        span.copy_(before)
