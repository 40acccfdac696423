"""Values of tensors, kept beside their fake twins, so that counters, flags and batches can be read while tracing.

A fake tensor has no values, yet optimizers read their step counters, models the few numbers they made themselves, and
losses the labels of a batch. Whatever is computed from constants alone stays known here, up to a few kilobytes (lengths
of sequences up to 64), and so do the batches that were made for real and what is computed from them, up to some
megabytes.

Promises:
- only what follows from constants and batches is known; weights, what a model computes from them and random numbers
  never are, unless a constant outweighs them;
- a write whose result is not known makes its target unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGEST_KNOWN_BYTES = 4096
# Whole numbers in a row on the host: the lengths of the sequences of a batch, which decide how much a packed one holds.
_LARGEST_ROW_BYTES = 2**16

# Tensors of a batch, and what follows from them: labels, masks and token ids are whole numbers and are read; pictures
# hardly ever are.
_LARGEST_BATCH_BYTES = {True: 2**28, False: 2**26}
_LARGEST_FOLLOWING_BYTES = {True: 2**24, False: 2**20}

_aten = torch.ops.aten
_UNKNOWABLE = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_DRAW = _aten.rand.default
# Its only effect on values is to flag an overflow; a run that overflows skips its step, so we assume none does.
_HARMLESS_WRITES = {_aten._amp_foreach_non_finite_check_and_unscale_.default}
# What decides the result whatever the other side is.
_ABSORBING: dict[Any, bool] = {
    _aten.bitwise_or.Tensor: True,
    _aten.logical_or.default: True,
    _aten.bitwise_and.Tensor: False,
    _aten.logical_and.default: False,
}


class KnownValues:
    """A real twin of each tiny storage whose content follows from constants."""

    def __init__(self) -> None:
        self._twins: dict[int, torch.Tensor] = {}
        self._of_batch: set[int] = set()
        self.was_drawn = False

    def learn(self, fake: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        """Take note of what a tiny tensor holds; `make` makes it, contiguous as the fake one is."""
        if _is_small(fake):
            with unset_fake_temporarily(), torch.no_grad():
                self._twins[fake.untyped_storage()._cdata] = make().contiguous()

    def learn_batch(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Take note of a tensor of a batch; `fake` lies in its storage as `real` does, or `real` alone is known."""
        if _num_bytes(fake) > _LARGEST_BATCH_BYTES[_is_whole(fake)]:
            return
        with _disable_current_modes(), torch.no_grad():  # called from outside of operators, where the trace looks on
            known = real.detach()
            if fake.shape == real.shape and real.storage_offset():
                known = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype).copy_(known)
        self._keep(fake, known, is_of_batch=True)

    def learn_result(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Take note of what an operator returned whose shape depends on what it read."""
        self._keep(fake, real, is_of_batch=True)

    def _keep(self, fake: torch.Tensor, twin: torch.Tensor, *, is_of_batch: bool) -> None:
        key = fake.untyped_storage()._cdata
        self._twins[key] = twin
        if is_of_batch:
            self._of_batch.add(key)

    def forget(self, storage_key: int) -> None:
        """Drop the twin of a storage that died."""
        self._twins.pop(storage_key, None)
        self._of_batch.discard(storage_key)

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the values that this one is known to have, or None."""
        with _disable_current_modes():
            return self._real(tensor)

    def evaluate(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator for real if everything it reads is known; None where it is not."""
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not tensors or any(self._real(t) is None for t in tensors):
            return None
        with unset_fake_temporarily(), torch.no_grad():
            return func(*tree_map(self._as_real, args), **tree_map(self._as_real, kwargs))

    def read(self, tensor: torch.Tensor) -> Any:
        """The value of a one-element tensor, or None where it is not known."""
        known = self._real(tensor)
        with unset_fake_temporarily():
            return None if known is None else known.item()

    def holds(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> bool:
        """Whether a tensor is known to hold just what `make` makes."""
        known = self._real(tensor)
        if known is None:
            return False
        with unset_fake_temporarily():
            return torch.equal(known, make().to(known.dtype))

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any, outputs: Any) -> None:
        """Compute for real what just ran on fake tensors, where everything it read is known."""
        fakes = [t for t in tree_iter(outputs) if isinstance(t, torch.Tensor)]
        written = self._written(func, args, kwargs)
        if not fakes and not written:
            return
        if func in _HARMLESS_WRITES:
            return
        for fake in fakes:
            # A literal, such as torch.tensor(0.0). Copied: the fake mode goes on to change its own.
            constant = fake.constant if isinstance(fake, FakeTensor) else None
            if constant is not None and not written and _is_small(fake):
                with unset_fake_temporarily():
                    self._twins[fake.untyped_storage()._cdata] = constant.clone()
        if func is _DRAW and fakes[0].dim() == 0:
            # One number drawn, as layerdrop does: the highest there is, so that no layer is skipped.
            self.learn(fakes[0], lambda: torch.full((), 1 - 2**-24, dtype=fakes[0].dtype))
            self.was_drawn = True
            return
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_of_batch = any(t.untyped_storage()._cdata in self._of_batch for t in inputs if isinstance(t, FakeTensor))
        if func in _UNKNOWABLE or _is_random(func) or not all(self._is_followed(t, is_of_batch) for t in fakes):
            self._invalidate(written)
            return
        if not all(self._real(t) is not None for t in inputs):
            self._invalidate(written)
            self._follow_absorbed(func, inputs, fakes)
            return
        with unset_fake_temporarily(), torch.no_grad():
            try:
                real = func(*tree_map(self._as_real, args), **tree_map(self._as_real, kwargs))
            except Exception:  # whatever it is, the run itself would say it; here only the values are lost
                self._invalidate(written)
                return
        results = [t for t in tree_iter(real) if isinstance(t, torch.Tensor)]
        for fake, value in zip(fakes, results, strict=False):
            key = fake.untyped_storage()._cdata
            if key not in self._twins and value.untyped_storage().nbytes() >= fake.untyped_storage().nbytes():
                self._keep(fake, value, is_of_batch=is_of_batch)

    def _is_followed(self, fake: torch.Tensor, is_of_batch: bool) -> bool:
        """Whether the values of an operator's result are worth computing; those of a view are there already."""
        if _is_small(fake) or fake.untyped_storage()._cdata in self._twins:
            return True
        return is_of_batch and _num_bytes(fake) <= _LARGEST_FOLLOWING_BYTES[_is_whole(fake)]

    def _follow_absorbed(self, func: Callable[..., Any], inputs: list[torch.Tensor], fakes: list[torch.Tensor]) -> None:
        """Know `true | unknown` and `false & unknown`: a stopping rule that has said yes."""
        absorbing = _ABSORBING.get(func)
        if absorbing is None or (absorbing and any(t.dtype is not torch.bool for t in inputs)):
            return
        known = [value for value in map(self._real, inputs) if value is not None]
        with unset_fake_temporarily():
            is_absorbed = any(bool((value.bool() == absorbing).all()) for value in known)
        if is_absorbed:
            self.learn(fakes[0], lambda: torch.full(fakes[0].shape, absorbing, dtype=fakes[0].dtype))

    def _as_real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._real(value)
        # Device arguments name a simulated device; the twins live on the host.
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if _is_small(tensor) and tensor.device.type != "meta" else None
        twin = self._twins.get(tensor.untyped_storage()._cdata)
        if twin is None:
            return None
        with unset_fake_temporarily():
            flat = torch.empty(0, dtype=tensor.dtype).set_(twin.untyped_storage())
            return torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _written(self, func: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return []
        written = []
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                written += [t for t in tree_iter(value) if isinstance(t, torch.Tensor)]
        return written

    def _invalidate(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.forget(tensor.untyped_storage()._cdata)


def _is_small(tensor: torch.Tensor) -> bool:
    return _num_bytes(tensor) <= largest_known_bytes(tensor)


def largest_known_bytes(tensor: torch.Tensor) -> int:
    """Up to how many bytes a tensor like this one is a few numbers, to be read, and no data."""
    is_row = tensor.dtype is torch.int64 and tensor.dim() == 1 and tensor.device.type == "cpu"
    return _LARGEST_ROW_BYTES if is_row else _LARGEST_KNOWN_BYTES


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_random(func: Callable[..., Any]) -> bool:
    tags = getattr(func, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
