"""Follow every storage of a run from birth to death, on tensors that have no memory.

A dispatch mode over fake tensors sees each operator of forward, backward and optimizer step, and the storages
it makes; a storage's death is its last reference going. What comes out is a log of blocks.

Promises:
- no tensor of the run has real memory, except tiny ones whose values are known, and the few samples on which a
  convolution or LSTM is asked what it allocates;
- the user's objects are not changed;
- what cannot be followed ends in an error that names the operator and the user's line, never in a wrong number;
- which device is traced is the business of the `Kernels` and the `TracedMemory` handed in, and not asked here;
- an addition counts as the autograd engine's only if the engine itself called it, and the node that is running hands a
  gradient to a place that receives several. Whether anybody else holds the first gradient is asked of its reference
  counts, compared with those of one that is known to be alone: counted once in each process, so no number here depends
  on the version of torch or Python.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from functools import cache
from traceback import extract_stack
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from batchwright.device.step import needs_closure
from batchwright.errors import CannotTraceError
from batchwright.simulated.operators.library_work import listen
from batchwright.simulated.ranks import on_shards
from batchwright.simulated.torch_patches.backend import count_no_devices
from batchwright.simulated.torch_patches.patches import applied
from batchwright.trace import known_values as value_shapes
from batchwright.trace.experts.routing import Routing
from batchwright.trace.host_batches import OutsideTensors, part_of_outside
from batchwright.trace.known_values import KnownValues, storage_key
from batchwright.trace.refused_operators import NotFollowedError, pieces_of, shapes_from, users_line
from batchwright.trace.storages import Block, FollowedStorages, Log, RunningModules
from batchwright.trace.work import WorkLog, fused_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType, TracebackType

    from torch import nn

    from batchwright.device.device import Kernels, Moment, TracedMemory

    Place = tuple[int, int]
    """One input of one autograd node: the node's number, and which of its inputs."""


# Which additions of a backward are the autograd engine's own. Where gradients of one tensor meet, the engine adds them
# up: in a real run into the gradient that came first if nobody else holds it (torch's input_buffer.cpp); under a
# dispatch mode, which it takes for a tensor subclass, always into a new one. A trace that took the latter for the truth
# would be too high by one gradient.

ADD = torch.ops.aten.add.Tensor
_ENGINE: Any = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
# What stands between an operator and the `__torch_dispatch__` of a mode.
_BETWEEN = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "trace/trace.py", "trace/programs/real_host.py")


class EngineAdds:
    """Recognises, in one trace, additions that a real backward makes in place."""

    def __init__(self) -> None:
        self._alone = counts_when_alone()
        self._roots: tuple[int, ...] = ()
        self._meeting_places: set[Place] = set()
        # The storages that the node which is running has made so far.
        self._node = -1
        self._of_node: set[int] = set()

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of what an operator of a backward has made."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        number = node._sequence_nr()
        if number != self._node:
            self._node = number
            self._of_node.clear()
        self._of_node.update(storage_key(tensor) for tensor in tensors)

    def is_in_place(self, args: Sequence[Any], counts: tuple[int, ...] | None) -> bool:
        """Whether a real run would add into `args[0]`, whose `counts` were taken where the mode was entered."""
        if counts is None or counts != self._alone or torch.is_grad_enabled():
            return False
        first, second = args[0], args[1]
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return False
        frame = engine_frame()
        node: Any = torch._C._current_autograd_node()
        if frame is None or node is None or not _is_dense(first):
            return False
        places = [(_number(after), position) for after, position in node.next_functions if after is not None]
        if not self._meeting_places_of(frame).intersection(places):
            return False
        # A formula may add tensors that it has made itself, and does that out of place. Only a node that hands two
        # gradients to one place (x * x) has the engine add such.
        return not self.is_of_the_node(first) or len(set(places)) < len(places)

    def is_of_the_node(self, tensor: torch.Tensor) -> bool:
        """Whether the node that is running has made this tensor."""
        node: Any = torch._C._current_autograd_node()
        return node is not None and node._sequence_nr() == self._node and storage_key(tensor) in self._of_node

    def _meeting_places_of(self, frame: FrameType) -> set[Place]:
        """The places that receive more than one gradient in the backward that this frame runs."""
        nodes = [
            root.grad_fn if isinstance(root, torch.Tensor) else getattr(root, "node", None)
            for root in frame.f_locals.get("t_outputs", ())
        ]
        roots = tuple(node._sequence_nr() for node in nodes if node is not None)
        if roots != self._roots:
            self._roots = roots
            self._meeting_places = _meeting_places(nodes)
        return self._meeting_places


def engine_frame() -> FrameType | None:
    """The frame that runs a backward, if the engine called this operator and no Python in between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_BETWEEN):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code is _ENGINE else None


def counts_of(args: Sequence[Any]) -> tuple[int, ...]:
    """How many hold the first of an operator's arguments: in C++, in Python, and its storage."""
    storage = args[0].untyped_storage()
    return args[0]._use_count(), sys.getrefcount(args[0]), torch._C._storage_Use_Count(storage._cdata)


@cache
def counts_when_alone() -> tuple[int, ...] | None:
    """The counts of a gradient that only the engine holds; None if this torch does not show them."""
    seen: list[tuple[int, ...]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            counts = counts_of(args) if func is ADD else None
            if counts is not None and engine_frame() is not None:
                seen.append(counts)
            return func(*args, **(kwargs or {}))

    look: Any = Look()  # type: ignore[no-untyped-call]
    count_no_devices()
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(), look:
            leaf = torch.ones(2, 2, requires_grad=True)
            # Two gradients that are fresh results meet at `twice`.
            twice = leaf * 2
            (twice.sin().sum() + (twice.cos() * 2).sum()).backward()
    except (AttributeError, RuntimeError):
        return None
    return seen[0] if len(seen) == 1 else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, each in a place of its own, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _meeting_places(roots: Iterable[Any]) -> set[Place]:
    received: Counter[Place] = Counter()
    waiting = [node for node in roots if node is not None]
    seen = {node._sequence_nr() for node in waiting}
    while waiting:
        for node, position in waiting.pop().next_functions:
            if node is None:
                continue
            received[_number(node), position] += 1
            if _number(node) not in seen:
                seen.add(_number(node))
                waiting.append(node)
    return {place for place, count in received.items() if count > 1}


def _number(node: Any) -> int:
    """The number of a node. Those that write into `.grad` all have the same one; their tensor tells them apart."""
    variable = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
    return node._sequence_nr() if variable is None else -id(variable)


# Operators that do a whole computation inside one call, with memory of their own that no rule of ours covers.
_UNSEEN_INSIDE = (
    "aten._transformer_encoder_layer_fwd",
    "aten._native_multi_head_attention",
    *(f"aten._linalg_{name}" for name in ("svd", "eigh", "det", "slogdet", "solve_ex")),
    *(
        f"aten.linalg_{name}"
        for name in ("qr", "eig", "lu", "cholesky", "inv", "lstsq", "ldl", "householder", "matrix_exp")
    ),
    "aten._fft_",
)


# What torch.get_rng_state() returns.
_RANDOM_STATE_BYTES = torch.get_rng_state().nbytes
_DEVICE = torch.ops.prim.device.default
_READ_SCALAR = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_IN_PLACE_ADD = torch.ops.aten.add_.Tensor
_aten = torch.ops.aten
# Formulas of backwards that write into fresh zeros; only under a mode do they copy them instead.
_INTO_ZEROS: dict[Any, Callable[..., Any]] = {
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
    _aten.put.default: _aten.put_.default,
}
# Likewise a formula that goes on writing into its own first result.
_INTO_ITS_OWN: dict[str, dict[Any, Callable[..., Any]]] = {
    "BinaryCrossEntropyWithLogitsBackward0": {
        _aten.sub.Tensor: _aten.sub_.Tensor,
        _aten.mul.Tensor: _aten.mul_.Tensor,
    }
}


@cache
def _is_made_of_others(kind: type) -> bool:
    """Whether tensors of this class hold others that lie in memory, and take operators apart over them."""
    return kind is not FakeTensor and hasattr(kind, "__tensor_flatten__")


class Trace(TorchDispatchMode):
    """The mode that sees every operator and keeps the log."""

    supports_higher_order_operators = True

    def __init__(self, kernels: Kernels, memory: TracedMemory, *, routing: str = "balanced") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = kernels
        self.log = Log()
        self.notes: dict[str, None] = {}
        self.values = KnownValues()
        self.routing = Routing(routing, self.values)
        self.optimizers: list[Any] = []
        # Whether an operator ran whose own memory is not seen: then the peak is a lower bound.
        self.hides_memory = False
        self._modules = RunningModules()
        self.storages = FollowedStorages(self.log, self._modules, memory, self._note, self._forget)
        self.work = WorkLog(memory.holds)
        self._owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooks = ExitStack()
        self._outside = OutsideTensors()
        self._engine_adds = EngineAdds()

    def phase(self, name: str) -> None:
        """Note that a phase begins; called by the step as it runs."""
        if self.log.phase == "optimizer":
            self._mark_optimizer_state()
        self._modules.clear()
        self.log.enter(name)
        self.work.enter(name)

    def _mark_optimizer_state(self) -> None:
        for optimizer in self.optimizers:
            for parameter, state in getattr(optimizer, "state", {}).items():  # torchao's CPUOffloadOptimizer has none
                name = self._owners.get(parameter, "") if isinstance(parameter, torch.Tensor) else ""
                for tensor in tree_iter(state):
                    if isinstance(tensor, torch.Tensor):
                        self.mark(tensor, "optimizer", "state", name)

    def watch(self, model: nn.Module) -> None:
        """Learn the names of the modules, and recognise gradients as they are made."""
        self._modules.learn(model)
        for name, parameter in model.named_parameters():
            name = name.replace("_orig_mod.", "")  # of a module that is compiled
            self._owners[parameter] = name
            for piece in pieces_of(parameter):
                self.storages.see(piece, "parameter")
                self.storages.note_on_host(piece)
            self.mark(parameter, "weights", "parameter", name)
            if parameter.requires_grad:
                self._hooks.callback(parameter.register_post_accumulate_grad_hook(self._mark_gradient).remove)
        for name, buffer in model.named_buffers():
            for piece in pieces_of(buffer):
                self.storages.see(piece, "buffer")
            self.mark(buffer, "weights", "buffer", name)
        for name, module in model.named_modules():
            for bucket in getattr(module, "gradient_buckets", ()):
                self.storages.see(bucket, "bucket")
                self.mark(bucket, "gradients", "bucket", name)
            self.work.await_buckets(module)

    def mark(self, tensor: torch.Tensor | None, part: str, operator: str, name: str) -> None:
        """Say what a block turned out to be, and whose it is."""
        if tensor is not None and tensor.layout is torch.sparse_coo:  # it lies in its indices and values
            self.mark(tensor._indices(), part, operator, name)
            tensor = tensor._values()
        for piece in () if tensor is None else pieces_of(tensor):
            block = self.storages.block_of(piece)
            if block is not None:
                block.part, block.operator, block.module = part, operator, name

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        self.mark(parameter.grad, "gradients", "gradient", self._owners.get(parameter, ""))
        self.work.gradient_is_ready(parameter)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say that graphs may be compiled while a trace goes on; else Dynamo would pass them by."""
        return True

    def __enter__(self) -> Trace:
        self._hooks.enter_context(
            applied(self._modules.seeing_calls(), self.storages.seeing_resizes(), self.storages.seeing_streams())
        )
        self._hooks.callback(listen, listen(self.work.add_library))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.close()
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._outside.give_back()
        # So that what the run made goes with it: the storages lead back here, in circles.
        self.storages.let_go()
        self.optimizers.clear()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on fake tensors and note the storages it made."""
        if isinstance(func, HigherOrderOperator):
            return self._run_with_random_state(func, args, kwargs or {})
        # Here and not deeper: whoever holds the arguments from here on would be counted too.
        counts = counts_of(args) if func is ADD and self.log.phase == "backward" else None
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked twice as often as all operators together
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if any(kind.__name__ == "DTensor" for kind in types):
            # One sharded over ranks works on its own shard, and that comes by here again.
            return on_shards(func, args, kwargs or {}, self.__torch_dispatch__)
        if any(map(_is_made_of_others, types)):
            return NotImplemented  # likewise: its own code takes the operator apart
        with self._kernels.following():
            args, arguments = self._kernels.take_arguments(func, args, kwargs or {}, self.storages.mode)
            self.storages.note_library(self._kernels.library_bytes(func, self.log.phase))
            return self._run(func, args, arguments, counts)

    def _run_with_random_state(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that a compiled graph recomputes: before it the random state is kept, or set back."""
        keeps = func is torch.ops.higher_order.run_and_save_rng_state
        if not keeps and func is not torch.ops.higher_order.run_with_rng_state:
            raise NotFollowedError(str(func), "it takes functions, and what they do in it is not followed")
        operator, *given = args if keeps else args[1:]
        _push_mode(self)
        try:
            state = torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)
            result = operator(*given, **kwargs)
        finally:
            _pop_mode()
        return (state, result) if keeps else result

    def _run(
        self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], counts: tuple[int, ...] | None = None
    ) -> Any:
        if func is _READ_SCALAR:
            self.storages.note_launch(args[0])
            return self._read_scalar(func, args[0])
        self.storages.note_launch(None)
        self._modules.note_node()
        for tensor in self._outside.meet(func, (*args, *kwargs.values()), self.log.phase):
            self.storages.born(tensor.untyped_storage().nbytes(), "from outside", part=part_of_outside(tensor))
            place = users_line(extract_stack())
            self._note(f"a real tensor of shape {tuple(tensor.shape)} from outside the workload was counted: {place}")
        func = self._as_without_a_mode(func, args, counts)
        # A collective that was waited for is the tensor it was; torch's own rule makes another one.
        outputs = args[0] if func is _WAIT else value_shapes.answer(self.values, func, args, kwargs, self._note)
        if outputs is None:
            outputs = self.routing.answer(func, args)
        rule = None if outputs is not None else self._kernels.shape_rule(func)
        if rule is not None:
            outputs = shapes_from(rule, func, args, kwargs)
        operator = str(func).removesuffix(".default")
        if operator.startswith(_UNSEEN_INSIDE):
            self.hides_memory = True
            self._note(f"what {operator} holds while it runs is not seen: the peak may be higher")
        tensors = [tensor for tensor in tree_iter(outputs) if isinstance(tensor, torch.Tensor)]
        self._see_moments(self._kernels.moments_of(func, args, tensors, kwargs), operator)
        self.work.note(func, args, kwargs, tensors, self._running_module)
        if self.log.phase == "backward":
            self._engine_adds.note(tensors)
        self.values.follow(func, args, kwargs, outputs)
        self.routing.follow(func, args, outputs)
        return outputs

    def _running_module(self) -> str:
        return self._modules.now(in_backward=self.log.phase == "backward")

    def _as_without_a_mode(
        self, func: Callable[..., Any], args: Any, counts: tuple[int, ...] | None
    ) -> Callable[..., Any]:
        """Return what a backward would have called if there were no dispatch mode: where it writes in place, that."""
        if self.log.phase != "backward":
            return func
        if func is ADD:
            return _IN_PLACE_ADD if self._engine_adds.is_in_place(args, counts) else func
        node: Any = torch._C._current_autograd_node()
        in_place = _INTO_ITS_OWN.get(node.name(), {}).get(func) if node is not None else None
        if in_place is not None:
            return in_place if self._engine_adds.is_of_the_node(args[0]) and engine_frame() is not None else func
        in_place = _INTO_ZEROS.get(func)
        if in_place is None or engine_frame() is None:
            return func
        block = self.storages.block_of(args[0])
        return in_place if block is not None and "zeros" in block.operator else func

    def _see_moments(self, moments: list[Moment], operator: str) -> None:
        """Note the outputs of an operator, and the kernel's own copies around them."""
        copies: dict[int, list[Block]] = {}
        for num_bytes, output in moments:
            if output is not None:
                if self.storages.see(output, operator) and output.is_complex():
                    self.hides_memory = True
                    self._note(
                        "conjugates of complex tensors are copied unseen, inside operators: the peak may be higher"
                    )
            elif num_bytes > 0:
                copies.setdefault(num_bytes, []).append(self.storages.born(num_bytes, operator, part="workspaces"))
            elif num_bytes < 0 and copies.get(-num_bytes):
                self.storages.died(copies[-num_bytes].pop())

    def note_kernel(self, func: Callable[..., Any], args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Note what an operator holds that a compiled graph has write into memory which is there already."""
        # No operator runs here, but a kernel may be asked, for real, what it holds.
        self.work.note(func, args, {}, [output], self._running_module)
        with _disable_current_modes(), self._kernels.following():
            self.storages.note_library(self._kernels.library_bytes(func, self.log.phase))
            self._see_moments(self._kernels.moments_of(func, args, [output], {}), str(func).removesuffix(".default"))

    def note_fused(self, name: str, twice: int, positions: int | None, *args: Any) -> None:
        """Note a kernel that Inductor wrote: `twice` of its tensors are read and written; it goes over `positions`."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if tensors:
            self.work.add([fused_kernel(name, tensors, twice=twice, positions=positions)], self._running_module())

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _forget(self, key: int) -> None:
        self.values.forget(key)
        self.routing.forget(key)

    def _read_scalar(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        value = self.values.read(tensor)
        if value is not None:
            return value
        if self.log.phase == "optimizer" and any(map(needs_closure, self.optimizers)):
            raise CannotTraceError(
                "the optimizer computes the loss inside its step, and decides by its values how often: such a step "
                "cannot be predicted.",
                remedy="bw.fit(workload) runs the step instead; or another optimizer",
            )
        if self.log.phase == "optimizer" and tensor.is_floating_point():
            # Adafactor scales its rate by the norm of a weight: a number that moves no memory.
            self._note("numbers that the optimizer reads from its tensors were taken as 1")
            return 1.0
        if self.log.phase == "generate" and tensor.dtype is torch.bool:
            # "Has every sequence ended?" depends on the tokens; the memory is that of the one that never ends.
            self._note("generation was taken to end at its full length, by no token")
            return False
        return func(tensor)
