"""The judge of the state table: everything that can be reached from some objects, and what the process is set to.

Written apart from `batchwright.state` and sharing nothing with it: a mistake there must not be made here again. Every
tensor counts with its id, storage, form, flags, history and bytes, every container with the ids and the order of its
entries, every module, optimizer and object of one's own with its class and attributes.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import hashlib
import io
import os
import random
import signal
import sys
import threading
import types
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

Fingerprint = dict[str, str]
PLAIN = (type(None), bool, int, float, complex, str, bytes)
MOST_DEPTH = 40


class Judge:
    """What is reached from named objects, before and after."""

    def __init__(self, roots: dict[str, Any], ignored: dict[str, Any] | None = None) -> None:
        self._roots = roots
        self._ignored = {id(value): f"{name}, which is ignored" for name, value in (ignored or {}).items()}
        # Keeps what it met alive: an id is unique only as long as its object lives.
        self._alive: list[Any] = []
        self._before = self._look()

    def differences(self) -> list[str]:
        """Return what is not as it was, one line each."""
        after = self._look()
        paths = [*self._before, *(path for path in after if path not in self._before)]
        return [
            f"{path}: {self._before.get(path, 'not there')[:60]} -> {after.get(path, 'gone')[:60]}"
            for path in paths
            if self._before.get(path) != after.get(path)
        ]

    def _look(self) -> Fingerprint:
        found: Fingerprint = {}
        met = dict(self._ignored)
        for name, value in self._roots.items():
            self._add(found, met, name, value, 0)
        return found

    def _add(self, found: Fingerprint, met: dict[int, str], path: str, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN):
            found[path] = repr(value)
            return
        if id(value) in met:
            found[path] = f"the same as {met[id(value)]}"
            return
        met[id(value)] = path
        self._alive.append(value)
        found[path] = f"{type(value).__qualname__} {id(value):x}"
        if depth > MOST_DEPTH:
            return

        def inner(name: str, part: Any) -> None:
            self._add(found, met, f"{path}{name}", part, depth + 1)

        if isinstance(value, torch.Tensor):
            found[path] += f" {describe_tensor(value)}"
            if value.is_leaf:
                inner(".grad", value.grad)
            inner(".__dict__", vars(value))
            found[f"{path} hooks"] = repr(
                [len(getattr(value, n, None) or ()) for n in ("_backward_hooks", "_post_accumulate_grad_hooks")]
            )
        elif isinstance(value, np.ndarray):
            found[path] += f" {value.ctypes.data:x} {value.dtype} {value.shape} {_hashed(value.tobytes())}"
        elif isinstance(value, dict):
            found[path] += f" {[key if isinstance(key, PLAIN) else id(key) for key in value]}"
            for number, (key, part) in enumerate(value.items()):
                inner(f"[{key!r}]" if isinstance(key, PLAIN) else f"[key {number}]", part)
        elif isinstance(value, list | tuple | collections.deque):
            found[path] += f" {len(value)}"
            for number, part in enumerate(value):
                inner(f"[{number}]", part)
        elif isinstance(value, set | frozenset):
            found[path] += f" {sorted(repr(part) if isinstance(part, PLAIN) else str(id(part)) for part in value)}"
        elif isinstance(value, torch.Generator):
            found[path] += _hashed(value.get_state().numpy().tobytes())
        elif isinstance(value, np.random.Generator):
            found[path] += _hashed(repr(value.bit_generator.state).encode())
        elif isinstance(value, random.Random):
            found[path] += _hashed(repr(value.getstate()).encode())
        elif isinstance(value, io.IOBase):
            found[path] += f" {value.closed} {None if value.closed else value.tell()}"
        elif isinstance(value, functools._lru_cache_wrapper):
            found[path] += f" {value.cache_info().currsize}"
        elif hasattr(value, "locked"):
            found[path] += f" {value.locked()}"
        elif isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    inner(f" closes over {name}", cell.cell_contents)
                except ValueError:
                    found[f"{path} closes over {name}"] = "nothing"
        elif isinstance(value, types.MethodType):
            inner(".__self__", value.__self__)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                inner(f".{name}", getattr(value, name))
        elif not isinstance(value, type | types.ModuleType | torch.dtype | torch.device):
            self._add_object(found, path, value, inner)

    def _add_object(self, found: Fingerprint, path: str, value: Any, inner: Any) -> None:
        if isinstance(value, torch.jit.ScriptModule):
            found[f"{path} mode"] = repr(value.training)
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                # The wrapper around a scripted tensor is made anew with each look.
                found[f"{path}.{name}"] = describe_tensor(tensor)
                found[f"{path}.{name}.grad"] = "None" if tensor.grad is None else describe_tensor(tensor.grad)
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for name, part in attributes.items():
                inner(f".{name}", part)
            found[f"{path} attributes"] = repr(list(attributes))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__"):
                    inner(f".{name}", getattr(value, name, "never assigned"))


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return the form, flags, storage and bytes of a tensor as one line."""
    if torch.nn.parameter.is_lazy(tensor):
        return f"lazy {tensor.requires_grad}"
    with torch.no_grad():
        plain = tensor.detach()
        flags = f"{tensor.dtype} {tensor.device} {tensor.requires_grad} {tensor.is_leaf} {tensor.layout}"
        if tensor.layout is torch.sparse_coo:
            parts = [plain._indices(), plain._values()]
            return f"{flags} {tuple(tensor.shape)} {tensor.is_coalesced()} {[_of_storage(part) for part in parts]}"
        if tensor.layout is not torch.strided:
            parts = [plain.crow_indices(), plain.col_indices(), plain.values()]
            return f"{flags} {tuple(tensor.shape)} {[_of_storage(part) for part in parts]}"
        if tensor.is_nested:
            return f"{flags} {[tuple(part.shape) for part in plain.unbind()]} {_of_storage(plain)}"
        form = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {tensor.is_conj()}"
        return f"{_of_storage(plain)} {flags} {form}"


def _of_storage(tensor: torch.Tensor) -> str:
    storage = tensor.untyped_storage()
    held = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
    return f"{_hashed(held)} at {storage.data_ptr():x}"


def _hashed(held: bytes) -> str:
    return hashlib.sha256(held).hexdigest()[:12]


def process_fingerprint(folder: str) -> Fingerprint:
    """Return what belongs to the whole process; `folder` is where its temporary files go."""
    hooks = [(modules, name) for name in vars(modules) if name.startswith("_global_") and name.endswith("hooks")]
    hooks += [(optimizers, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")]
    numbers = np.random.get_state(legacy=False)
    return {
        "torch's random state": _hashed(torch.get_rng_state().numpy().tobytes()),
        "Python's random state": _hashed(repr(random.getstate()).encode()),
        "numpy's random state": _hashed(numbers["state"]["key"].tobytes() + repr(numbers["state"]["pos"]).encode()),
        "exception hooks": repr([id(f) for f in (sys.excepthook, sys.unraisablehook, threading.excepthook)]),
        "trace functions": repr([sys.gettrace(), sys.getprofile()]),
        "collector": repr([gc.isenabled(), gc.get_freeze_count() > 0, gc.get_threshold(), gc.callbacks]),
        "signal handlers": repr({n: repr(signal.getsignal(n)) for n in signal.valid_signals() if n < 32}),
        "grad modes": repr([torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()]),
        "autocast": repr([torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]),
        "numbers": repr(
            [
                torch.get_default_dtype(),
                torch.get_default_device(),
                torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_deterministic_debug_mode(),
                torch.get_num_threads(),
                torch.get_num_interop_threads(),
                torch.backends.mkldnn.enabled,
            ]
        ),
        "dispatch modes": repr([torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()]),
        "accelerators": repr([torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available()]),
        "torch's functions": repr(
            [
                id(f)
                for f in (
                    torch.Tensor.to,
                    torch.Tensor.cuda,
                    torch.nn.Module.cuda,
                    torch.empty,
                    torch.compile,
                    torch.Tensor.backward,
                    torch.nn.Module.__call__,
                    torch.optim.Optimizer.step,
                )
            ]
        ),
        "global hooks": repr(
            {name: len(getattr(place, name)) for place, name in hooks if hasattr(getattr(place, name), "__len__")}
        ),
        "folder": os.getcwd(),
        "environment": _hashed(repr(sorted(os.environ.items())).encode()),
        "path": repr(sys.path),
        "arguments": repr(sys.argv),
        "files": repr(sorted(os.listdir(folder))),
        "streams": repr([id(sys.stdout), id(sys.stderr), id(sys.stdin)]),
    }
