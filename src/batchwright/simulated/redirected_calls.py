"""A step that names `cuda` runs on the simulated card: every call of torch that takes a device is led there.

Promises:
- `device="cuda"`, `.cuda()`, `.to("cuda")`, `.to(0)` and `torch.device("cuda")` as a context lead to the target;
- a tensor on the card says of itself what one on a GPU says: `is_cuda`, `device` is `cuda:0`;
- `.type("torch.cuda.FloatTensor")` leads there too (old_types.py);
- indices that are lists, ranges or arrays work as on a GPU (python_indices.py);
- `torch.tensor(..., device="cuda")`, which escapes fake tensors, is made on the host and moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from batchwright.simulated.backend import NAME, is_on_card, refuse_other_cards
from batchwright.simulated.held_back import raising_what_was_taken
from batchwright.simulated.old_types import typed
from batchwright.simulated.python_indices import index_on_card, refuse_index_of_card

if TYPE_CHECKING:
    from collections.abc import Callable

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_GET_DEVICE = torch.Tensor.get_device
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_PINNED = (torch.Tensor.pin_memory, torch.Tensor.is_pinned)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_MOVES_ARGUMENTS = (torch.Tensor.to,)
_GPU = ("cuda", NAME)


class RedirectedCalls(TorchFunctionMode):
    """Leads calls that name a GPU to `target`: the simulated card, or meta while a model is built."""

    def __init__(self, target: torch.device) -> None:
        super().__init__()
        self.target = target

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of torch, its devices exchanged."""
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)  # a name is only led where it is used
        # Getters are made anew each time they are looked up, so they are equal, not the same.
        if func == _IS_CUDA:
            return is_on_card(args[0])
        if func is _GET_DEVICE:
            return 0 if is_on_card(args[0]) else func(*args)
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
            made = torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype))
            return made.to(self._led(kwargs.get("device", self.target))).requires_grad_(
                kwargs.get("requires_grad", False)
            )
        if func in _INDEXED and self.target.type == NAME:
            if is_on_card(args[0]):
                args = (args[0], index_on_card(args[1], self.target), *args[2:])
            else:
                refuse_index_of_card(args[1])
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

    def _led(self, value: Any) -> Any:
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            value = torch.device(value)
        # On the host no tensor is on the simulated device, unless another simulated run goes on in here.
        led = ("cuda",) if self.target.type == "cpu" else _GPU
        if not isinstance(value, torch.device) or value.type not in led:
            return value
        refuse_other_cards(value.index)
        return self.target
