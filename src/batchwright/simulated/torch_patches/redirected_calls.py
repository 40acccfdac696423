"""A step that names `cuda` runs on the simulated card: every call of torch that takes a device is led there.

Replaces: torch.cuda.FloatTensor and its like, torch.set_default_device, torch.get_default_device,
torch.set_default_tensor_type, torch.Tensor.__new__, torch.nn.Module._apply,
torch.autograd.function.BackwardCFunction.apply, torch.autograd.graph.saved_tensors_hooks.__enter__. The rest is seen
through a `TorchFunctionMode`, `RedirectedCalls`, and replaces nothing.

Promises:
- `device="cuda"`, `.cuda()`, `.to("cuda")`, `.to(0)`, `.type("torch.cuda.FloatTensor")` and `torch.device("cuda")` as a
  context lead to the target;
- so do tensors that name no device, once a program made `cuda` the default;
- a tensor on the card says of itself what one on a GPU says: `is_cuda`, `device` is `cuda:0`;
- indices that are lists, ranges or arrays work as on a GPU, and one index is told from several as torch does it; a
  tensor of the host cannot be indexed with one of the card, as on CUDA;
- so does what a backward pass calls in Python, in a function's own backward, and what packs and unpacks saved tensors;
- `torch.tensor(..., device="cuda")`, which escapes fake tensors, is made on the host and moved;
- where a module is moved, a parameter, gradient or buffer that is already there stays the very same, and any other is
  moved within itself, so that an optimizer which holds it goes on holding it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from batchwright.simulated.torch_patches.backend import NAME, is_on_card, raising_what_was_taken, refuse_other_cards
from batchwright.simulated.torch_patches.patches import Patch

# The old way to name a number format together with a device: `torch.cuda.FloatTensor`, as a type, a name or a call.

_NAMES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor",
    torch.int32: "IntTensor",
    torch.int16: "ShortTensor",
    torch.int8: "CharTensor",
    torch.uint8: "ByteTensor",
    torch.bool: "BoolTensor",
}


class _OnCard(type):
    """A type whose instances are all tensors of one number format on the card."""

    dtype: torch.dtype

    def __instancecheck__(cls, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and is_on_card(tensor) and tensor.dtype == cls.dtype

    def __call__(cls, *given: Any) -> torch.Tensor:
        if len(given) == 1 and not isinstance(given[0], int | torch.Size):
            return torch.as_tensor(given[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*given, dtype=cls.dtype, device="cuda")


def old_types() -> Iterator[Patch]:
    """Have `torch.cuda.FloatTensor` and the like stand for tensors of the card."""
    for dtype, name in _NAMES.items():
        yield Patch(torch.cuda, name, _OnCard(name, (), {"dtype": dtype, "__module__": "torch.cuda"}))


def typed(target: torch.device, tensor: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
    """Do what `Tensor.type` does, the card being `target`: say the type, or cast to one."""
    if dtype is None:
        return ("torch.cuda." if is_on_card(tensor) else "torch.") + _NAMES[tensor.dtype]
    called = f"{dtype.__module__}.{dtype.__name__}" if isinstance(dtype, type) else str(dtype)
    for known, name in _NAMES.items():
        if called in (f"torch.cuda.{name}", f"torch.{name}"):
            return tensor.to(target if "cuda" in called else torch.device("cpu"), known, **options)
    return tensor.type(dtype, **options)


class DefaultDevice:
    """Where a program has torch make tensors that name no device: on the host, or on the card."""

    def __init__(self) -> None:
        self.is_card = False
        # By `set_default_tensor_type`, which `torch.Tensor(...)` goes by; it does not go by the default device.
        self._is_type_of_card = False

    def patches(self) -> Iterator[Patch]:
        """Have torch's own functions set and tell it; a simulated card would be refused by torch."""
        set_device, device_of, set_type = (
            torch.set_default_device,
            torch.get_default_device,
            torch.set_default_tensor_type,
        )
        make: Any = torch.Tensor.__new__

        def set_default_device(device: Any) -> None:
            self.is_card = device is not None and torch.device(device).type in _GPU
            set_device(None if self.is_card else device)

        def set_default_tensor_type(kind: Any) -> None:
            name = f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else kind
            self.is_card = self._is_type_of_card = name.startswith("torch.cuda.")
            set_type(name.replace("torch.cuda.", "torch."))

        def make_of_default_type(cls: type, *args: Any, **kwargs: Any) -> Any:
            tensor = make(cls, *args, **kwargs)
            return tensor.to("cuda") if self._is_type_of_card and cls is torch.Tensor else tensor

        yield Patch(torch.Tensor, "__new__", make_of_default_type)
        yield Patch(torch, "set_default_device", set_default_device)
        yield Patch(torch, "get_default_device", lambda: torch.device("cuda", 0) if self.is_card else device_of())
        yield Patch(torch, "set_default_tensor_type", set_default_tensor_type)


# Indexing a tensor of the card with Python values: `y[:, [0, 2]]`, `y[[True, False]]`, `y[range(3)]`, numpy arrays.
# torch makes an index tensor of such a value on the device itself, past every mode, and on a simulated card nothing can
# be made that way. So the index is made here, on the host, and moved, which takes what it takes on CUDA.

_MASKS = (torch.bool, torch.uint8)
# torch/csrc/autograd/python_variable_indexing.cpp: a sequence as long as this is always one index.
_ALWAYS_ONE = 32


def index_on_card(index: Any, target: torch.device) -> Any:
    """Return an index of a tensor on the card with every Python sequence in it made a tensor there."""
    if isinstance(index, tuple) or _is_several(index):
        return tuple(_one_index(part, target) for part in index)
    return _one_index(index, target)


def refuse_index_of_card(index: Any) -> None:
    """Raise what CUDA raises where a tensor of the host is indexed with one of the card."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, torch.Tensor) and is_on_card(part):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")


def _is_sequence(value: Any) -> bool:
    # An array of numpy is no Sequence of Python's; torch takes it for one.
    is_array = hasattr(value, "__array_interface__") and getattr(value, "ndim", 0) > 0
    return is_array or (isinstance(value, Sequence) and not isinstance(value, str | bytes))


def _is_several(index: Any) -> bool:
    """Whether a list is taken for a tuple of indices: a short one of anything but plain numbers."""
    if not isinstance(index, Sequence) or isinstance(index, str | bytes) or len(index) >= _ALWAYS_ONE:
        return False
    return any(
        part is None or part is Ellipsis or isinstance(part, torch.Tensor | slice) or _is_sequence(part)
        for part in index
    )


def _one_index(value: Any, target: torch.device) -> Any:
    if isinstance(value, torch.Tensor) or not _is_sequence(value):
        return value
    index = torch.tensor(_numbers(value), device="cpu")
    return (index if index.dtype in _MASKS else index.to(torch.int64)).to(target)


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()  # torch reads the single tensors of a list
    if hasattr(value, "__array_interface__"):
        return value.tolist()
    return [_numbers(part) for part in value] if _is_sequence(value) else value


# `model.cuda()`, `model.to("cuda")`, `model.half()`: torch swaps a fake parameter for the moved one, which it cannot
# while the trace watches the parameter.


def modules_move_in_place() -> Iterator[Patch]:
    """Have modules move their fake parameters without swapping them."""

    def are_fake(held: list[nn.Parameter]) -> bool:
        # Not real ones, nor those of a model that is being built on meta.
        return any(isinstance(parameter, FakeTensor) or is_traceable_wrapper_subclass(parameter) for parameter in held)

    yield moving_parameters(move_with_gradient, are_fake)


def moving_parameters(
    move_parameter: Callable[[Any, Callable[[Any], Any]], None], are_concerned: Callable[[list[nn.Parameter]], bool]
) -> Patch:
    """Have modules that hold such parameters move them, within themselves, by `move_parameter(parameter, function)`."""
    apply: Callable[..., nn.Module] = nn.Module._apply

    def move(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        held = [parameter for parameter in self._parameters.values() if parameter is not None]
        if not are_concerned(held):
            return apply(self, fn, recurse)
        for module in self.children() if recurse else ():
            module._apply(fn)
        for parameter in held:
            move_parameter(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    return Patch(nn.Module, "_apply", move)


def move_with_gradient(parameter: Any, fn: Callable[[Any], Any]) -> None:
    """Move a parameter that has no memory, and its gradient."""
    gradient, parameter.grad = parameter.grad, None
    _move(parameter, fn)
    if gradient is not None:
        _move(gradient, fn)
    parameter.grad = gradient


def _move(tensor: Any, fn: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        moved = fn(tensor)
    if moved is tensor:
        return
    if isinstance(tensor, FakeTensor) and type(moved) in (torch.Tensor, nn.Parameter):  # to a real host
        put_into(tensor, moved)
        return
    moved = moved.detach().requires_grad_(tensor.requires_grad)
    if not isinstance(tensor, FakeTensor):  # a shard
        torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad))
        return
    # `.data =` is refused between devices, and torch's own swap where anything refers weakly to the tensor, as the
    # trace does: the tensor's insides and what is written on it (where it lies, above all) are exchanged by hand.
    torch._C._swap_tensor_impl(tensor, moved)
    tensor.__dict__, moved.__dict__ = moved.__dict__, tensor.__dict__


def put_into(tensor: Any, moved: torch.Tensor) -> None:
    """Have a tensor of the host be one of the card, or the other way: the same object, of another's memory.

    `.data =` is refused between kinds of tensors, and torch's own swap where anything refers weakly to the tensor.
    """
    new: Any = moved.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, new)
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    tensor.__dict__, new.__dict__ = new.__dict__, tensor.__dict__


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_GET_DEVICE = torch.Tensor.get_device
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_PINNED = (torch.Tensor.pin_memory, torch.Tensor.is_pinned)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_MOVES_ARGUMENTS = (torch.Tensor.to,)
_GPU = ("cuda", NAME)


# Modes in the midst of a call that runs a backward pass.
_set_aside: list[RedirectedCalls] = []


def backwards_of_functions() -> Iterator[Patch]:
    """Have the backward of a `torch.autograd.Function`, which is Python, led to the card as its forward is."""
    apply: Any = BackwardCFunction.apply

    def apply_on_card(function: Any, *gradients: Any) -> Any:
        mode = _set_aside.pop() if _set_aside else None
        try:
            with mode or nullcontext():
                return apply(function, *gradients)
        finally:
            if mode is not None:
                _set_aside.append(mode)

    yield Patch(BackwardCFunction, "apply", apply_on_card)


_TORCH = str(Path(torch.__file__).parent)


def hooks_of_saved_tensors() -> Iterator[Patch]:
    """Lead to the card what a program's own hooks on saved tensors do, which torch calls from inside of operators."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    enter: Any = hooks.__enter__

    def enter_on_card(context: Any) -> None:
        mode = _get_current_function_mode()
        hook = context.pack_hook
        while isinstance(hook, partial):
            hook = hook.func
        code = getattr(hook, "__code__", None)
        # Torch's own (checkpoints, save_on_cpu) ask each tensor for its true device.
        file = None if code is None else code.co_filename
        is_own = type(hook).__module__.split(".")[0] != "torch" if file is None else not file.startswith(_TORCH)
        if not isinstance(mode, RedirectedCalls) or not is_own:
            enter(context)
            return
        led = (_run_under(mode, hook) for hook in (context.pack_hook, context.unpack_hook))
        torch._C._autograd._push_saved_tensors_default_hooks(*led)

    yield Patch(hooks, "__enter__", enter_on_card)


def _run_under(mode: RedirectedCalls, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        with nullcontext() if _get_current_function_mode() is mode else mode:
            return hook(value)

    return run


class RedirectedCalls(TorchFunctionMode):
    """Leads calls that name a GPU to `target`: the simulated card, or meta while a model is built."""

    def __init__(self, target: torch.device, default: DefaultDevice | None = None) -> None:
        super().__init__()
        self.target, self._default = target, default

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of torch, its devices exchanged."""
        kwargs = kwargs or {}
        # Looked up as it is now: who watches a program puts its own in place of `grad`.
        if func in (torch.Tensor.backward, torch.autograd.grad):
            return self._run_backward(func, *args, **kwargs)
        if func is torch.device:
            return func(*args, **kwargs)  # a name is only led where it is used
        # Getters are made anew each time they are looked up, so they are equal, not the same.
        if func == _IS_CUDA:
            return is_on_card(args[0])
        if func is _GET_DEVICE:
            return 0 if is_on_card(args[0]) else func(*args)
        if func == _SET_DATA and isinstance(args[0], FakeTensor) is not isinstance(args[1], FakeTensor):
            return put_into(*args)
        if func in _PINNED:
            # Pinned memory is the host's: nothing of it is on the card.
            return args[0] if func is torch.Tensor.pin_memory else True
        if func is torch.Tensor.cuda:
            where = args[1] if len(args) > 1 else kwargs.get("device")
            self._led(torch.device("cuda", where) if type(where) is int else where)
            return args[0].to(self.target)
        if func is torch.Tensor.type:
            return typed(self.target, *args, **kwargs)
        if func is torch.Tensor.new_tensor and is_on_card(args[0]):
            tensor = torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype))
            return tensor.to(self._led(kwargs.get("device", self.target))).requires_grad_(
                kwargs.get("requires_grad", False)
            )
        if func in _INDEXED and self.target.type == NAME:
            if is_on_card(args[0]):
                args = (args[0], index_on_card(args[1], self.target), *args[2:])
            else:
                refuse_index_of_card(args[1])
        if self._default is not None and self._default.is_card and func in _device_constructors():
            kwargs = {**kwargs, "device": self.target if kwargs.get("device") is None else kwargs["device"]}
        args = tuple(self._led(value) for value in args)
        kwargs = {name: self._led(value) for name, value in kwargs.items() if name != "pin_memory"}
        if func in _MOVES_ARGUMENTS and len(args) > 1 and type(args[1]) is int:
            args = (args[0], self._led(torch.device("cuda", args[1])), *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = self._led(torch.device("cuda", kwargs["device"]))
        if kwargs.get("generator") is not None and kwargs["generator"].device.type != "cpu":
            del kwargs["generator"]
        if func in _FROM_VALUES and kwargs.get("device") is not None:
            device, is_trained = kwargs.pop("device"), kwargs.pop("requires_grad", False)
            return func(*args, **kwargs, device="cpu").to(device).requires_grad_(is_trained)
        return raising_what_was_taken(func, *args, **kwargs)

    def _run_backward(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass: torch sets this mode aside, and functions with a backward of their own need it."""
        _set_aside.append(self)
        try:
            return raising_what_was_taken(func, *args, **kwargs)
        finally:
            _set_aside.pop()

    def _led(self, value: Any) -> Any:
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            value = torch.device(value)
        # On the host no tensor is on the simulated device, unless another simulated run goes on in here.
        led = ("cuda",) if self.target.type == "cpu" else _GPU
        if not isinstance(value, torch.device) or value.type not in led:
            return value
        refuse_other_cards(value.index)
        return self.target
