"""The host is real, the card is simulated: how a whole program is traced, unmodified.

A workload's step is traced on tensors without memory alone. A program also reads files, shuffles, collates and prints,
so here only what lies on the card is without memory.

Promises:
- an operator that touches no tensor of the card runs for real;
- what is moved to the card becomes a tensor without memory; its values are known, unless they are weights;
- what is read back is known, or made up and counted: zeros, 1 for a single number, True for "all of them are";
- a size that depends on unknown values is the largest that it can be, and a note says so.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.data._utils import pin_memory

from batchwright.simulated.torch_patches.backend import NAME
from batchwright.simulated.torch_patches.patches import Patch, TorchPatches, applied
from batchwright.simulated.torch_patches.redirected_calls import RedirectedCalls, compiled_as_eager
from batchwright.trace.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.simulated.card import SimulatedCard

_aten = torch.ops.aten
_COPY, _COPY_INTO, _EQUAL = _aten._to_copy.default, _aten.copy_.default, _aten.equal.default
_READ_SCALAR = _aten._local_scalar_dense.default
_ALL = (_aten.all.default, _aten.all.dim, _aten._is_all_true.default)
_MASKS = (torch.bool, torch.uint8)


class RealHostTrace(Trace):
    """The trace of a program: it follows what touches the card, and lets the host compute."""

    def __init__(self, card: SimulatedCard) -> None:
        super().__init__(card.kernels, card)
        self.num_made_up = 0
        self.storages.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._says_all: set[int] = set()
        self._outside = _HostTensors()  # type: ignore[assignment]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator: for real on the host, without memory on the card."""
        if not _touches_card(args, kwargs):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            if func is _READ_SCALAR:
                return self._read_scalar(func, args[0])
            if func is _EQUAL:
                return self._are_equal(*args)
            if func is _COPY and isinstance(args[0], FakeTensor) and _is_host((kwargs or {}).get("device")):
                return self._to_host(args[0], (kwargs or {}).get("dtype"))
            if func is _COPY_INTO and not isinstance(args[0], FakeTensor):
                return args[0].copy_(self._to_host(args[1], None))
        with self.storages.mode:
            try:
                outputs = super().__torch_dispatch__(func, types, args, kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException):
                outputs = self._largest(func, types, args)
        if func in (_COPY, _COPY_INTO):
            self._learn_moved(outputs, args[1] if func is _COPY_INTO else args[0])
        elif func in _ALL:
            self._says_all.add(outputs.untyped_storage()._cdata)
        return outputs

    def _read_scalar(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        value = self.values.read(tensor)
        if value is not None:
            return value
        self.num_made_up += 1
        if tensor.dtype is torch.bool:
            return tensor.untyped_storage()._cdata in self._says_all
        return 1.0 if tensor.is_floating_point() else 0

    def _are_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        real = self.values.real(first), self.values.real(second)
        if real[0] is not None and real[1] is not None:
            with _disable_current_modes():
                return torch.equal(*real)  # type: ignore[arg-type]
        self.num_made_up += 1
        return first.shape == second.shape

    def _to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        known = self.values.real(tensor)
        with _disable_current_modes():
            if known is not None:
                return known.to(dtype or tensor.dtype, copy=True)
            self.num_made_up += tensor.numel()
            return torch.zeros(tuple(tensor.shape), dtype=dtype or tensor.dtype)

    def _learn_moved(self, moved: torch.Tensor, given: Any) -> None:
        """Know what was copied from the host; weights are too many, and are never read."""
        if isinstance(given, FakeTensor | nn.Parameter) or not isinstance(moved, FakeTensor):
            return
        if given.requires_grad or not given.numel() or given.shape != moved.shape:
            return
        with _disable_current_modes():
            real = given.detach().to(moved.dtype, copy=True)
            real = torch.empty_strided(moved.size(), moved.stride(), dtype=moved.dtype).copy_(real)
        self.values.learn_batch(moved, real)

    def _largest(self, func: Callable[..., Any], types: Any, args: Any) -> Any:
        """Answer an operator whose result's size depends on values that are not known."""
        device = torch.device(NAME, 0)
        first = args[0]
        if func is _aten.nonzero.default:
            self._note("nonzero: every element was taken to be set")
            return self._empty(types, (first.numel(), first.dim()), torch.int64, device)
        if func is _aten.masked_select.default:
            self._note("a mask was taken to keep every element")
            return self._empty(
                types, (torch.broadcast_shapes(first.shape, args[1].shape).numel(),), first.dtype, device
            )
        if func is _aten.index.Tensor and any(index is not None and index.dtype in _MASKS for index in args[1]):
            self._note("a mask was taken to keep every element")
            indices: list[Any] = []
            for index in args[1]:
                if index is None or index.dtype not in _MASKS:
                    indices.append(index)
                else:
                    indices += [
                        self._empty(types, (index.numel(),), torch.int64, device) for _ in range(max(1, index.dim()))
                    ]
            return super().__torch_dispatch__(func, types, (first, indices))
        if func in (_aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default):
            self._note("unique: every element was taken to differ")
            values = self._empty(types, (first.numel(),), first.dtype, device)
            counts = [self._empty(types, (first.numel(),), torch.int64, device) for _ in range(2)]
            return (values, *counts)
        raise DynamicOutputShapeException(func)  # type: ignore[arg-type]

    def _empty(self, types: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        return super().__torch_dispatch__(
            _aten.empty.memory_format, types, (list(shape),), {"dtype": dtype, "device": device}
        )


class _HostTensors:
    """Real tensors among the arguments of the card's operators are the program's own, on the host."""

    def meet(self, *_: Any) -> tuple[()]:
        return ()

    def give_back(self) -> None:
        pass


def _touches_card(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type in ("cuda", NAME))
        for value in tree_iter((args, kwargs))
    )


def _is_host(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == "cpu"


@contextmanager
def program_on_card(card: SimulatedCard) -> Iterator[RealHostTrace]:
    """Let a program run with a card that is simulated."""
    trace = RealHostTrace(card)
    with ExitStack() as stack:
        stack.enter_context(TorchPatches())
        device = stack.enter_context(card.running())
        stack.enter_context(applied(_ways_out(trace), _ways_of_programs(), compiled_as_eager(trace.notes.setdefault)))
        stack.enter_context(trace)
        stack.enter_context(RedirectedCalls(device))
        yield trace


def _ways_out(trace: RealHostTrace) -> Iterator[Patch]:
    """Values of card tensors where Python asks for them past every operator."""

    def numbers(tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return trace._to_host(tensor.detach(), None)

    def formatted(tensor: torch.Tensor, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)

    yield Patch(FakeTensor, "numpy", lambda tensor, **_: numbers(tensor).numpy())
    yield Patch(FakeTensor, "tolist", lambda tensor: numbers(tensor).tolist())
    yield Patch(FakeTensor, "__format__", formatted)
    yield Patch(FakeTensor, "__reduce_ex__", _reduce)


def _reduce(tensor: torch.Tensor, _: Any) -> Any:
    """Have a checkpoint hold shapes, and no values: there are none."""
    return _without_values, (tuple(tensor.shape), tensor.dtype)


def _without_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ways_of_programs() -> Iterator[Patch]:
    """Modules that move real weights to the card, threads that would, and memory that a card alone can pin."""
    yield Patch(pin_memory, "pin_memory", lambda data, device=None: data)
    yield Patch(nn.Module, "_apply", _moving_in_place(nn.Module._apply))
    yield Patch(ThreadPoolExecutor, "submit", _run_at_once)


def _run_at_once(_: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    # Modes are a thread's own: what another thread would do on the card (transformers loads weights so) is done here.
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    return future


def _moving_in_place(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Have `module.to("cuda")` put weights of the card into the very parameters that optimizers hold."""

    def move(self: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        held = [parameter for parameter in self._parameters.values() if parameter is not None]
        if any(isinstance(parameter, FakeTensor) for parameter in held):
            return apply(self, function, recurse)
        for module in self.children() if recurse else ():
            module._apply(function)
        for parameter in held:
            _move_real(parameter, function)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
        return self

    return move


def _move_real(parameter: torch.Tensor, function: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        moved = function(parameter)
    if moved is parameter:
        return
    if not isinstance(moved, FakeTensor):
        parameter.data = moved
        return
    new = nn.Parameter(moved.detach(), parameter.requires_grad)
    parameter.grad = None
    # `.data =` is refused between kinds of tensors, and torch's own swap where anything refers weakly to the tensor.
    torch._C._swap_tensor_impl(parameter, new)
    parameter.__class__, new.__class__ = new.__class__, parameter.__class__
    parameter.__dict__, new.__dict__ = new.__dict__, parameter.__dict__
