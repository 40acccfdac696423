"""The host is real, the card is simulated: how a whole program is traced, unmodified.

A workload's step is traced on tensors without memory alone. A program also reads files, shuffles, collates and prints,
so here only what lies on the card is without memory.

Promises:
- an operator that touches no tensor of the card runs for real;
- what is moved to the card becomes a tensor without memory; its values are known, unless they are weights;
- what is read back is known, or made up and counted: zeros, 1 for a single number, True for "all of them are";
- what is computed is taken to be finite, and what is asserted of it to hold; a condition that is read again and again
  without a backward between is met in the end, and a note says so;
- a size that depends on unknown values is the largest that it can be, or that of zeros, and a note says which; a
  count that is read is the largest, too; values that are not known are taken to stand in order;
- threads that the program starts see the card too, one operator at a time.
"""

from __future__ import annotations

import dis
import math
import sys
import threading
import weakref
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.data._utils import pin_memory

from batchwright.device.host import give_back
from batchwright.errors import CannotTraceError
from batchwright.simulated.pipelines import stages_of_program
from batchwright.simulated.ranks import one_rank_if_asked, simulated_ranks
from batchwright.simulated.torch_patches.backend import NAME
from batchwright.simulated.torch_patches.compiled import Compiler
from batchwright.simulated.torch_patches.patches import Patch, TorchPatches, applied, do_nothing, start_inside
from batchwright.simulated.torch_patches.redirected_calls import (
    DefaultDevice,
    RedirectedCalls,
    backwards_of_functions,
    move_with_gradient,
    moving_parameters,
    put_into,
)
from batchwright.trace.host_batches import OutsideTensors
from batchwright.trace.programs.checkpoints import checkpoints_of_the_card
from batchwright.trace.programs.host_weights import HostWeights
from batchwright.trace.programs.repeated_forwards import RepeatedForwards
from batchwright.trace.refused_operators import users_frame
from batchwright.trace.sparse_tensors import SparseTensors
from batchwright.trace.trace import Trace
from batchwright.trace.upper_bounds import UpperBounds
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from batchwright.simulated.card import SimulatedCard

_aten = torch.ops.aten
_COPY, _COPY_INTO, _EQUAL = _aten._to_copy.default, _aten.copy_.default, _aten.equal.default
_READ_SCALAR = _aten._local_scalar_dense.default
# How `isfinite`, `isnan` and `isinf` come here: of what is finite each has one answer.
_OF_FINITE: dict[Any, bool] = {
    _aten.isnan.default: False,
    _aten.isinf.default: False,
    _aten.isfinite.default: True,
}
_OF_ITSELF = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}
_OF_INFINITY = {_aten.eq.Scalar: False, _aten.ne.Scalar: True}
# A condition read so often in a row is what a loop waits for: that a solver's error is small enough, say.
_PATIENCE = 16
_ALL = (_aten.all.default, _aten.all.dim, _aten._is_all_true.default)
# That any of them is wrong is what a program guards against.
_ANY = (_aten.any.default, _aten.any.dim)
_RANDOM_ORDERS = (_aten.randperm.default, _aten.randperm.generator)
_ORDERS = (*_RANDOM_ORDERS, _aten.sort.default, _aten.sort.stable)
_LARGEST_ORDER = 2**24
_MASKS = (torch.bool, torch.uint8)
# What is copied to the card is known up to this size, in bytes: lengths, labels, tokens and pictures, not weights.
_LARGEST_KNOWN = 2**28
# Values that an operator is computed from on the host to see how much comes out.
_MOST_ZEROS = 2**26


class RealHostTrace(Trace):
    """The trace of a program: it follows what touches the card, and lets the host compute."""

    def __init__(self, card: SimulatedCard) -> None:
        super().__init__(card.kernels, card)
        self.num_made_up = 0
        self.values.is_of_program = True
        self.storages.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._says_all: set[int] = set()
        self._says_any: set[int] = set()
        self._reads: Counter[tuple[int, int]] = Counter()
        self._outside = _HostTensors()
        self._weights = HostWeights()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._turn = threading.RLock()
        self._sparse = SparseTensors(self)
        self._bounds = UpperBounds(self.values)
        self.when_pipelined: Callable[[], object] = lambda: None
        """Told when the program makes a pipeline's schedule, whose backwards are not all alike."""
        self.forwards = RepeatedForwards(card.allocator.stats, lambda tensor: self.values.real(tensor) is not None)

    def _note_pipeline(self, text: str) -> None:
        self._note(text)
        self.when_pipelined()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator: for real on the host, without memory on the card."""
        if not _touches_card(args, kwargs):
            left_out = self._weights.answer(func, args, kwargs or {})
            return func(*args, **(kwargs or {})) if left_out is None else left_out
        with self._turn:
            if torch.is_inference_mode_enabled() and _is_composite(func):
                # Without autograd torch takes nothing apart before it comes here.
                _push_mode(self)
                try:
                    return func.decompose(*args, **(kwargs or {}))  # type: ignore[attr-defined]
                finally:
                    _pop_mode()
            return self._run_on_card(func, types, args, kwargs or {})

    def _run_on_card(self, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            if self._sparse.is_met(func, args):
                return self._sparse.run(func, args, kwargs)
            if func in (_READ_SCALAR, _aten.item.default):
                return self._read_scalar(func, args[0])
            if func is _EQUAL:
                return self._are_equal(*args)
            if func is _COPY and isinstance(args[0], FakeTensor) and _is_host(kwargs.get("device")):
                return self._to_host(args[0], kwargs.get("dtype"))
            if func is _COPY_INTO and not isinstance(args[0], FakeTensor):
                return args[0].copy_(self._to_host(args[1], None))
        with self.storages.mode:
            try:
                outputs = super().__torch_dispatch__(func, types, args, kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException):
                outputs = self._largest(func, types, args, kwargs)
        if func in (_COPY, _COPY_INTO):
            self._learn_moved(outputs, args[1] if func is _COPY_INTO else args[0])
        elif func in _ALL:
            self._says_all.add(outputs.untyped_storage()._cdata)
        elif func in _ANY:
            self._says_any.add(outputs.untyped_storage()._cdata)
        elif (of_finite := _said_of_finite(func, args)) is not None:
            self.values.learn(outputs, lambda: torch.full(tuple(outputs.shape), of_finite))
        elif func in _ORDERS:
            self._learn_order(func, args, outputs)
        self._bounds.follow(func, args, outputs)
        return outputs

    def phase(self, name: str) -> None:
        """Note that a phase begins; what was waited for is over."""
        super().phase(name)
        self._reads.clear()

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._says_all.discard(key)
        self._says_any.discard(key)
        self._bounds.forget(key)

    def see_model(self, model: nn.Module) -> None:
        """Learn which tensors of the card are a model's, once it lies there."""
        if model not in self._models and any(isinstance(weight, FakeTensor) for weight in model.parameters()):
            self._models.add(model)
            self.watch(model)

    def _read_scalar(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        value = self.values.read(tensor)
        if value is not None:
            return value
        self.num_made_up += 1
        if tensor.dtype is torch.bool:
            key = tensor.untyped_storage()._cdata
            is_expected = bool(self._bounds.condition(tensor))
            return key in self._says_all or (key not in self._says_any and self._is_met(is_expected=is_expected))
        return 1.0 if tensor.is_floating_point() else self._bounds.of(tensor) or 0

    def _is_met(self, *, is_expected: bool) -> bool:
        """Whether a condition that the program reads, and whose value is not known, is taken to be met."""
        frame = users_frame(sys._getframe())
        if frame is None:
            return False
        if is_asserting(frame):
            return True
        place = id(frame.f_code), frame.f_lasti
        self._reads[place] += 1
        if self._reads[place] % _PATIENCE:
            return is_expected
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        met = "not to be met" if is_expected else "to be met"
        self._note(f"{line}: a condition on unknown values was read {_PATIENCE} times, and then taken {met}")
        return not is_expected

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
            bound = None if tensor.dtype is torch.bool else self._bounds.of(tensor)
            if bound:
                return torch.full(tuple(tensor.shape), bound, dtype=dtype or tensor.dtype)
            return torch.zeros(tuple(tensor.shape), dtype=dtype or tensor.dtype)

    def _learn_moved(self, moved: torch.Tensor, given: Any) -> None:
        """Know what was copied from the host; weights are too many, and are never read."""
        if isinstance(given, FakeTensor | nn.Parameter) or not isinstance(moved, FakeTensor):
            return
        if given.requires_grad or not 0 < given.nbytes <= _LARGEST_KNOWN or given.shape != moved.shape:
            return
        with _disable_current_modes():
            real = given.detach().to(moved.dtype, copy=True)
            real = torch.empty_strided(moved.size(), moved.stride(), dtype=moved.dtype).copy_(real)
        self.values.learn_batch(moved, real)

    def _largest(self, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer an operator whose result's size depends on values that are not known."""
        first = args[0]
        if func is _aten.nonzero.default:
            self._note("nonzero: every element was taken to be set")
            return self._empty(types, (first.numel(), first.dim()), torch.int64)
        if func is _aten.masked_select.default:
            self._note("a mask was taken to keep every element")
            return self._empty(types, (torch.broadcast_shapes(first.shape, args[1].shape).numel(),), first.dtype)
        if func is _aten.index.Tensor and any(index is not None and index.dtype in _MASKS for index in args[1]):
            self._note("a mask was taken to keep every element")
            indices: list[Any] = []
            for index in args[1]:
                if index is None or index.dtype not in _MASKS:
                    indices.append(index)
                else:
                    indices += [self._empty(types, (index.numel(),), torch.int64) for _ in range(max(1, index.dim()))]
            return super().__torch_dispatch__(func, types, (first, indices))
        if func in (_aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default):
            self._note("unique: as many elements as can were taken to differ")
            if func is _aten.unique_dim.default:
                rows = (first.shape[args[1]],)
                return self._empty(types, tuple(first.shape), first.dtype), *self._empties(types, rows, rows)
            most = 2 if first.dtype is torch.bool else self.routing.range_of(first)
            count = (first.numel() if most is None else min(most, first.numel()),)
            return self._empty(types, count, first.dtype), *self._empties(types, tuple(first.shape), count)
        if func is _aten.bincount.default:
            return self._count_chosen(types, first, *args[1:], **kwargs)
        if func is _aten.repeat_interleave.Tensor:
            bound = self._bounds.of(first)
            self._note(f"repeat_interleave: each count was taken as {1 if bound is None else bound}")
            return self._empty(types, (first.numel() * (1 if bound is None else bound),), first.dtype)
        return self._like_that_of_zeros(func, types, args, kwargs)

    def _count_chosen(self, types: Any, chosen: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
        """Count how often each number occurs, of numbers that are not known: each as often as the others."""
        bound, choices = self._bounds.of(chosen), self.routing.range_of(chosen)
        size = max(minlength, choices or 0, 0 if bound is None else bound + 1, 1)
        self._note("bincount: numbers that are not known were taken to occur equally often")
        often, rest = divmod(chosen.numel(), size)
        counts: torch.Tensor = self._empty(types, (size,), torch.int64 if weights is None else weights.dtype)
        if weights is None:
            self.values.learn(counts, lambda: torch.full((size,), often) + (torch.arange(size) < rest))
        return counts

    def _learn_order(self, func: Any, args: Any, outputs: Any) -> None:
        """Take unknown values to be in order already: what is known of each can then be put in order with them."""
        order = outputs if func in _RANDOM_ORDERS else outputs[1]
        if order.dim() == 1 and 0 < order.nbytes <= _LARGEST_ORDER and self.values.real(order) is None:
            with _disable_current_modes():
                self.values.keep(order, torch.arange(order.numel(), dtype=order.dtype))

    def _like_that_of_zeros(self, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        size = sum(tensor.numel() for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor))
        if size > _MOST_ZEROS:
            raise DynamicOutputShapeException(func)  # type: ignore[arg-type]
        self._note(f"{func}: what comes out depends on values that are not known; zeros were taken for them")
        real = tree_map(lambda value: self._to_host(value, None) if isinstance(value, FakeTensor) else value, args)
        options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        with _disable_current_modes():
            outputs = func(*real, **options)
        return tree_map(
            lambda value: (
                self._empty(types, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            ),
            outputs,
        )

    def _empties(self, types: Any, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(self._empty(types, shape, torch.int64) for shape in shapes)

    def _empty(self, types: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        options = {"dtype": dtype, "device": torch.device(NAME, 0)}
        return super().__torch_dispatch__(_aten.empty.memory_format, types, (list(shape),), options)


class _HostTensors(OutsideTensors):
    """Real tensors among the arguments of the card's operators are the program's own, on the host."""

    def meet(self, *_: Any) -> Iterator[torch.Tensor]:
        return iter(())


def _is_composite(func: Any) -> bool:
    name = func.name()
    return name.startswith("aten::") and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    )


def _said_of_finite(func: Any, args: Any) -> bool | None:
    """What an operator says of values that are finite, if it tells them from others."""
    if func in _OF_FINITE:
        return _OF_FINITE[func]
    if func in _OF_ITSELF and args[0] is args[1]:
        return _OF_ITSELF[func]
    if func in _OF_INFINITY and isinstance(args[1], float) and math.isinf(args[1]):
        return _OF_INFINITY[func]
    return None


def is_asserting(frame: FrameType) -> bool:
    """Whether a frame stands at the condition of an `assert`."""
    ahead = iter(dis.get_instructions(frame.f_code))
    for instruction in ahead:
        if instruction.offset == frame.f_lasti:
            break
    for instruction in islice(ahead, 3):
        if instruction.opname == "LOAD_ASSERTION_ERROR" or instruction.argval is AssertionError:
            return True
        if "JUMP" not in instruction.opname and instruction.opname not in ("TO_BOOL", "NOT_TAKEN", "CACHE"):
            return False
    return False


def _touches_card(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(value, FakeTensor)
        or (isinstance(value, torch.device) and value.type in ("cuda", NAME))
        or (type(value).__name__ == "DTensor" and isinstance(value._local_tensor, FakeTensor))
        for value in tree_iter((args, kwargs))
    )


def _is_host(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == "cpu"


@contextmanager
def program_on_card(card: SimulatedCard, *, devices: int | None = None) -> Iterator[RealHostTrace]:
    """Let a program run with a card that is simulated; as the first of `devices` ranks, if it is one of several."""
    trace = RealHostTrace(card)
    with ExitStack() as stack:
        stack.enter_context(TorchPatches())
        device, default = stack.enter_context(card.running()), DefaultDevice()
        stack.enter_context(
            one_rank_if_asked()
            if devices is None
            else simulated_ranks(devices, stages=stages_of_program(trace.phase, trace._note_pipeline))
        )
        give_back()  # so that large blocks of the host are address space until they are written to

        @contextmanager
        def seeing_the_card() -> Iterator[None]:
            with RedirectedCalls(device, default):
                _push_mode(trace)
                try:
                    yield
                finally:
                    _pop_mode()

        stack.enter_context(
            applied(
                # As under a launcher: a program may count its cards, though it works on the first.
                *([_counting_cards(devices)] if devices is not None else []),
                _ways_out(trace),
                _plain_on_card(trace._note),
                _ways_of_programs(seeing_the_card, devices or 1, trace.notes.setdefault),
                trace._weights.seeing_parameters(),
                default.patches(),
                backwards_of_functions(),
                checkpoints_of_the_card(),
            )
        )
        compiler = Compiler(device, trace.notes.setdefault, trace.note_kernel, trace.note_fused, card.card.capability)
        stack.enter_context(compiler.running())
        stack.enter_context(trace)
        stack.enter_context(RedirectedCalls(device, default))
        yield trace


def _counting_cards(devices: int) -> Iterator[Patch]:
    for place in (torch.cuda, torch.accelerator):
        yield Patch(place, "device_count", lambda: devices)


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


def _plain_on_card(note: Callable[[str], object]) -> Iterator[Patch]:
    """Tensors of a program's own class that come to the card: one without memory has a class already."""
    as_subclass: Any = torch.Tensor.as_subclass

    def as_it_is(tensor: torch.Tensor, cls: type) -> Any:
        if not isinstance(tensor, FakeTensor):
            return as_subclass(tensor, cls)
        note(f"tensors of the class {cls.__name__} are plain ones on the card: what else they hold stays on the host")
        return tensor

    yield Patch(torch.Tensor, "as_subclass", as_it_is)


def _ways_of_programs(
    seeing_the_card: Callable[[], AbstractContextManager[None]], devices: int, note: Callable[[str], object]
) -> Iterator[Patch]:
    """Modules that move real weights to the card, threads, processes, and memory that a card alone can pin."""
    yield Patch(pin_memory, "pin_memory", lambda data, device=None: data)
    # `module.to("cuda")` puts weights of the card into the very parameters that optimizers hold.
    # One that is there already, as a tied weight may be, moves as on a card that a workload is traced on.
    yield moving_parameters(_move, lambda held: True)

    def start(thread: threading.Thread) -> None:
        run = thread.run

        def run_on_card() -> None:
            with seeing_the_card():
                run()

        thread.run = run_on_card  # type: ignore[method-assign]
        start_inside(thread)

    yield Patch(threading.Thread, "start", start)

    # A graph of operators is drawn from values and addresses that are not there.
    yield Patch(torch.jit, "trace", lambda module, *_, **__: module)
    writer = getattr(sys.modules.get("torch.utils.tensorboard.writer"), "SummaryWriter", None)
    if writer is not None:
        yield Patch(writer, "add_graph", do_nothing)

    def spawn(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if nprocs != devices:
            raise CannotTraceError(
                f"the program starts {counted(nprocs, 'process')}, and {devices} of the card are simulated.",
                remedy=f"devices={nprocs}",
            )
        note(f"of {counted(nprocs, 'process')} that the program starts the first was run")
        function(0, *args)

    yield Patch(torch.multiprocessing, "spawn", spawn)


def _move(parameter: Any, function: Callable[[Any], Any]) -> None:
    is_of_card = isinstance(parameter, FakeTensor) or is_traceable_wrapper_subclass(parameter)
    (move_with_gradient if is_of_card else _move_real)(parameter, function)


def _move_real(parameter: torch.Tensor, function: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        moved = function(parameter)
    if moved is parameter:
        return
    if not isinstance(moved, FakeTensor):
        parameter.data = moved
        return
    gradient, parameter.grad = parameter.grad, None
    put_into(parameter, moved)
    if gradient is not None:
        parameter.grad = function(gradient)
