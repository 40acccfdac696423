"""Sparse tensors (COO) on a simulated card: gradients of embeddings, and adjacency matrices.

A sparse tensor has no storage of its own: what it holds are its indices and values, two dense tensors. So each operator
on one is told here as what it does to those, and they are followed as all others are.

Promises:
- the memory of a sparse tensor is that of its indices and values, and no other is made than a GPU makes
  (SparseCUDATensor.cu, SparseCUDATensorMath.cu, SparseBlasImpl.cpp of torch 2.13);
- coalescing keeps as many rows as its indices are known to differ, or else as many as they can, with a note;
- what cuSPARSE takes while it multiplies is not seen, and a note says so;
- an operator that is not told here is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from batchwright.simulated.torch_patches.backend import NAME
from batchwright.trace.refused_operators import NotFollowedError

if TYPE_CHECKING:
    from batchwright.trace.known_values import KnownValues

_aten = torch.ops.aten
_MAKE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_DEVICE = torch.ops.prim.device.default
_BAG_BACKWARD = _aten._embedding_bag_backward.default
# Asked of the tensor itself, and answered by torch without values.
_ASKED = (
    *(_aten._indices.default, _aten._values.default, _aten.indices.default, _aten.values.default),
    *(_aten._nnz.default, _aten.is_coalesced.default, _aten._dimI.default, _aten._dimV.default),
    *(_aten.sparse_dim.default, _aten.dense_dim.default, _aten._coalesced_.default),
)
_COPIES = (_aten.clone.default, _aten._to_copy.default)
_ALIASES = (_aten.detach.default, _aten.alias.default)
# What works on each value alone; 0 stays 0 by all of them.
_BY_VALUE = (
    *(_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.pow.Tensor_Scalar),
    *(_aten.neg.default, _aten.abs.default, _aten.sqrt.default, _aten.sign.default),
)
_BY_VALUE_IN_PLACE = (
    *(_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar),
    *(_aten.neg_.default, _aten.abs_.default, _aten.sqrt_.default),
)
_TO_A_NUMBER = (_aten.sum.default, _aten.isnan.default, _aten.isinf.default, _aten.isfinite.default)
_TO_DENSE = (_aten._to_dense.default, _aten.to_dense.default)
_NORMS = (
    *(_aten.norm.Scalar, _aten.norm.ScalarOpt_dtype, _aten.norm.ScalarOpt_dim, _aten.norm.ScalarOpt_dim_dtype),
    *(_aten.native_norm.default, _aten.native_norm.ScalarOpt_dim_dtype, _aten.linalg_vector_norm.default),
)
_OF_LISTS: dict[Any, Any] = {
    _aten._foreach_norm.Scalar: _aten.norm.Scalar,
    _aten._foreach_mul_.Scalar: _aten.mul_.Scalar,
    _aten._foreach_mul_.Tensor: _aten.mul_.Tensor,
    _aten._foreach_div_.Scalar: _aten.div_.Scalar,
    _aten._foreach_add_.List: _aten.add_.Tensor,
}
_PRODUCTS = (_aten.mm.default, _aten._sparse_mm.default)
_PRODUCTS_ADDED = (_aten.addmm.default, _aten._sparse_addmm.default)
# Where `_embedding_bag_backward` is told whether its gradient is sparse.
_IS_SPARSE = 9
_MEAN_OF_BAG, _INT, _MATRIX = 1, torch.int32, 2


class Follower(Protocol):
    """The trace, as it is needed here."""

    values: KnownValues
    storages: Any
    hides_memory: bool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operator on dense tensors, and follow what it makes."""

    def _note(self, text: str) -> None: ...


def is_sparse(value: object) -> bool:
    """Whether something is a sparse tensor of the kind that is followed."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


class SparseTensors:
    """The operators of a run that make or take sparse tensors."""

    def __init__(self, trace: Follower) -> None:
        self._trace = trace

    @staticmethod
    def is_met(func: Any, args: Sequence[Any]) -> bool:
        """Whether an operator makes or takes a sparse tensor."""
        if func is _MAKE or func is _DEVICE:
            return func is _MAKE
        if func is _BAG_BACKWARD:
            return bool(args[_IS_SPARSE])
        return any(
            is_sparse(value) or (isinstance(value, list | tuple) and any(map(is_sparse, value))) for value in args
        )

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run such an operator as what it does to indices and values."""
        first = args[0]
        if func is _MAKE:
            return self._make(args[3], args[4], args[2], is_coalesced=bool(kwargs.get("is_coalesced")), dense=args[1])
        if func is _BAG_BACKWARD:
            return self._backward_of_bag(*args, **kwargs)
        if func in _ASKED:
            with self._trace.storages.mode:
                return func(*args, **kwargs)
        if func in _OF_LISTS:
            results = [self._any(_OF_LISTS[func], *row) for row in _rows(func, first, args[1:])]
            return None if func._schema.is_mutable else results
        if func in _COPIES:
            return self._copy(func, first, kwargs)
        if func in _ALIASES:
            return self._like(first, *_parts(first))
        if func is _aten._coalesce.default:
            return self._coalesce(first)
        if func in _BY_VALUE and not any(map(is_sparse, args[1:])) and not _spreads(args[1:]):
            indices, values = _parts(first)
            return self._like(first, indices, self._any(func, values, *args[1:]))
        if func in _BY_VALUE_IN_PLACE and not any(map(is_sparse, args[1:])) and not _spreads(args[1:]):
            self._any(func, _parts(first)[1], *args[1:])
            return first
        if func in _TO_A_NUMBER or func in _NORMS:
            return self._any(func, _parts(self._coalesce(first))[1], *args[1:2])
        if func in (_aten.add.Tensor, _aten.add_.Tensor):
            return self._add(func, *args[:2])
        if func is _aten.sparse_mask.default:
            return self._mask(*args)
        if func in _TO_DENSE:
            return self._zeros(first.shape, first.dtype)
        if func is _aten.zero_.default:
            indices, values = _parts(first)
            return self._become(first, indices[:, :0], values[:0])
        if func in (_aten.t.default, _aten.transpose.int) and first.sparse_dim() == first.dim() == _MATRIX:
            indices, values = (self._any(_aten.clone.default, part) for part in _parts(first))
            return self._make(indices, values, tuple(reversed(first.shape)))
        if func in _PRODUCTS and is_sparse(first) and not is_sparse(args[1]):
            return self._multiply(*args)
        if func in _PRODUCTS_ADDED and is_sparse(args[1]) and not is_sparse(args[2]):
            return self._multiply(*args[1:3])
        raise NotFollowedError(str(func), "its memory on sparse tensors is not known")

    def _any(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_met(func, args):
            return self.run(func, args, kwargs)
        return self._trace.__torch_dispatch__(func, (), args, kwargs)

    def _make(
        self,
        indices: torch.Tensor,
        values: torch.Tensor,
        size: Sequence[int],
        *,
        is_coalesced: bool = False,
        dense: int | None = None,
    ) -> Any:
        dense = values.dim() - 1 if dense is None else dense
        options = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": torch.device(NAME, 0)}
        with self._trace.storages.mode:
            return _MAKE(
                indices.shape[0], dense, list(size), indices, values, **options, pin_memory=False,
                is_coalesced=is_coalesced,
            )  # fmt: skip

    def _like(self, sparse: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> Any:
        return self._make(indices, values, sparse.shape, is_coalesced=sparse.is_coalesced())

    def _become(self, sparse: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Have a sparse tensor hold other indices and values; it stays the same tensor."""
        new = self._make(indices, values, sparse.shape)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            sparse.data = new
        return sparse

    def _zeros(self, size: Sequence[int], dtype: torch.dtype) -> Any:
        return self._any(_aten.zeros.default, list(size), dtype=dtype, device=torch.device(NAME, 0))

    def _empty(self, size: Sequence[int], dtype: torch.dtype) -> Any:
        return self._any(_aten.empty.memory_format, list(size), dtype=dtype, device=torch.device(NAME, 0))

    def _copy(self, func: Any, sparse: torch.Tensor, kwargs: Mapping[str, Any]) -> Any:
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if isinstance(sparse, FakeTensor) and device is not None and device.type == "cpu":
            indices, values = _parts(sparse)
            with _disable_current_modes():
                empty = torch.zeros(indices.shape, dtype=torch.int64), torch.zeros(values.shape, dtype=values.dtype)
                return torch.sparse_coo_tensor(*empty, tuple(sparse.shape), check_invariants=False)
        where = {} if func is _aten.clone.default else {"device": torch.device(NAME, 0)}
        if isinstance(sparse, FakeTensor):
            indices, values = _parts(sparse)
        else:
            with _disable_current_modes():
                indices, values = sparse._indices(), sparse._values()
        cast = {} if func is _aten.clone.default or dtype is None else {"dtype": dtype}
        copies = self._any(func, indices, **where), self._any(func, values, **where, **cast)
        return self._make(*copies, sparse.shape, is_coalesced=sparse.is_coalesced())

    def _coalesce(self, sparse: torch.Tensor) -> torch.Tensor:
        """Add up what stands at one place: rows are sorted by a key, in memory of the sort's own, and gathered."""
        if sparse.is_coalesced():
            return sparse
        indices, values = _parts(sparse)
        num_rows = self._num_different(indices, sparse.shape)
        keys = self._any(_aten.clone.default, indices)
        _held = [self._empty((indices.shape[1],), torch.int64) for _ in range(4)]
        rows = self._empty((num_rows, *values.shape[1:]), values.dtype)
        is_vector = indices.shape[0] == 1
        places = keys[:, :num_rows] if is_vector else self._empty((indices.shape[0], num_rows), torch.int64)
        del _held, keys
        return self._make(places, rows, sparse.shape, is_coalesced=True)  # type: ignore[no-any-return]

    def _num_different(self, indices: torch.Tensor, size: Sequence[int]) -> int:
        known = self._trace.values.real(indices)
        if known is not None:
            with unset_fake_temporarily(), _disable_current_modes():
                return int(torch.unique(known, dim=1).shape[1])
        self._trace._note("indices of a sparse tensor: as many as can were taken to differ")
        return min(indices.shape[1], math.prod(size[: indices.shape[0]]))

    def _add(self, func: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if is_sparse(first) and is_sparse(second):
            indices, values = zip(_parts(first), _parts(second), strict=True)
            joined = self._any(_aten.cat.default, list(indices), 1), self._any(_aten.cat.default, list(values))
            if func is _aten.add_.Tensor:
                return self._become(first, *joined)
            return self._make(*joined, first.shape)  # type: ignore[no-any-return]
        dense = second if is_sparse(first) else first
        return dense if func is _aten.add_.Tensor else self._any(_aten.clone.default, dense)

    def _mask(self, dense: torch.Tensor, mask: torch.Tensor, *_: Any) -> Any:
        indices, values = _parts(mask)
        return self._like(mask, indices, self._empty(values.shape, dense.dtype))

    def _multiply(self, sparse: torch.Tensor, dense: torch.Tensor) -> Any:
        """As cuSPARSE does it: of rows that are coalesced, whose positions are taken as int32."""
        indices, _ = _parts(self._coalesce(sparse))
        product = self._empty((sparse.shape[0], dense.shape[1]), dense.dtype)
        self._empty((indices.shape[1],), _INT), self._empty((sparse.shape[0] + 1,), _INT)
        self._trace._note("what cuSPARSE takes for a product with a sparse matrix is not seen")
        self._trace.hides_memory = True
        return product

    def _backward_of_bag(
        self, grad: torch.Tensor, indices: torch.Tensor, _: Any, offset2bag: torch.Tensor, bag_size: torch.Tensor,
        __: Any, num_weights: int, ___: bool, mode: int, ____: bool, weights: torch.Tensor | None, *_____: Any,
    ) -> Any:  # fmt: skip
        rows = self._any(_aten.index_select.default, grad, 0, offset2bag)
        if mode == _MEAN_OF_BAG:
            sizes = self._any(_aten.index_select.default, bag_size, 0, offset2bag)
            rows = self._any(_aten.div.Tensor, rows, sizes.unsqueeze(1))
        if weights is not None:
            rows = self._any(_aten.mul.Tensor, rows, weights.unsqueeze(1))
        return self._make(indices.reshape(1, -1), rows, (num_weights, grad.shape[1]))


def _parts(sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _aten._indices.default(sparse), _aten._values.default(sparse)


def _rows(func: Any, first: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of each call that an operator on lists stands for."""
    is_pairwise = func is _aten._foreach_add_.List
    return [(value, others[0][at]) if is_pairwise else (value, *others) for at, value in enumerate(first)]


def _spreads(values: Sequence[Any]) -> bool:
    """Whether one of the others is no single number: it would have to be read at the places that are held."""
    return any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in tree_iter(values))
