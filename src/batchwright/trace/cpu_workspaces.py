"""What a CPU kernel allocates besides its result, asked of the kernel itself at small sizes.

oneDNN computes convolutions, LSTMs and 16-bit matrix products in layouts of its own and decides by shapes, strides,
type, threads and processor which copies it makes: a bf16 product takes tiles per thread on one processor, its whole
result in fp32 on the next, nothing on a third. No rule of ours would hold on the next processor. So the kernel is run
at sizes that cost little, its allocations are recorded, and each of them is extended to the real size: a copy of
activations grows with the batch, a copy of weights does not, a result grows with rows times columns, and buffers for
tiles grow no more once a length holds several of them.

Promises:
- what is cheap itself is run as it is;
- sizes are compared only where the kernel made the same allocations in the same order, else larger ones are run, up
  to the real one;
- an allocation is taken to grow along a length only if it grew in a straight line over three lengths;
- an operator is run once per shape, strides, type, number of threads and settings of oneDNN;
- where a matrix product does not go to oneDNN and copies no operand, nothing is run at all.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, combinations
from math import prod
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._subclasses.fake_tensor import unset_fake_temporarily

from batchwright.trace.refused_operators import NotFollowedError

# The fused attention of the CPU works on a tile of queries by keys in each thread. A tile's size follows from the
# lengths and the type alone, so the bytes are a formula, read off torch 2.13.0's allocations
# (tests/trace/test_attention_workspace.py compares them). Where oneDNN multiplies the tiles, its scratch comes on top
# and the kernel is asked instead.

_aten = torch.ops.aten
FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_KEYS_PER_TILE = 512
_FLOAT = 4  # a tile accumulates in float whatever the type of the inputs


def held_while_running(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of what the kernel holds beside its inputs and outputs; none for any other operator."""
    if func is FORWARD:
        query, key = args[0], args[1]
        queries, keys = _tile(query, key)
        tiles = torch.get_num_threads() * queries * (keys + 2 + query.shape[-1]) * _FLOAT
        return (tiles, *_in_type(query, queries * keys))
    if func is BACKWARD:
        gradient, query, key = args[0], args[1], args[2]
        queries, keys = _tile(query, key)
        # The kernel wants (batch, length, heads, width); a gradient that lies otherwise is copied.
        in_order = gradient.transpose(1, 2).is_contiguous()
        copied = 0 if in_order else gradient.numel() * gradient.element_size()
        tiles = torch.get_num_threads() * 2 * queries * keys * _FLOAT
        return (copied, tiles, *_in_type(query, 2 * queries * keys))
    return ()


def _in_type(query: torch.Tensor, num_elements: int) -> tuple[int, ...]:
    """A 16-bit kernel keeps each tile in that type too, to multiply it."""
    if query.element_size() == _FLOAT or query.dtype is torch.float64:
        return ()
    return (torch.get_num_threads() * num_elements * query.element_size(),)


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    length = query.shape[-2]
    queries = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(queries, length), min(_KEYS_PER_TILE, key.shape[-2])


# So much of an activation is worth running for real: some ten milliseconds of a kernel.
CHEAP_BYTES = 2 * 2**20
# Likewise in multiplications: for oneDNN on a processor that multiplies tiles (AMX) and without, for a BLAS, and for
# torch's own loops over 16-bit types.
CHEAP_PRODUCTS_IN_TILES, CHEAP_PRODUCTS_OF_ONEDNN, CHEAP_PRODUCTS, CHEAP_PRODUCTS_OF_A_LOOP = 2**35, 2**32, 2**26, 2**21
# To write a byte of memory takes as long as so many multiplications, and there may not be that many bytes.
_PRODUCTS_OF_A_BYTE = 2**6
_LSTM, _LSTM_BACKWARD = _aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default
_GROUPED_MM = _aten._grouped_mm.default
_TILE = 64
# oneDNN's buffers for tiles grow up to lengths of 1,024 (2,048 were tried); below that a copy looks the same.
_SEVERAL_TILES = 512
# How far a slope may differ from the one before it and still be the same.
_STRAIGHT = 0.1
_WORKSPACE = 22  # the last argument of the backward of an LSTM: what its forward kept
_OFFSETS = 2  # where a grouped product is told which rows are whose


@dataclass(frozen=True)
class _Extent:
    """One length that several tensors share: which dimensions it is, and how it may be made smaller."""

    # (argument, dimension): an argument's position or name; one that is broadcast there stays as it is.
    places: tuple[tuple[int | str, int], ...]
    # Smaller lengths are this times a power of two; None for one that gives each thread its share.
    least: int | None = None
    # They keep the remainder of the real length: kernels work in tiles, and treat the last one apart.
    in_tiles: bool = False


def _matrices(*, left: int, right: int, added: int | None = None, batch: bool = False) -> tuple[_Extent, ...]:
    """Rows, inner length and columns of a matrix product; before them, where there is one, the batch."""

    def places(*of: tuple[int, int], added_dim: int | None) -> tuple[tuple[int | str, int], ...]:
        return of if added is None or added_dim is None else (*of, (added, added_dim))

    extents = (
        _Extent(places((left, -2), added_dim=-2), _TILE, in_tiles=True),
        _Extent(places((left, -1), (right, -2), added_dim=None), _TILE, in_tiles=True),
        _Extent(places((right, -1), added_dim=-1), _TILE, in_tiles=True),
    )
    return (_Extent(places((left, -3), (right, -3), added_dim=-3)), *extents) if batch else extents


_PRODUCTS: dict[Any, tuple[_Extent, ...]] = {
    _aten.mm.default: _matrices(left=0, right=1),
    _aten.addmm.default: _matrices(left=1, right=2, added=0),
    _aten.addmm_.default: _matrices(left=1, right=2, added=0),
    _aten._addmm_activation.default: _matrices(left=1, right=2, added=0),
    _aten.bmm.default: _matrices(left=0, right=1, batch=True),
    _aten.baddbmm.default: _matrices(left=1, right=2, added=0, batch=True),
    _aten.baddbmm_.default: _matrices(left=1, right=2, added=0, batch=True),
    _aten.addbmm.default: _matrices(left=1, right=2, added=0, batch=True),
    _aten.mv.default: (_Extent(((0, 0),), _TILE, True), _Extent(((0, 1), (1, 0)), _TILE, True)),
    _aten.addmv.default: (_Extent(((1, 0), (0, 0)), _TILE, True), _Extent(((1, 1), (2, 0)), _TILE, True)),
    _GROUPED_MM: _matrices(left=0, right=1),
}


def _attention(query: int, *like_query: int, row_sums: tuple[int, ...] = ()) -> tuple[_Extent, ...]:
    """Samples, heads, queries and keys; the kernel changes its tiles at 768 queries and at 512 keys.

    Two heads at least: with one, every order of the dimensions is the same.
    """
    key, value = query + 1, query + 2
    of_queries, all_of_them = (query, *like_query), (query, *like_query, key, value)
    return (
        _Extent((*((i, 0) for i in (*all_of_them, *row_sums)), ("attn_mask", 0)), 1),
        _Extent((*((i, 1) for i in (*all_of_them, *row_sums)), ("attn_mask", 1)), 2),
        _Extent((*((i, 2) for i in (*of_queries, *row_sums)), ("attn_mask", 2)), 768, True),
        _Extent(((key, 2), (value, 2), ("attn_mask", 3)), 512, True),
    )


_ATTENTION = {FORWARD: _attention(0), BACKWARD: _attention(1, 0, 4, row_sums=(5,))}
# Kernels of oneDNN in any type. The first dimension is the batch; of an LSTM, the time.
_ALWAYS: dict[Any, tuple[_Extent, ...]] = {
    _aten.convolution.default: (_Extent(((0, 0),)),),
    _aten.convolution_backward.default: (_Extent(((0, 0), (1, 0))),),
    _LSTM: (_Extent(((0, 0),)),),
    _LSTM_BACKWARD: (_Extent(((0, 0), (7, 0), (10, 0))),),
}
_EXTENTS = {**_ALWAYS, **_PRODUCTS, **_ATTENTION}


def can_be_asked(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is one whose allocations follow from no shape rule."""
    if func not in _EXTENTS:
        return False
    first: torch.Tensor = args[0]
    if first.device.type != "cpu":
        return False
    if func in _ALWAYS:
        return True
    if any(isinstance(arg, torch.Tensor) and arg.numel() == 0 for arg in args):
        return False
    if goes_to_onednn(first.dtype):
        return True
    return func in _PRODUCTS and func is not _GROUPED_MM and not all(map(_suits_blas, _operands(func, args)))


def goes_to_onednn(dtype: torch.dtype) -> bool:
    """Whether torch hands a matrix product of this type to oneDNN, on this processor and as it is set now."""
    if not torch._C._get_mkldnn_enabled() or not torch.backends.mkldnn.is_available():
        return False
    if dtype in (torch.bfloat16, torch.float16):
        return _has_units_for(dtype)
    # An ARM build sends single precision there as well; elsewhere only a lowered precision goes.
    return dtype is torch.float32 and (platform.machine() in ("aarch64", "arm64") or _float_precision() in _LOWERED)


_LOWERED = ("bf16", "tf32")


@cache
def _has_units_for(dtype: torch.dtype) -> bool:
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    with unset_fake_temporarily():
        return bool(getattr(torch.ops.mkldnn, name)())


def _float_precision() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


def _settings() -> tuple[Any, ...]:
    """Whatever else decides which kernel runs. An LSTM looks at the grad mode to decide what to keep."""
    enabled = torch._C._get_mkldnn_enabled()
    return torch.is_grad_enabled(), torch.get_num_threads(), enabled, _float_precision()


def _operands(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    places = {place for extent in _PRODUCTS[func][-2:] for place, _ in extent.places}
    return [args[i] for i in sorted(place for place in places if isinstance(place, int)) if args[i].dim() >= 2]


def _suits_blas(matrix: torch.Tensor) -> bool:
    """Whether one dimension has no gaps and the other no overlap; any other operand is copied first."""
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    by_rows = (right == 1 or columns == 1) and (down >= columns or rows == 1)
    by_columns = (down == 1 or rows == 1) and (right >= rows or columns == 1)
    return by_rows or by_columns


def allocations_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Bytes allocated (positive) and freed (negative) inside an operator, in order; what it returns is not freed."""
    question = _Question(func, tuple(args), dict(kwargs or {}))
    lengths = question.lengths()
    budget = question.budget()
    while True:
        small = question.shrunk(lengths, budget)
        if small == lengths:
            return question.allocations(lengths)
        extended = _extended(question, small, lengths)
        if extended is not None:
            return extended
        budget *= 2


def _extended(question: _Question, small: tuple[int, ...], real: tuple[int, ...]) -> tuple[int, ...] | None:
    """From small sizes to the real one: exact for whatever is a sum of products of lengths; None if they tell nothing.

    Each allocation is carried on over the corners of a box of sizes, along the lengths with which it grows.
    """
    shrunk = [i for i, (length, whole) in enumerate(zip(small, real, strict=True)) if length < whole]
    below = {i: question.next_below(i, small[i], real[i]) for i in shrunk}
    far_below = {i: question.next_below(i, below[i], real[i]) for i in shrunk}

    def smaller(lengths: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(lengths.get(i, length) for i, length in enumerate(small))

    corners = [smaller({i: below[i] for i in lower}) for lower in _subsets(shrunk)]
    sizes = [*corners, *(smaller({i: far_below[i]}) for i in shrunk)]
    recorded = dict(zip(sizes, map(question.allocations, sizes), strict=True))
    if len({tuple(num_bytes > 0 for num_bytes in events) for events in recorded.values()}) > 1:
        if question.func in _ALWAYS:
            return None
        recorded = {size: _peak_alone(events) for size, events in recorded.items()}
        if len({len(events) for events in recorded.values()}) > 1:
            return None
    extended = []
    for event, num_bytes in enumerate(recorded[small]):
        growing = [
            i
            for i in shrunk
            if _is_straight(
                (far_below[i], recorded[smaller({i: far_below[i]})][event]),
                (below[i], recorded[smaller({i: below[i]})][event]),
                (small[i], num_bytes),
            )
        ]
        steps = {i: (real[i] - below[i]) / (small[i] - below[i]) for i in growing}
        total = sum(
            prod(1 - steps[i] if i in lower else steps[i] for i in growing)
            * recorded[smaller({i: below[i] for i in lower})][event]
            for lower in _subsets(growing)
        )
        extended.append(round(total))
    return tuple(extended)


def _subsets(items: Sequence[int]) -> list[tuple[int, ...]]:
    return [subset for count in range(len(items) + 1) for subset in combinations(items, count)]


def _is_straight(first: tuple[int, int], second: tuple[int, int], third: tuple[int, int]) -> bool:
    """Whether bytes grow by as much from the second length to the third as from the first to the second.

    >>> _is_straight((1, 10), (2, 20), (4, 40)), _is_straight((1, 10), (2, 20), (4, 20))
    (True, False)
    """
    (low, low_bytes), (middle, middle_bytes), (high, high_bytes) = first, second, third
    before, after = (middle_bytes - low_bytes) / (middle - low), (high_bytes - middle_bytes) / (high - middle)
    return before != 0 and abs(after / before - 1) <= _STRAIGHT


def _peak_alone(events: tuple[int, ...]) -> tuple[int, ...]:
    """What outlives the operator, and one allocation as high above it as the operator ever was.

    A kernel that takes scratch in a loop takes it the more often the larger it is, and no higher.
    """
    kept = [events[position] for position in sorted(never_freed(events))]
    above = max(max(accumulate(events), default=0) - sum(kept), 0)
    return (*kept, above, -above)


def never_freed(events: Sequence[int]) -> set[int]:
    """Positions of the allocations that outlive the operator; of equal ones, the last."""
    alive: dict[int, list[int]] = {}
    for position, num_bytes in enumerate(events):
        if num_bytes > 0:
            alive.setdefault(num_bytes, []).append(position)
        elif alive.get(-num_bytes):
            alive[-num_bytes].pop(0)
    return {position for positions in alive.values() for position in positions}


@dataclass(frozen=True)
class _Question:
    """One call of an operator, which can be asked for at other sizes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def _extents(self) -> tuple[_Extent, ...]:
        extents = _EXTENTS[self.func]
        if self.func is _GROUPED_MM and self.args[0].dim() == 3 and self.args[1].dim() == 3:
            return (_Extent(((0, 0), (1, 0))), *extents)
        if self.func in _ATTENTION:
            samples, heads, *lengths = extents
            queries, keys = (self._tensor(place) for place, _ in (heads.places[0], lengths[1].places[0]))
            # Several queries to one key: their heads cannot shrink one without the other.
            return extents if queries.shape[1] == keys.shape[1] else (samples, *lengths)
        return extents

    def lengths(self) -> tuple[int, ...]:
        """The real length of each extent."""
        return tuple(self._tensor(extent.places[0][0]).shape[extent.places[0][1]] for extent in self._extents())

    def _tensor(self, place: int | str) -> Any:
        if isinstance(place, str):
            return self.kwargs.get(place)
        return self.args[place] if place < len(self.args) else None

    def budget(self) -> int:
        """How much of it is run: bytes of a sample, or multiplications."""
        if self.func in _ALWAYS:
            return CHEAP_BYTES
        if self._is_onednns():
            is_in_tiles = self._operand().dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
            return CHEAP_PRODUCTS_IN_TILES if is_in_tiles else CHEAP_PRODUCTS_OF_ONEDNN
        is_fast = self._operand().dtype in (torch.float32, torch.float64)
        return CHEAP_PRODUCTS if is_fast else CHEAP_PRODUCTS_OF_A_LOOP

    def _operand(self) -> torch.Tensor:
        operand: torch.Tensor = self._tensor(self._extents()[-1].places[0][0])
        return operand

    def _is_onednns(self) -> bool:
        return self.func in _PRODUCTS and goes_to_onednn(self._operand().dtype)

    def _cost(self, lengths: tuple[int, ...]) -> int:
        if self.func in _ALWAYS:
            scaled = self.args[0]
            return int(lengths[0] * scaled.shape[1:].numel() * scaled.element_size())
        if self.func in _ATTENTION:
            return int(self.args[0].shape[-1] * prod(lengths))
        # Each tensor of a product lacks one of its lengths.
        *batch, rows, inner, columns = (1, *lengths) if len(lengths) > 2 else (1, *lengths, 1)
        num_elements = prod(batch) * (rows * inner + inner * columns + rows * columns)
        return max(prod(lengths), num_elements * self._operand().element_size() * _PRODUCTS_OF_A_BYTE)

    def shrunk(self, lengths: tuple[int, ...], budget: int) -> tuple[int, ...]:
        """Lengths at which the call costs no more than the budget, or the smallest that tell enough."""
        if self._cost(lengths) <= budget:
            return lengths
        if self.func not in _ALWAYS:
            budget //= 2  # as several sizes will be run
        small = list(lengths)
        for i in range(len(small)):  # a batch comes first, as nothing else is as sure to grow in a straight line
            if not self._extents()[i].in_tiles:
                while self._cost(tuple(small)) > budget and self._can_shrink(i, small[i], lengths[i]):
                    small[i] = self.next_below(i, small[i], lengths[i])
        while self._cost(tuple(small)) > budget:
            able = [i for i in range(len(small)) if self._can_shrink(i, small[i], lengths[i])]
            if not able:
                break
            # The inner length last: beyond some of it a kernel sums in another way.
            outer = [i for i in able if self.func not in _PRODUCTS or i != len(small) - 2]
            longest = max(outer or able, key=lambda i: small[i] / self._smallest(i))
            small[longest] = self.next_below(longest, small[longest], lengths[longest])
        return tuple(small)

    def _smallest(self, index: int) -> int:
        # With less than a share for each thread a kernel may keep fewer sums of weights, or work on fewer tiles.
        least = self._extents()[index].least or max(2, torch.get_num_threads())
        return _SEVERAL_TILES if least == _TILE and self._is_onednns() else least

    def _can_shrink(self, index: int, length: int, real: int) -> bool:
        """Whether a smaller length has two below it, to see how allocations grow."""
        for _ in range(3):
            below = self.next_below(index, length, real)
            if below == length:
                return False
            length = below
        return True

    def next_below(self, index: int, length: int, real: int) -> int:
        """The next smaller length, or the same if there is none."""
        smallest = self._smallest(index)
        remainder = real % _TILE if self._extents()[index].in_tiles else 0
        below = smallest
        while 2 * below + remainder < length:
            below *= 2
        return below + remainder if below + remainder < length else length

    def allocations(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """What the kernel allocates at these lengths."""
        new_lengths: dict[tuple[int | str, int], int] = {}
        for extent, length, real in zip(self._extents(), lengths, self.lengths(), strict=True):
            for place, dim in extent.places:
                tensor = self._tensor(place)
                if tensor is not None and tensor.dim() >= (dim + 1 if dim >= 0 else -dim) and tensor.shape[dim] == real:
                    new_lengths[place, dim % tensor.dim()] = length
        signatures = [_signature(arg, i, new_lengths) for i, arg in enumerate(self.args)]
        named = tuple((name, _signature(arg, name, new_lengths)) for name, arg in sorted(self.kwargs.items()))
        if self.func is _LSTM_BACKWARD:
            signatures[_WORKSPACE] = None
        return _recorded(self.func, _settings(), tuple(signatures), named)


def _signature(arg: Any, place: int | str, new_lengths: dict[tuple[int | str, int], int]) -> Any:
    if not isinstance(arg, torch.Tensor):
        return tuple(arg) if isinstance(arg, list) else arg
    shape = torch.Size(new_lengths.get((place, dim), length) for dim, length in enumerate(arg.shape))
    return shape, _strides_like(shape, arg), arg.dtype


def _strides_like(shape: torch.Size, tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in the same order, with gaps of the same proportion: dense where the tensor was."""
    if shape == tensor.shape:
        return tensor.stride()
    strides, dense, new_dense = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), tensor.shape[dim] != 1)):
        stride = tensor.stride(dim)
        if tensor.shape[dim] == 1 or stride == 0:
            strides[dim] = stride
            continue
        strides[dim] = max(1, round(new_dense * stride / dense))
        dense, new_dense = stride * tensor.shape[dim], strides[dim] * shape[dim]
    return tuple(strides)


@lru_cache(maxsize=4096)
def _recorded(
    func: Any, settings: tuple[Any, ...], signatures: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> tuple[int, ...]:
    with unset_fake_temporarily(), torch.set_grad_enabled(settings[0]):
        args = [_example(signature) for signature in signatures]
        kwargs = {name: _example(signature) for name, signature in named}
        if func is _LSTM_BACKWARD:
            args[_WORKSPACE] = workspace_for(args)
        if func is _GROUPED_MM and len(args) > _OFFSETS and args[_OFFSETS] is not None:
            args[_OFFSETS] = _even_offsets(args[0], args[1], args[_OFFSETS])
        if kwargs.get("offs") is not None:
            kwargs["offs"] = _even_offsets(args[0], args[1], kwargs["offs"])
        return record_allocations(lambda: func(*args, **kwargs), str(func))


def _even_offsets(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Where each group ends, if all are as large: which tokens go to which expert is not known."""
    total = left.shape[1] if left.dim() == right.dim() == 2 else left.shape[0] if left.dim() == 2 else right.shape[-1]
    groups = len(offsets)
    return torch.tensor([total * (i + 1) // groups for i in range(groups)], dtype=offsets.dtype)


def workspace_for(backward: Sequence[Any]) -> torch.Tensor:
    """Run the forward of an LSTM layer for the arguments of its backward, and return what it keeps for that."""
    tensors, (reverse, mode, hidden, layers, biases, train, both, batch_sizes, batch_first) = (
        backward[:7],
        backward[13:_WORKSPACE],
    )
    with torch.enable_grad():  # without gradients the kernel keeps no workspace
        kept: torch.Tensor = _LSTM(
            *tensors, reverse, batch_sizes, mode, hidden, layers, biases, both, batch_first, train
        )[3]
    return kept


def _example(signature: Any) -> Any:
    if isinstance(signature, tuple) and signature and isinstance(signature[0], torch.Size):
        size, stride, dtype = signature
        # Not zeros in these strides: dimensions may overlap.
        num_elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        return torch.zeros(num_elements if size.numel() else 0, dtype=dtype).as_strided(size, stride)
    return list(signature) if isinstance(signature, tuple) else signature


def record_allocations(run: Callable[[], Any], operator: str = "the operator") -> tuple[int, ...]:
    """Run something for real, and return what it allocated and freed while it ran."""
    autograd: Any = torch._C._autograd
    if autograd._profiler_enabled():
        raise NotFollowedError(operator, "its kernel cannot be asked what it allocates while a profiler runs")
    # Not torch.profiler: that one takes longer than the kernels, and logs to the terminal.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    autograd._enable_profiler_legacy(config)
    try:
        kept = run()
    finally:
        threads = autograd._disable_profiler_legacy()
    del kept
    return tuple(event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc")
