"""The peak of two training steps by counting every storage from birth to death, on fake tensors: slow and plain."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Callable


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += self.live[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key)


def count_peak(
    model: torch.nn.Module,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    samples: int,
    seq_len: int,
    autocast: bool = False,
) -> int:
    """Run two AdamW steps of a model built on the meta device, and return the largest number of bytes alive."""
    counter = LiveBytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FakeTensorMode(allow_non_fake_inputs=True), counter:
            _make_fake(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
            for _ in range(2):
                batch = torch.randint(0, 50, (samples, seq_len))
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    value = loss(model, batch)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                del batch, value
    return counter.peak


def _make_fake(model: torch.nn.Module) -> None:
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                empty = torch.empty_like(weight, device="cpu")
                made.setdefault(id(weight), torch.nn.Parameter(empty, requires_grad=weight.requires_grad))
                module._parameters[name] = made[id(weight)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                made.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))
                module._buffers[name] = made[id(buffer)]
