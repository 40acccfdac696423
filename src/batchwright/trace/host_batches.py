"""What comes into a traced step from the host: batches, and real tensors that the step reads besides.

Batches are made for real on the host, and handed to the step as tensors without memory. Datasets, collate functions,
PIL, numpy, random draws and `.item()` run as they would in training; only what comes out is made fake, and its values
stay known to the trace.

Promises:
- a batch that names the card (`device="cuda"`) is made on the host and counted on the card;
- tensors that share a storage share one in the trace;
- a batch may be an object with tensors as attributes;
- a batch too large to be made for real in passing is made without memory, as the step is; so is one that fails for
  real but not so. What fails both ways raises what it raises for real;
- a real tensor that the workload did not hand in (a teacher, a constant in the loss) was allocated before anything was
  asked, so it cannot be made fake: it is counted from where it is first read, and left as it was found.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.device.batches import make_batch, map_batch
from batchwright.errors import InvalidInputError
from batchwright.simulated.torch_patches.redirected_calls import RedirectedCalls
from batchwright.state.held_objects import is_users_object
from batchwright.state.process_state import kept_random_state
from batchwright.trace.known_values import KnownValues, largest_known_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from batchwright.workload import Workload


# Making a batch reads the dataset's own samples, and literals are lifted into the trace: neither is from outside.
_READS_SAMPLES = ("build", "batch")
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class OutsideTensors:
    """Remembers each real tensor that was met, and the gradient it had."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def meet(self, func: Any, values: Iterable[Any], phase: str) -> Iterator[torch.Tensor]:
        """Yield the real tensors among an operator's arguments that are large and new."""
        for tensor in _real_tensors(values):
            key = tensor.untyped_storage()._cdata
            if key in self._met:
                continue
            self._met[key] = (tensor, tensor.grad if tensor.is_leaf else None)
            is_large = tensor.untyped_storage().nbytes() > largest_known_bytes(tensor)
            if is_large and phase not in _READS_SAMPLES and func not in _LIFTS:
                yield tensor

    def give_back(self) -> None:
        """Put back the gradients that the trace may have written."""
        for tensor, gradient in self._met.values():
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not gradient:
                tensor.grad = gradient


def _real_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors with memory among arguments. Asked at every operator, so it walks lists itself instead of a pytree."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _real_tensors(value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.device.type != "meta":
            yield value


def part_of_outside(tensor: torch.Tensor) -> str:
    """A parameter is a weight, whoever owns it; anything else came in with the data."""
    return "weights" if isinstance(tensor, nn.Parameter) else "inputs"


# A search looks at many sizes, the largest of them far beyond what fits. Below this a batch takes a fraction of a
# second and of any host's memory.
LARGEST_REAL_BYTES = 2**28
# Sizes that are made without asking first how large they would be.
_SMALL = 32
_CPU = torch.device("cpu")


class HostBatches:
    """Makes the batches of one traced run."""

    def __init__(self, workload: Workload, values: KnownValues) -> None:
        self._workload, self._values = workload, values
        self._bytes_of_two: int | None = None

    def make(self, micro_batch: int, **shape: Any) -> Any:
        """Make a batch for real, and return it with tensors that have no memory."""
        if micro_batch > _SMALL and self._expected_bytes(micro_batch, shape) > LARGEST_REAL_BYTES:
            try:
                return make_batch(self._workload, micro_batch, shape, _CPU)
            except InvalidInputError:
                raise
            except Exception:  # it reads values: then there is no other way than for real
                return without_memory(make_real_batch(self._workload, micro_batch, shape), self._values)
        try:
            batch = make_real_batch(self._workload, micro_batch, shape)
        except InvalidInputError:
            raise
        except Exception as error:
            try:
                return make_batch(self._workload, micro_batch, shape, _CPU)
            except Exception:
                raise error from None
        return without_memory(batch, self._values)

    def _expected_bytes(self, micro_batch: int, shape: Mapping[str, Any]) -> int:
        if self._bytes_of_two is None:
            try:
                with kept_random_state():
                    two = make_real_batch(self._workload, 2, shape)
            except Exception:
                return 0
            self._bytes_of_two = sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(two))
        return self._bytes_of_two * micro_batch // 2


def make_real_batch(workload: Workload, micro_batch: int, shape: Mapping[str, Any]) -> Any:
    """Make a batch on the host outside of any trace; what names a GPU is led to the host."""
    leads_elsewhere = torch._C._len_torch_function_stack() > 0
    with _disable_current_modes(), RedirectedCalls(_CPU) if leads_elsewhere else nullcontext():
        return make_batch(workload, micro_batch, shape, _CPU)


def without_memory(batch: Any, values: KnownValues) -> Any:
    """Return a real batch with fake tensors in place of real ones, their values known."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in _tensors_of(batch):
        if is_plain(tensor):
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    fakes: dict[int, torch.Tensor] = {}
    for tensors in by_storage.values():
        fakes.update(_fakes_of_one_storage(tensors, values))
    return _mapped(batch, lambda tensor: fakes.get(id(tensor), tensor))


def _fakes_of_one_storage(tensors: Sequence[torch.Tensor], values: KnownValues) -> dict[int, torch.Tensor]:
    first = tensors[0]
    num_bytes = first.untyped_storage().nbytes()
    is_shared = len({id(tensor) for tensor in tensors}) > 1 or first.storage_offset() > 0
    # A slice of a whole dataset is not the dataset.
    is_most = 2 * sum(map(_extent_bytes, tensors)) >= num_bytes
    base = None
    if is_shared and is_most and len({tensor.dtype for tensor in tensors}) == 1:
        base = torch.empty(num_bytes // first.element_size(), dtype=first.dtype)
        values.learn_batch(base, first)
    fakes = {}
    for tensor in tensors:
        if base is not None:
            fake = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        else:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            values.learn_batch(fake, tensor)
        fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    return fakes


def _extent_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a fake one can be made from sizes and strides; others stay real, and are counted where they are read."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _mapped(batch, note)
    return tensors


def _is_object(value: Any) -> bool:
    """Whether a batch, or a part of it, is an object with tensors as attributes, as in torch_geometric."""
    if not hasattr(value, "__dict__") or isinstance(value, type | nn.Module):
        return False
    return is_users_object(value) or callable(getattr(value, "to", None))


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor], twins: dict[int, Any] | None = None) -> Any:
    """Return the batch with every tensor in it changed; the user's own objects stay as they are."""
    twins = {} if twins is None else twins  # of objects, which may lead back to themselves

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, PackedSequence):
            parts: list[Any] = [part if part is None else change(part) for part in value]
            # How many samples each step has: on the host whatever trains, and read by a pointer.
            return PackedSequence(*parts)._replace(batch_sizes=value.batch_sizes)
        if _is_object(value):
            if id(value) not in twins:
                twin = twins[id(value)] = copy.copy(value)
                for name, part in vars(value).items():
                    vars(twin)[name] = _mapped(part, change, twins)
            return twins[id(value)]
        return value

    return map_batch(leaf, batch, is_leaf=lambda value: isinstance(value, torch.Tensor | PackedSequence))
