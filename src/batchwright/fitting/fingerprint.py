"""What an answer depends on, as one hash: the key under which it is remembered.

Promises:
- the same work gives the same hash in another process;
- the model is built on the meta device and two samples are made; no optimizer is made and no step is run;
- random state comes back as it was; whatever goes wrong on the way, the answer is None, never an exception.

In it: the model's structure; the code of the workload's functions and what they hold, so the optimizer and its settings
too; with a target, the bytes of its file and of every file of the user's that is imported; shapes and dtypes of two
samples; the device; the bytes there are; what steers allocators; versions. Not in it: values inside tensors, files that
the user's code reads, and what hides in objects of installed packages beyond their plain attributes. A hash that should
have changed and did not costs no wrong size, for the answer is probed again, but perhaps one that is no longer the
largest.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import random
import re
import sys
import warnings
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchwright import __version__
from batchwright.device.batches import make_batch, tensors_in
from batchwright.device.device import open_device
from batchwright.fitting.named_code import Names, is_installed
from batchwright.memory.fake_model import build_skeleton
from batchwright.state.untouched import untouched
from batchwright.targets import Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchwright.workload import Workload

_FREE_STEP_BYTES = 256 * 2**20
_SETTINGS_OF_ALLOCATORS = re.compile(r"PYTORCH_\w+|MALLOC_\w+|GLIBC_TUNABLES|LD_PRELOAD|CUBLAS_WORKSPACE_CONFIG")


def fingerprint(
    workload: Workload,
    *,
    target: str | None,
    on: str,
    limit_bytes: int | None,
    shape: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> str | None:
    """Return the key of an answer, or None where something that it depends on cannot be named.

    >>> from torch import nn
    >>> from batchwright.workload import Workload
    >>> def key(width):
    ...     workload = Workload(
    ...         model=lambda: nn.Linear(width, 1),
    ...         batch=lambda n: torch.randn(n, width),
    ...         loss=lambda model, batch: model(batch).mean(),
    ...     )
    ...     return fingerprint(workload, target=None, on="cpu", limit_bytes=2**30, shape={}, settings={})
    >>> key(8) == key(8), key(8) == key(16)
    (True, False)

    `settings` are the options of the search and of the step that change the answer. `limit_bytes` is what `rounded`
    made of the bytes there are.
    """
    try:
        found = _ingredients(workload, target, on, limit_bytes, shape, settings)
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    except Exception:
        # A bug in the user's own functions shows in the first probe, with its traceback; here it only means no key.
        return None


def rounded(limit_bytes: int | None, *, was_asked: bool) -> int | None:
    """Return the bytes that go into the key: as asked for, else what is free, rounded down to 256 MiB.

    >>> [rounded(1_000_000_000, was_asked=was_asked) for was_asked in (True, False)]
    [1000000000, 805306368]

    What is free moves by itself from run to run; what was asked for does not.
    """
    if limit_bytes is None or was_asked:
        return limit_bytes
    return limit_bytes // _FREE_STEP_BYTES * _FREE_STEP_BYTES


def _ingredients(
    workload: Workload,
    target: str | None,
    on: str,
    limit_bytes: int | None,
    shape: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    names = Names()
    found: dict[str, Any] = {
        # First, for the user's functions may change it.
        "default_dtype": str(torch.get_default_dtype()),
        "device": _device(on),
        "limit_bytes": limit_bytes,
        "shape": names.of(dict(shape)),
        "settings": names.of(dict(settings)),
        "allocators": {name: os.environ[name] for name in os.environ if _SETTINGS_OF_ALLOCATORS.fullmatch(name)},
    }
    accelerator = None if on == "cpu" else torch.device(on)
    with (
        untouched(workload, accelerator=accelerator, is_traced=True),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        found |= _from_users_code(workload, shape, names)
    # Last: by now everything is imported that the user's functions import when they are called.
    found["objects"] = names.objects()
    found["files"] = None if target is None else _files(target)
    found["arguments"] = None if target is None else list(Target.read(target).arguments)
    found["versions"] = {
        "python": sys.version,
        "platform": platform.platform(),
        "torch": [str(torch.__version__), torch.version.cuda, torch.version.hip],
        "batchwright": __version__,
        "packages": {name: _version(name) for name in names.packages},
    }
    return found


def _from_users_code(workload: Workload, shape: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Call what builds the model and a batch, and describe what comes out."""
    found: dict[str, Any] = {
        field.name: names.of(getattr(workload, field.name))
        for field in fields(workload)
        if field.name not in ("data", "name")
    }
    _seed()
    found["built_model"] = names.of(build_skeleton(workload)[0])
    num_samples = 2
    if workload.data is not None:
        num_samples = min(num_samples, len(workload.data))
        found["data"] = [len(workload.data), names.of(type(workload.data))]
    _seed()
    batch = make_batch(workload, num_samples, shape, torch.device("cpu"))
    found["made_batch"] = [names.of(type(batch)), [names.of(tensor) for tensor in tensors_in(batch)]]
    return found


def _seed() -> None:
    """Make what the user's functions draw the same each time; the caller puts the random state back."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(0)


def _files(target: str) -> list[list[str]]:
    """Return names and hashes of the target's file and of all files of the user's that are imported by now."""
    place = Target.read(target).place
    found = {Path(place if place.endswith(".py") else sys.modules[place].__file__ or "").resolve()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # The program that asks is not part of the target; where it is, it is the target's own file.
        if name != "__main__" and isinstance(file, str) and not is_installed(file):
            found.add(Path(file).resolve())
    return sorted([file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in found if file.is_file())


def _device(on: str) -> list[Any]:
    if on == "cpu":
        # Both change what kernels allocate: their own layouts, and a buffer per thread.
        return [on, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    device = torch.device(on)
    read_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return [on, read_name(device) if read_name else platform.processor(), open_device(on).total_bytes]


def _version(package: str) -> str | None:
    # Not by `__version__`: asking a lazy package for an attribute may import half of it.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
