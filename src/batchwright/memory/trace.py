"""Follow every storage of a run from birth to death, on tensors that have no memory.

A dispatch mode over fake tensors sees each operator of forward, backward and optimizer step, and the storages
it makes; a storage's death is its last reference going. What comes out is a log of blocks.

Promises:
- no tensor of the run has real memory, except tiny ones whose values are known, and the few samples on which a
  convolution or LSTM is asked what it allocates;
- the user's objects are not changed;
- what cannot be followed ends in an error that names the operator and the user's line, never in a wrong number.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from traceback import extract_stack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from batchwright.memory.blocks import Block, Log
from batchwright.memory.kernels import SHAPE_RULES, moments_of
from batchwright.memory.known_values import KnownValues
from batchwright.memory.outside_tensors import OutsideTensors, part_of_outside, users_line
from batchwright.memory.refusals import local_part, shapes_from, storage_of
from batchwright.memory.routing import Routing
from batchwright.memory.running_modules import RunningModules
from batchwright.simulated.backend import card_device, is_on_card

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import nn

    from batchwright.device.moments import Moment
    from batchwright.simulated.simulated_card import SimulatedCard

# Operators that do a whole computation inside one call, with memory of their own that no rule of ours covers.
_UNSEEN_INSIDE = (
    "aten._transformer_encoder_layer_fwd",
    "aten._native_multi_head_attention",
    *(f"aten._linalg_{name}" for name in ("svd", "eigh", "det", "slogdet", "solve_ex")),
    *(f"aten.linalg_{name}" for name in ("qr", "eig", "lu", "cholesky", "inv", "lstsq", "ldl", "householder")),
    "aten._fft_",
)


class _Host:
    """The kernels of the CPU."""

    moments_of = staticmethod(moments_of)


_HOST = _Host()
_COPY = torch.ops.aten._to_copy.default
_READ_SCALAR = torch.ops.aten._local_scalar_dense.default
_IN_PLACE: dict[Any, Callable[..., Any]] = {torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src}


class Trace(TorchDispatchMode):
    """The mode that sees every operator and keeps the log."""

    def __init__(self, *, routing: str = "balanced", card: SimulatedCard | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.card = card
        self.log = Log()
        self.notes: dict[str, None] = {}
        self.values = KnownValues()
        self.routing = Routing(routing, self.values)
        self.optimizers: list[Any] = []
        self.mode: Any = None
        """The mode of the run's own fake tensors."""
        # Whether an operator ran whose own memory is not seen: then the peak is a lower bound.
        self.hides_memory = False
        self._alive: dict[int, Block] = {}
        self._on_host: set[int] = set()
        self._modules = RunningModules()
        self._owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooks = ExitStack()
        self._outside = OutsideTensors()

    def phase(self, name: str) -> None:
        """Note that a phase begins; called by the step as it runs."""
        if self.log.phase == "optimizer":
            self._mark_optimizer_state()
        self._modules.clear()
        self.log.enter(name)

    def _mark_optimizer_state(self) -> None:
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                name = self._owners.get(parameter, "") if isinstance(parameter, torch.Tensor) else ""
                for tensor in tree_iter(state):
                    if isinstance(tensor, torch.Tensor):
                        self.mark(tensor, "optimizer", "state", name)

    def watch(self, model: nn.Module) -> None:
        """Learn the names of the modules, and recognise gradients as they are made."""
        self._modules.learn(model)
        for name, parameter in model.named_parameters():
            self._owners[parameter] = name
            self._see(parameter, "parameter")
            self.mark(parameter, "weights", "parameter", name)
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._mark_gradient)
                self._hooks.callback(handle.remove)
        for name, buffer in model.named_buffers():
            self._see(buffer, "buffer")
            self.mark(buffer, "weights", "buffer", name)
        for name, module in model.named_modules():
            for bucket in getattr(module, "gradient_buckets", ()):
                self._see(bucket, "bucket")
                self.mark(bucket, "gradients", "bucket", name)

    def mark(self, tensor: torch.Tensor | None, part: str, operator: str, name: str) -> None:
        """Say what a block turned out to be, and whose it is."""
        block = None if tensor is None else self._alive.get(local_part(tensor).untyped_storage()._cdata)
        if block is not None:
            block.part, block.operator, block.module = part, operator, name

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        self.mark(parameter.grad, "gradients", "gradient", self._owners.get(parameter, ""))

    def __enter__(self) -> Trace:
        self._modules.watch(self._hooks)
        self._see_resizing()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.close()
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._outside.give_back()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on fake tensors and note the storages it made."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # one sharded over ranks works on its own shard, and that comes by here again
        if self.card is None:
            return self._run(func, args, kwargs or {})
        kwargs = kwargs or {}
        # Whatever asks a tensor for its device from here on must hear the truth, not that it is on a GPU.
        with torch._C.DisableTorchFunction():
            if func is _COPY:
                # A real tensor is taken for a fake one of its kind. Fake ones compute with small constants for real,
                # and on the card there is nothing to compute with.
                given = args[0] if isinstance(args[0], FakeTensor) else self.mode.from_tensor(args[0])
                given.constant = None
                args = (given, *args[1:])
            # A device that was not named in a call of torch's but handed on inside of one.
            args = tuple(card_device(value) for value in args)
            kwargs = {name: card_device(value) for name, value in kwargs.items()}
            self._library_takes(self.card.workspaces_for(func, self.log.phase))
            return self._run(func, args, kwargs)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _READ_SCALAR:
            return self._read_scalar(func, args[0])
        self._modules.note_node()
        for tensor in self._outside.meet(func, (*args, *kwargs.values()), self.log.phase):
            self._born(tensor.untyped_storage().nbytes(), "from outside", part=part_of_outside(tensor))
            place = users_line(extract_stack())
            self.notes[
                f"a real tensor of shape {tuple(tensor.shape)} from outside the workload was counted: {place}"
            ] = None
        outputs = self._scattered_in_place(func, args)
        if outputs is None:
            outputs = self.routing.answer(func, args)
        if outputs is None:
            rule = SHAPE_RULES.get(func, func) if self.card is None else func
            outputs = shapes_from(rule, func, args, kwargs)
        operator = str(func).removesuffix(".default")
        if operator.startswith(_UNSEEN_INSIDE):
            self.hides_memory = True
            self.notes[f"what {operator} holds while it runs is not seen: the peak may be higher"] = None
        made = [tensor for tensor in tree_iter(outputs) if isinstance(tensor, torch.Tensor)]
        self._see_made((self.card or _HOST).moments_of(func, args, made), operator)
        self.values.follow(func, args, kwargs, outputs)
        self.routing.follow(func, args, outputs)
        return outputs

    def _scattered_in_place(self, func: Callable[..., Any], args: Any) -> Any:
        """Backward of topk, median and their like writes into fresh zeros; only under a mode does it copy them."""
        in_place = _IN_PLACE.get(func)
        if in_place is None or self.log.phase != "backward" or self._modules.are_running:
            return None
        block = self._alive.get(args[0].untyped_storage()._cdata)
        return in_place(*args) if block is not None and "zeros" in block.operator else None

    def _see_made(self, moments: list[Moment], operator: str) -> None:
        """Note the outputs of an operator, and the kernel's own copies around them."""
        copies: dict[int, list[Block]] = {}
        for num_bytes, output in moments:
            if output is not None:
                self._see(output, operator)
            elif num_bytes > 0:
                copies.setdefault(num_bytes, []).append(self._born(num_bytes, operator, part="workspaces"))
            elif num_bytes < 0 and copies.get(-num_bytes):
                self._died(copies[-num_bytes].pop())

    def _library_takes(self, num_bytes: int) -> None:
        if num_bytes:
            block = Block(num_bytes, self.log.phase, "", "cuBLAS", (), "workspaces")
            self.log.changes.append((block, num_bytes))

    def _see(self, tensor: torch.Tensor, operator: str) -> None:
        if isinstance(tensor, FakeTensor) and self.mode is not None and tensor.fake_mode is not self.mode:
            return  # somebody else's thought: sharded tensors find out their shapes on fake ones of full size
        storage = storage_of(tensor, operator)
        key, num_bytes = storage._cdata, storage.nbytes()
        if self.card is not None and not is_on_card(local_part(tensor)):
            # The host's memory is another question; but its values may be known, and must be forgotten in time.
            if key not in self._on_host:
                self._on_host.add(key)
                weakref.finalize(storage, self._storage_died, key)
            return
        block = self._alive.get(key)
        if block is not None:
            self._resized(block, num_bytes, operator)
            return
        if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
            self.notes["some tensors are real: what they hold was counted, but was also allocated"] = None
        if tensor.is_complex():
            self.hides_memory = True
            self.notes["conjugates of complex tensors are copied inside operators, unseen: the peak may be higher"] = (
                None
            )
        block = self._born(num_bytes, operator, shape=tuple(tensor.shape))
        self._alive[key] = block
        weakref.finalize(storage, self._storage_died, key)

    def _resized(self, block: Block, num_bytes: int, operator: str) -> None:
        if num_bytes == block.num_bytes:
            return
        self.log.changes.append((block, num_bytes - block.num_bytes))
        block.num_bytes = num_bytes
        if self.card is not None:
            owner = (operator, block.module, self.log.phase)
            before, block.handle = block.handle, self.card.malloc(num_bytes, owner)
            self.card.free(before)

    def _see_resizing(self) -> None:
        """Storages are resized past every dispatcher: so FSDP2 lets go of gathered weights, and takes them again."""
        resize: Any = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            block = self._alive.get(storage._cdata)
            if block is not None:
                self._resized(block, storage.nbytes(), "resize_")
            return found

        self._hooks.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_note))

    def _born(self, num_bytes: int, operator: str, *, part: str | None = None, shape: tuple[int, ...] = ()) -> Block:
        phase = self.log.phase
        in_backward = phase == "backward"
        module = self._modules.now(in_backward=in_backward)
        block = Block(
            num_bytes, phase, module, operator, shape, part, is_recomputed=in_backward and self._modules.are_running
        )
        if self.card is not None:
            block.handle = self.card.malloc(num_bytes, (operator, module, phase))
        self.log.changes.append((block, num_bytes))
        return block

    def _died(self, block: Block) -> None:
        block.died_in = self.log.phase
        self.log.changes.append((block, -block.num_bytes))
        if self.card is not None:
            self.card.free(block.handle)

    def _storage_died(self, key: int) -> None:
        block = self._alive.pop(key, None)
        if block is not None:
            self._died(block)
        self._on_host.discard(key)
        self.values.forget(key)
        self.routing.forget(key)

    def _read_scalar(self, func: Callable[..., Any], tensor: torch.Tensor) -> Any:
        value = self.values.read(tensor)
        if value is not None:
            return value
        if self.log.phase == "optimizer" and tensor.is_floating_point():
            # Adafactor scales its rate by the norm of a weight: a number that moves no memory.
            self.notes["numbers that the optimizer reads from its tensors were taken as 1"] = None
            return 1.0
        if self.log.phase == "generate" and tensor.dtype is torch.bool:
            # "Has every sequence ended?" depends on the tokens; the memory is that of the one that never ends.
            self.notes["generation was taken to end at its full length, by no token"] = None
            return False
        return func(tensor)
