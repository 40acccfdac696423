"""A model without memory: the user's module with fake parameters in place of real ones.

Promises:
- a function that builds the model is run on the meta device, so 8 billion parameters cost nothing;
- a live module is copied, tensors excepted, and is itself not touched;
- tied parameters, and parameters that are views of one storage, stay so.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from batchwright.errors import CannotTraceError, InvalidInputError
from batchwright.memory.quantized_layers import quantized_parts, stand_in
from batchwright.units import shortened

if TYPE_CHECKING:
    from collections.abc import Container

    from torch._subclasses.fake_tensor import FakeTensorMode

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
                module = given()
        except (NotImplementedError, RuntimeError) as error:
            # A constructor that reads values (`torch.linspace(...).item()`) needs real ones; so build it for real.
            notes.append(f"the model was built with real memory: on the meta device it fails with {_first_line(error)}")
            module = given()
    if not isinstance(module, nn.Module):
        raise InvalidInputError(f"model= must be a module or a function that builds one; received {shortened(module)}.")
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


def fake_copy(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Copy a module with every tensor of it replaced by a fake one on `device`."""
    replaced: dict[int, object] = {}
    if device.type != "cpu":
        with mode:
            replaced.update({id(part): stand_in(part, device) for part in quantized_parts(module)})
    storages: dict[int, torch.Tensor] = {}
    tensors = list({id(tensor): tensor for tensor in _tensors_of(module, without=replaced)}.values())
    num_users = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    for tensor in tensors:
        key = tensor.untyped_storage()._cdata
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            num_bytes = tensor.untyped_storage().nbytes()
            # Only where it must be: a fake storage that went through `set_` never dies, `.data = ...` or not.
            if num_users[key] > 1 or fake.untyped_storage().nbytes() != num_bytes:
                if key not in storages:
                    storages[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                fake.set_(storages[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
            if isinstance(tensor, nn.Parameter):
                replaced[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            else:
                replaced[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(module, replaced)


def _tensors_of(module: nn.Module, *, without: Container[int]) -> list[torch.Tensor]:
    """Parameters, buffers, and tensors that a module holds as plain attributes; not those of modules left out."""
    found: list[torch.Tensor] = []
    for part in module.modules():
        if id(part) in without:
            continue
        found += [p for p in part._parameters.values() if p is not None]
        found += [b for b in part._buffers.values() if b is not None]
        held = [
            value for name, value in vars(part).items() if not name.startswith("_") or isinstance(value, torch.Tensor)
        ]
        # Also in lists and dicts: caches, tables, precomputed masks.
        found += [tensor for tensor in tree_iter(held) if isinstance(tensor, torch.Tensor)]
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
