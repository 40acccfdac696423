"""A model without memory: the user's module with fake parameters in place of real ones.

Promises:
- a function that builds the model is run on the meta device, so 8 billion parameters cost nothing;
- a live module, and a live optimizer over it, get fake tensors for the time of a trace, in place, so that hooks, locks
  and functions that hold them go on working; whoever traces puts them back (`untouched`);
- tied parameters, and parameters that are views of one storage, stay so.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_iter

from batchwright.device.step import hand_out_model
from batchwright.errors import CannotTraceError
from batchwright.simulated.operators.quantized_layers import quantized_parts, stand_in
from batchwright.state.held_objects import CONTAINERS, is_users_object

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from torch._subclasses.fake_tensor import FakeTensorMode

    from batchwright.state.kept_state import KeptState
    from batchwright.workload import Workload


def build_skeleton(workload: Workload, *, is_card: bool = False) -> tuple[nn.Module, list[str]]:
    """Return the user's module, on meta where it can be built there, and what there is to say about it.

    On a card a model that is compiled with CUDA graphs is refused: they keep pools of their own.
    """
    given = workload.model
    notes: list[str] = []
    if isinstance(given, nn.Module):
        module = given
    else:
        try:
            with torch.device("meta"):
                module = hand_out_model(workload)
        except (NotImplementedError, RuntimeError) as error:
            # A constructor that reads values (`torch.linspace(...).item()`) needs real ones; so build it for real.
            notes.append(f"the model was built with real memory: on the meta device it fails with {_first_line(error)}")
            module = hand_out_model(workload)
    compiled = getattr(module, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        settings = getattr(getattr(module, "dynamo_ctx", None), "compiler_config", None) or {}
        if is_card and settings.get("triton.cudagraphs"):
            raise CannotTraceError(
                "the model is compiled with CUDA graphs, whose memory pools of their own are not simulated.",
                remedy='torch.compile(model) without mode="reduce-overhead" or "max-autotune"',
            )
        notes.append("the model is compiled; it was traced as eager, and a compiled run may need less")
        module = compiled
    return module, notes


class FakeParts:
    """Fake tensors on a device that stand in for the real ones of a model and its optimizers."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode, self._device = mode, device
        self._replaced: dict[int, Any] = {}
        # An id is unique only as long as its object lives.
        self._originals: list[Any] = []

    def put_into_model(self, module: nn.Module) -> nn.Module:
        """Replace every tensor of a module by a fake one, and return the module."""
        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise CannotTraceError(
                "the model has lazy parameters, whose shapes are not known before its first forward.",
                remedy="run one forward before handing it in; or batchwright fit, which runs the step",
            )
        if self._device.type != "cpu":
            with self._mode:
                for part in quantized_parts(module):
                    self._replace(part, stand_in(part, self._device))
        self._make_fakes(_tensors_of(module, without=self._replaced))
        self._put_into(module, {})
        replaced: nn.Module = self._replaced.get(id(module), module)
        return replaced

    def put_into_kept(self, state: KeptState, optimizers: Iterable[Any]) -> list[torch.Tensor]:
        """Put the fakes wherever what is kept names the originals; return fake ones for the optimizers' state."""
        in_state = [
            tensor
            for optimizer in optimizers
            for tensor in tree_iter([dict(entry) for entry in getattr(optimizer, "state", {}).values()])
            # Counters of steps are read by value, and are on the host whatever trains.
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and id(tensor) not in self._replaced
        ]
        fakes = self._make_fakes(in_state)
        for value in state.values:
            # No deeper: what is not kept would not be put back.
            if type(value) in CONTAINERS:
                self._put_into_container(value, self._replaced_or_same)
        for cell in state.cells:
            with suppress(ValueError):  # an empty one
                if (fake := self._replaced_or_same(cell.cell_contents)) is not cell.cell_contents:
                    cell.cell_contents = fake
        return fakes

    def _replace(self, original: Any, fake: Any) -> None:
        self._originals.append(original)
        self._replaced[id(original)] = fake

    def _make_fakes(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}
        fakes: list[torch.Tensor] = []
        chosen = [t for t in {id(tensor): tensor for tensor in tensors}.values() if _can_be_faked(t)]
        num_users = Counter(tensor.untyped_storage()._cdata for tensor in chosen)
        for tensor in chosen:
            key = tensor.untyped_storage()._cdata
            with self._mode:
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
                num_bytes = tensor.untyped_storage().nbytes()
                # Only where it must be: a fake storage that went through `set_` never dies, `.data = ...` or not.
                if num_users[key] > 1 or fake.untyped_storage().nbytes() != num_bytes:
                    if key not in storages:
                        storages[key] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                    fake.set_(storages[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                else:
                    fake.requires_grad_(tensor.requires_grad)
            self._replace(tensor, fake)
            fakes.append(fake)
        return fakes

    def _put_into(self, value: Any, met: dict[int, Any]) -> None:
        """Replace originals in an object, and in the containers and objects that it leads to."""
        if id(value) in met or id(value) in self._replaced:
            return
        if type(value) in CONTAINERS:
            met[id(value)] = value
            self._put_into_container(value, lambda inner: self._stand_in(inner, met))
        elif isinstance(value, nn.Module | torch.optim.Optimizer) or is_users_object(value):
            met[id(value)] = value
            self._put_into(getattr(value, "__dict__", None), met)

    def _put_into_container(self, container: Any, stand_in: Callable[[Any], Any]) -> None:
        if isinstance(container, list | deque):
            for index, inner in enumerate(container):
                container[index] = stand_in(inner)
        elif any(id(key) in self._replaced for key in container):
            # A key that changes would lose its place, so all are put in anew; a set has keys alone.
            is_dict = isinstance(container, dict)
            entries = [(stand_in(key), stand_in(container[key])) if is_dict else stand_in(key) for key in container]
            container.clear()
            container.update(entries)
        elif isinstance(container, dict):
            for key, inner in list(container.items()):
                if (fake := stand_in(inner)) is not inner:
                    container[key] = fake

    def _stand_in(self, value: Any, met: dict[int, Any]) -> Any:
        if type(value) is not tuple:
            self._put_into(value, met)
        return self._replaced_or_same(value)

    def _replaced_or_same(self, value: Any) -> Any:
        if type(value) is tuple:
            inner = tuple(self._replaced_or_same(entry) for entry in value)
            return inner if any(new is not old for new, old in zip(inner, value, strict=True)) else value
        return self._replaced.get(id(value), value)


def _can_be_faked(tensor: torch.Tensor) -> bool:
    """Whether a fake one can be made from sizes and strides; others stay real, and are counted where they are read."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _tensors_of(module: nn.Module, *, without: Container[int]) -> list[torch.Tensor]:
    """Parameters, buffers, and tensors that a module holds as plain attributes; not those of modules left out."""
    tensors: list[torch.Tensor] = []
    for part in module.modules():
        if id(part) in without:
            continue
        tensors += [p for p in part._parameters.values() if p is not None]
        tensors += [b for b in part._buffers.values() if b is not None]
        held = [
            value for name, value in vars(part).items() if not name.startswith("_") or isinstance(value, torch.Tensor)
        ]
        # Also in lists and dicts: caches, tables, precomputed masks.
        tensors += [tensor for tensor in tree_iter(held) if isinstance(tensor, torch.Tensor)]
    return tensors


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
