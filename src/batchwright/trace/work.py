"""What each operator of a step asks of a device: FLOPs, bytes, kernels, number format, layout.

A trace passes every operator of forward, backward and optimizer. Here each is written down as the work that a device
would do for it; `timing/` turns that into seconds, for any card.

Promises:
- views, and tensors that are only made, cost nothing but the host's time to ask for them;
- a convolution's backward is two entries, one for each gradient; its bias is a kernel of its own, as cuDNN has it;
- a multi-tensor operator is as many kernels as torch launches for it, by the limits of its MultiTensorApply.cuh;
- memory that is read through indices counts as what is read, not as the table;
- what is written down is plain numbers: no tensor is kept, so nothing lives longer for being looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from batchwright.simulated.operators.library_work import LibraryWork


class Work(NamedTuple):
    """What one kernel, or a few alike, does. Equal work is equal: most layers of a model repeat it."""

    operator: str
    kind: str
    """What it is to a device: matmul, pointwise, winograd, convolution, grouped, depthwise, attention,
    attention_backward, recurrent, elementwise, transpose, reduce, softmax, norm, pool, gather, optimizer, fill, upload,
    or a collective: all_reduce, all_gather, reduce_scatter, all_to_all."""
    flops: int
    read_bytes: int
    written_bytes: int
    kernels: int
    number_format: str
    layout: str = ""
    """nhwc or nchw of a convolution, flash or efficient of attention."""
    dims: tuple[int, ...] = ()
    """Of products: batch, rows, columns, depth. Of convolutions: samples times positions, channels out, depth, window,
    groups."""
    phase: str = "forward"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class StepWork:
    """The work of one full step, in the order in which it is asked for."""

    entries: tuple[Work, ...]
    modules: tuple[str, ...]
    """For each entry, the module that asked for it; empty where it is not known."""
    num_views: int = 0
    """Operators that launch nothing, and still take the host's time."""

    @property
    def flops(self) -> int:
        """FLOPs of the step, a multiply and an add counted as two."""
        return sum(work.flops for work in self.entries)

    @property
    def num_kernels(self) -> int:
        """Kernels that the step launches."""
        return sum(work.kernels for work in self.entries)

    def scaled(self, other: StepWork, size: int, other_size: int, wanted: int) -> StepWork | None:
        """Return the work at another size, on the line through two; None where the two are not the same step.

        >>> one, two = (Work("aten.mm", "matmul", 8 * n, n, n, 1, "fp32", dims=(1, n, 2, 2)) for n in (2, 4))
        >>> line = StepWork((one,), ("",)).scaled(StepWork((two,), ("",)), 2, 4, 16)
        >>> line.entries[0].flops, line.entries[0].dims
        (128, (1, 16, 2, 2))
        """
        if len(self.entries) != len(other.entries) or size == other_size:
            return None

        def between(a: int, b: int) -> int:
            return a if a == b else max(0, a + round((b - a) * (wanted - size) / (other_size - size)))

        entries = []
        for a, b in zip(self.entries, other.entries, strict=True):
            if a.operator != b.operator or a.kind != b.kind or len(a.dims) != len(b.dims):
                return None
            entries.append(
                a
                if a == b
                else a._replace(
                    flops=between(a.flops, b.flops),
                    read_bytes=between(a.read_bytes, b.read_bytes),
                    written_bytes=between(a.written_bytes, b.written_bytes),
                    kernels=between(a.kernels, b.kernels),
                    dims=tuple(map(between, a.dims, b.dims)),
                )
            )
        return StepWork(tuple(entries), self.modules, self.num_views)


_FORMATS = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.uint8: "int8",
    **{
        getattr(torch, name): "fp8"
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if hasattr(torch, name)
    },
}


def _format(tensor: torch.Tensor, *, allow_tf32: bool = False) -> str:
    name = _FORMATS.get(tensor.dtype, "fp32")
    return "tf32" if allow_tf32 and name == "fp32" else name


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that a tensor covers: what is expanded is read once.

    >>> num_bytes(torch.empty(4, 1).expand(4, 8)), num_bytes(torch.empty(4, 8))
    (16, 128)
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.dtype.itemsize
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return count * tensor.dtype.itemsize


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [entry for entry in value if isinstance(entry, torch.Tensor)]
    return tensors


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(num_bytes(tensor) for tensor in tensors)


Outputs = Sequence[torch.Tensor]
Rule = Callable[[str, Sequence[Any], Mapping[str, Any], Outputs], list[Work]]


def _elementwise(kind: str = "elementwise", kernels: int = 1) -> Rule:
    def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
        read = _tensors((*args, *kwargs.values()))
        chosen = kind
        if kind == "elementwise" and read and outputs and _is_transposing(read[0], outputs[0]):
            chosen = "transpose"
        first = outputs[0] if outputs else read[0]
        return [Work(name, chosen, 0, _total(read), _total(outputs), kernels, _format(first))]

    return rule


def _is_transposing(read: torch.Tensor, written: torch.Tensor) -> bool:
    """Whether neighbours in one tensor are far apart in the other, so that one side cannot be read in whole lines."""
    if read.dim() < 2 or read.shape != written.shape or read.layout is not torch.strided:
        return False
    return _fastest(read) != _fastest(written)


def _fastest(tensor: torch.Tensor) -> int:
    strides = [stride if size > 1 else math.inf for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return min(range(len(strides)), key=strides.__getitem__)


def _writes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
    """A fill, or a copy into what is there: what was there is not read."""
    read = _tensors(args)[1:] if name.endswith("_") else []
    written = outputs[0] if outputs else args[0]
    kind = "transpose" if read and _is_transposing(read[0], written) else "fill" if not read else "elementwise"
    return [Work(name, kind, 0, _total(read), num_bytes(written), 1, _format(written))]


def _gathers(kernels: int = 1) -> Rule:
    def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
        written = _total(outputs)
        indices = sum(num_bytes(t) for t in _tensors(args) if not t.dtype.is_floating_point)
        first = outputs[0] if outputs else args[0]
        return [Work(name, "gather", 0, written + indices, written, kernels, _format(first))]

    return rule


def _scatters(kernels: int) -> Rule:
    """A result of zeros into which a smaller tensor is written."""

    def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
        given = num_bytes(args[0])
        return [Work(name, "gather", 0, given, _total(outputs) + given, kernels, _format(outputs[0]))]

    return rule


def _scatters_in_place(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
    given = _total(_tensors((*args[1:], *kwargs.values())))
    return [Work(name, "gather", 0, 2 * given, given, 1, _format(args[0]))]


def _product(left: int, right: int, added: int | None = None) -> Rule:
    """A matrix product of two arguments; `added` is a third that the result starts from."""

    def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
        a, b = args[left], args[right]
        batch = a.shape[0] if a.dim() == 3 else 1
        rows = a.shape[-2] if a.dim() > 1 else 1
        depth, columns = a.shape[-1], b.shape[-1] if b.dim() > 1 else 1
        read = num_bytes(a) + num_bytes(b) + (num_bytes(args[added]) if added is not None else 0)
        number_format = _format(a, allow_tf32=torch.backends.cuda.matmul.allow_tf32)
        dims = (batch, rows, columns, depth)
        flops = 2 * batch * rows * columns * depth
        return [Work(name, "matmul", flops, read, _total(outputs), 1, number_format, dims=dims)]

    return rule


def _layout(read: torch.Tensor, weight: torch.Tensor) -> str:
    is_last = any(
        t.dim() in (4, 5)
        and not t.is_contiguous()
        and t.is_contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
        for t in (read, weight)
    )
    return "nhwc" if is_last else "nchw"


def _convolution_kind(read: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], groups: int) -> str:
    if groups > 1:
        return "depthwise" if groups == read.shape[1] and weight.shape[1] == 1 else "grouped"
    window = tuple(weight.shape[2:])
    if math.prod(window) == 1:
        return "pointwise"
    return "winograd" if window == (3, 3) and all(step == 1 for step in stride) else "convolution"


def _convolution_work(
    name: str,
    read: torch.Tensor,
    weight: torch.Tensor,
    result: torch.Tensor,
    settings: tuple[Sequence[int], bool, int],
    parts: Sequence[str],
) -> list[Work]:
    stride, is_transposed, groups = settings
    positions = read if is_transposed else result
    flops = 2 * positions.numel() * math.prod(weight.shape[1:])
    rows = positions.shape[0] * math.prod(positions.shape[2:])
    dims = (rows, weight.shape[0], math.prod(weight.shape[1:]), math.prod(weight.shape[2:]), groups)
    number_format = _format(read, allow_tf32=torch.backends.cudnn.allow_tf32)
    layout = _layout(read, weight)
    kind = _convolution_kind(read, weight, stride, groups)
    sizes = {"input": num_bytes(read), "weight": num_bytes(weight), "output": num_bytes(result)}
    total = sum(sizes.values())
    work = []
    for part in parts:
        written = sizes[part]
        label = name if part == "output" else f"{name} ({part})"
        work.append(Work(label, kind, flops, total - written, written, 1, number_format, layout, dims))
    return work


def _convolution(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
    read, weight, bias, stride, _, _, is_transposed, _, groups = args[:9]
    out = outputs[0]
    work = _convolution_work(name, read, weight, out, (stride, is_transposed, groups), ("output",))
    if bias is not None:
        size = num_bytes(out)
        work.append(Work(f"{name} (bias)", "elementwise", 0, size, size, 1, _format(out)))
    return work


def _convolution_backward(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
    gradient, read, weight = args[:3]
    stride, is_transposed, groups, wanted = args[4], args[7], args[9], args[10]
    parts = [part for part, is_wanted in zip(("input", "weight"), wanted[:2], strict=True) if is_wanted]
    work = _convolution_work(name, read, weight, gradient, (stride, is_transposed, groups), parts)
    if wanted[2]:
        work.append(Work(f"{name} (bias)", "reduce", 0, num_bytes(gradient), 0, 1, _format(gradient)))
    return work


def _attention(query: int, layout: str, *, is_backward: bool) -> Rule:
    def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
        q, k, v = args[query : query + 3]
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        flops = 2 * pairs * (q.shape[3] + v.shape[3])
        if any(value is True for value in (*args, *kwargs.values())) and _is_causal(args, kwargs):
            flops //= 2
        kind = "attention_backward" if is_backward else "attention"
        read = _total(_tensors(args))
        number_format = _format(q, allow_tf32=torch.backends.cuda.matmul.allow_tf32)
        dims = (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
        # Backward computes the scores once more, and four products where forward has two.
        flops = flops * 5 // 2 if is_backward else flops
        return [Work(name, kind, flops, read, _total(outputs), 3 if is_backward else 1, number_format, layout, dims)]

    return rule


def _is_causal(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The flags of attention end with `is_causal`, whatever kernel it is; what else is true of them is before it."""
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    flags = [value for value in args if isinstance(value, bool)]
    return bool(flags) and flags[-1]


def _recurrent_layer(times: int) -> Rule:
    """oneDNN's layer of an LSTM: the input and two weights come first, as they do in its backward."""

    def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
        tokens = args[0].numel() // args[0].shape[-1]
        flops = 2 * times * tokens * (args[1].numel() + args[2].numel())
        read = _total(_tensors(args))
        return [Work(name, "recurrent", flops, read, _total(outputs), 1, _format(args[0]))]

    return rule


# native/cuda/MultiTensorApply.cuh: how many tensors one launch takes, by how many lists the operator walks, and how
# many blocks of so many numbers.
_TENSORS_AT_ONCE = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_BLOCKS_AT_ONCE, _BLOCK = 320, 65536


def _launches(tensors: Sequence[torch.Tensor], num_lists: int) -> int:
    blocks = sum(-(-tensor.numel() // _BLOCK) for tensor in tensors)
    return max(-(-len(tensors) // _TENSORS_AT_ONCE.get(num_lists, 30)), -(-blocks // _BLOCKS_AT_ONCE), 1)


def _multi_tensor(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
    lists = [[t for t in value if isinstance(t, torch.Tensor)] for value in args if isinstance(value, list | tuple)]
    lists = [entries for entries in lists if entries]
    if not lists:
        return []
    first = lists[0]
    if "_fused_" in name:
        written = sum(_total(entries) for index, entries in enumerate(lists[:4]) if index != 1)
    else:
        written = _total(first) if name.endswith("_") or not outputs else _total(outputs)
    read = sum(map(_total, lists))
    if "zero" in name:
        read = 0
    kernels = _launches(first, len(lists) + (0 if name.endswith("_") else 1))
    return [Work(name, "optimizer", 0, read, written, kernels, _format(first[0]))]


def fused_kernel(name: str, tensors: Sequence[torch.Tensor], *, twice: int, positions: int | None) -> Work:
    """A kernel that a compiler wrote, of its arguments; the first `twice` are read and written.

    `positions` is over how many numbers it goes: of a table that it looks into, it reads no more.
    """
    most = [tensor.numel() if positions is None else min(tensor.numel(), positions) for tensor in tensors]
    sizes = [count * tensor.dtype.itemsize for count, tensor in zip(most, tensors, strict=True)]
    sizes = [min(size, num_bytes(tensor)) for size, tensor in zip(sizes, tensors, strict=True)]
    return Work(name, "elementwise", 0, sum(sizes), sum(sizes[:twice]), 1, _format(tensors[-1]))


def _nothing(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
    return []


_RULES: dict[str, Rule] = {
    "mm": _product(0, 1),
    "bmm": _product(0, 1),
    "mv": _product(0, 1),
    "dot": _product(0, 1),
    "addmm": _product(1, 2, added=0),
    "addmv": _product(1, 2, added=0),
    "baddbmm": _product(1, 2, added=0),
    "_scaled_mm": _product(0, 1),
    "_int_mm": _product(0, 1),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention(0, "flash", is_backward=False),
    "_scaled_dot_product_flash_attention_backward": _attention(1, "flash", is_backward=True),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(0, "flash", is_backward=False),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, "flash", is_backward=True),
    "_scaled_dot_product_efficient_attention": _attention(0, "efficient", is_backward=False),
    "_scaled_dot_product_efficient_attention_backward": _attention(1, "efficient", is_backward=True),
    "mkldnn_rnn_layer": _recurrent_layer(1),
    "mkldnn_rnn_layer_backward": _recurrent_layer(2),
    "embedding": _gathers(),
    "index": _gathers(),
    "index_select": _gathers(),
    "gather": _gathers(),
    "take": _gathers(),
    "nll_loss_forward": _gathers(),
    "nll_loss2d_forward": _gathers(),
    # Indices are sorted first (native/cuda/EmbeddingBackwardKernel.cu).
    "embedding_dense_backward": _scatters(8),
    "slice_backward": _scatters(2),
    "select_backward": _scatters(2),
    "nll_loss_backward": _scatters(2),
    "index_put_": _scatters_in_place,
    "index_add_": _scatters_in_place,
    "scatter_": _scatters_in_place,
    "scatter_add_": _scatters_in_place,
    **dict.fromkeys(("fill_", "zero_", "copy_", "zeros", "ones", "full", "arange", "zeros_like"), _writes),
    **dict.fromkeys(("ones_like", "full_like", "new_zeros", "new_ones", "new_full"), _writes),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"), _nothing),
    **dict.fromkeys(
        ("_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_", "_local_scalar_dense"), _nothing
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "_softmax_backward_data"), _elementwise("softmax")),
    "_log_softmax_backward_data": _elementwise("softmax"),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "native_group_norm"), _elementwise("norm")),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), _elementwise("norm")),
    **dict.fromkeys(("_batch_norm_with_update", "_native_batch_norm_legit_no_training"), _elementwise("norm")),
    "native_layer_norm_backward": _elementwise("norm", 2),
    "_fused_rms_norm_backward": _elementwise("norm", 2),
    "native_group_norm_backward": _elementwise("norm", 3),
    "native_batch_norm_backward": _elementwise("norm"),
    "batch_norm_backward": _elementwise("norm"),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), _elementwise("pool")),
    "max_pool2d_with_indices_backward": _elementwise("pool", 2),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), _elementwise("pool")),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d"), _elementwise("pool")),
    **dict.fromkeys(
        ("sum", "mean", "amax", "argmax", "linalg_vector_norm", "var_mean", "norm"), _elementwise("reduce")
    ),
}
_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}
_PLAIN = _elementwise()


@cache
def _rule_of(func: Any) -> tuple[str, Rule]:
    schema = func._schema
    space, _, name = schema.name.partition("::")
    label = f"{space}.{name}"
    if space in ("c10d", "_c10d_functional"):
        return label, _collective(_COLLECTIVES.get(name, ""))
    if func.is_view or space == "prim":
        return label, _nothing
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return label, _multi_tensor
    return label, _RULES.get(name, _PLAIN)


def _collective(kind: str) -> Rule:
    def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs) -> list[Work]:
        tensors = _tensors(args) or list(outputs)
        if not kind or not tensors:
            return []
        # Of what is gathered or scattered the larger side is the whole.
        return [Work(name, kind, 0, max(map(num_bytes, tensors)), 0, 0, _format(tensors[0]))]

    return rule


@dataclass(eq=False)
class _Bucket:
    num_bytes: int
    number_format: str
    num_gradients: int
    replica: Any
    num_ready: int = 0


class WorkLog:
    """Writes down what operators ask of a device, and finds the last full step in it."""

    def __init__(self, holds: Callable[[torch.Tensor], bool]) -> None:
        self._holds = holds
        self._steps: list[tuple[list[Work], list[str]]] = [([], [])]
        self._views = [0]
        self._phase = ""
        # Where the last forward or its batch began: the step, its entries so far, and its views.
        self._forward = (0, 0, 0)
        self._waiting: dict[int, _Bucket] = {}

    def enter(self, phase: str) -> None:
        """Note that a phase begins: with a batch after an optimizer, a step."""
        if phase == "backward":
            for bucket in self._waiting.values():
                bucket.num_ready = 0
        if phase == "batch" and self._phase in ("optimizer", "generate", "evaluate"):
            self._steps.append(([], []))
            self._views.append(0)
        if phase == "batch" or (phase == "forward" and self._phase != "batch"):
            self._forward = (len(self._steps) - 1, len(self._steps[-1][0]), self._views[-1])
        self._phase = phase

    def note(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs, module: Callable[[], str]
    ) -> None:
        """Write down one operator."""
        label, rule = _rule_of(func)
        if rule is _nothing:
            self._views[-1] += 1
            return
        tensors = outputs or _tensors(args)
        if not tensors or not self._holds(tensors[0]):
            return
        try:
            work = rule(label, args, kwargs, outputs)
        except (AttributeError, IndexError, TypeError, ValueError):
            work = _PLAIN(label, args, kwargs, outputs)
        if len(work) == 1 and work[0].kind in ("elementwise", "transpose") and not self._lies_here(args):
            work = [work[0]._replace(kind="upload")]
        self.add(work, module())

    def add_library(self, done: LibraryWork) -> None:
        """Write down what a stand-in for a library's kernel tells of."""
        number_format = _FORMATS.get(done.dtype, "fp32")
        if number_format == "fp32" and done.kind == "recurrent" and torch.backends.cudnn.allow_tf32:
            number_format = "tf32"
        self.add([Work(*done[:6], number_format)])

    def add(self, work: Iterable[Work], module: str = "") -> None:
        """Write down work that no operator shows, such as that of a library's kernel."""
        entries, modules = self._steps[-1]
        for entry in work:
            entries.append(entry if entry.phase == self._phase else entry._replace(phase=self._phase))
            modules.append(module)

    def await_buckets(self, replica: Any) -> None:
        """Expect the all-reduces of a DistributedDataParallel: each of its buckets as soon as it is full."""
        for bucket in getattr(replica, "_buckets", ()):
            entry = _Bucket(num_bytes(bucket.flat), _format(bucket.flat), len(bucket.held), replica)
            self._waiting.update((id(parameter), entry) for parameter in bucket.held)

    def gradient_is_ready(self, parameter: torch.Tensor) -> None:
        """Note that a gradient was written; the last one of a bucket sends it."""
        bucket = self._waiting.get(id(parameter))
        if bucket is None or not bucket.replica.require_backward_grad_sync:
            return
        bucket.num_ready += 1
        if bucket.num_ready == bucket.num_gradients:
            self.add([Work("DDP bucket", "all_reduce", 0, bucket.num_bytes, 0, 0, bucket.number_format)])

    def _lies_here(self, args: Sequence[Any]) -> bool:
        """Whether an operator reads what lies on the device; one that reads the host alone is a copy from there."""
        read = _tensors(args)
        return not read or any(map(self._holds, read))

    def last_entries(self) -> Sequence[Work]:
        """Return what was written down since the last step began."""
        return self._steps[-1][0]

    def last_step(self, updates: int = 1) -> StepWork:
        """Return the last full step, of so many updates by optimizers: in the first one they still make their state.

        What a training workload generates and evaluates after its last step is not part of a step. What only infers is
        its last forward.
        """
        training = [i for i, (entries, _) in enumerate(self._steps) if any(e.phase == "optimizer" for e in entries)]
        if training:
            chosen, outside, first, views = training[-updates:], {"build", "generate", "evaluate"}, 0, 0
        else:
            step, first, views = self._forward
            chosen, outside = [step], {"build"}
        kept = [
            (entry, module)
            for index in chosen
            for entry, module in list(zip(*self._steps[index], strict=True))[first:]
            if entry.phase not in outside
        ]
        num_views = sum(self._views[index] for index in chosen) - views
        return StepWork(tuple(entry for entry, _ in kept), tuple(module for _, module in kept), num_views)
