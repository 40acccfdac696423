"""A device that does not exist, known to torch by name, on which fake tensors behave as on a GPU.

torch lets one further backend be registered per process. Fake tensors on it take the paths of a GPU (dropout keeps a
mask of bytes, optimizers their multi-tensor form), and no kernel is ever run.

Promises:
- registered once, when first asked for, and announced as available only while a card is simulated, and only to the
  threads that run on it; the registration is all that stays in the process;
- a process that has simulated a card can fork and run backward in the child, as before;
- works in a process that has trained on the CPU before: backward runs in the calling thread.
"""

from __future__ import annotations

import ctypes
import importlib
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from batchwright.errors import InvalidInputError, UnsupportedTorchError
from batchwright.simulated.torch_patches.patches import Patch, card_announced, is_on_simulated_card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# What batchwright needs of torch beyond its public surface, and the versions it was run with.
#
# Following a step and simulating a card lean on names that torch does not promise to keep. They are looked up once,
# before anything that uses them is imported, so that a torch without them ends in a sentence and not in an
# ImportError.
#
# Promises:
# - importing this imports no torch;
# - a torch in which a name is missing raises `UnsupportedTorchError`: it says which, what for, and what to install.

OLDEST, NEWEST = "2.10.0", "2.15.0"

# Name in torch -> what needs it. test_torch_names.py looks up every private name that the source uses.
NEEDED = {
    "utils.backend_registration._setup_privateuseone_for_python_backend": "simulated cards",
    "_C._acc.PrivateUse1Hooks": "simulated cards",
    "_C._acc.DeviceGuard": "simulated cards",
    "_C._get_privateuse1_backend_name": "simulated cards",
    "_subclasses.fake_tensor.FakeTensorMode": "following a step without memory",
    "_subclasses.fake_tensor.unset_fake_temporarily": "following a step without memory",
    "utils._python_dispatch.TorchDispatchMode": "following a step without memory",
    "utils._python_dispatch._disable_current_modes": "following a step without memory",
    "_C._profiler.ProfilerConfig": "asking kernels what they allocate",
    "_C._autograd._enable_profiler_legacy": "asking kernels what they allocate",
    "_C._autograd._disable_profiler_legacy": "asking kernels what they allocate",
    "_C._get_mkldnn_enabled": "asking kernels what they allocate",
}


@cache
def check_torch() -> None:
    """Raise if this torch lacks what following a step or simulating a card needs."""
    missing = [name for name in NEEDED if not has_name(name)]
    if missing:
        version = importlib.import_module("torch").__version__
        raise UnsupportedTorchError(
            f"torch {version} lacks what batchwright needs of it; it was run with torch {OLDEST} to {NEWEST}.",
            details=[f"torch.{name}, for {NEEDED[name]}" for name in missing],
            remedy=f"pip install 'torch>={OLDEST.removesuffix('.0')},<={NEWEST}'",
        )


def has_name(name: str) -> bool:
    """Whether torch has a name: `utils._pytree.tree_map`, a module or what is in one.

    >>> has_name("nn.Linear"), has_name("nn.no_such_layer")
    (True, False)
    """
    here: object = importlib.import_module("torch")
    path = "torch"
    for part in name.split("."):
        path = f"{path}.{part}"
        if not hasattr(here, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        here = getattr(here, part)
    return True


# Errors of Python's that pass through torch's own code while tensors are on the simulated device.
#
# On its way out of torch's engine an error meets guards that ask the device for its type, in Python, with the error
# still
# pending; Python then objects, in a place where nothing may be raised, and the process is ended. So the one who is
# asked
# takes the pending error aside. What comes out of torch is then an error about a missing error, and the one that was
# taken is raised in its place.

_taken: list[BaseException] = []


def make_guard() -> Any:
    """Return the guard of the device: it does nothing, and takes pending errors aside when it is asked for its type."""

    class Guard(torch._C._acc.DeviceGuard):
        # All it needs is bound here: with an error pending, looking up a name may fail for that reason alone.
        def type_(
            self,
            # A call into Python's own library raises whatever is pending.
            raise_pending: Callable[[], int] = ctypes.pythonapi.PyErr_CheckSignals,
            take: Callable[[BaseException], None] = _taken.append,
            kind: Any = torch._C._autograd.DeviceType.PrivateUse1,
        ) -> Any:
            try:
                raise_pending()
            except BaseException as error:
                take(error)
            return kind

    return Guard()


def raising_what_was_taken(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call into torch; where its error is only that there is none, raise the one that was taken aside."""
    try:
        return work(*args, **kwargs)
    except SystemError:
        if not _taken:
            raise
        error = _taken[0]
        _taken.clear()
        raise error from None


def forget_taken() -> None:
    """Forget errors that were taken aside and never raised again."""
    _taken.clear()


def errors_put_back() -> Iterator[Patch]:
    """Have every backward pass raise what was raised in it."""
    engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        return raising_what_was_taken(engine, *args, **kwargs)

    yield Patch(torch.autograd, "_engine_run_backward", run_backward)


NAME = "simulated"
_UNUSED = "privateuseone"


class _Module:
    """What torch asks of a backend's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return is_on_simulated_card()

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(is_on_simulated_card())

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """In a backward pass, where tensors name their true device, torch asks here for what it asks torch.cuda."""
        if not is_on_simulated_card() or name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def simulated_device() -> torch.device:
    """Return the device, registered where it was not yet."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken == _UNUSED:
        _register()
    elif taken != NAME:
        raise InvalidInputError(
            f"no card can be simulated in this process: torch's one place for a further device is taken by {taken!r}.",
            remedy=f"run batchwright in a process that does not import what registers {taken!r}",
        )
    return torch.device(NAME, 0)


def _register() -> None:
    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return is_on_simulated_card()

        def has_primary_context(self, _: int) -> bool:
            return is_on_simulated_card()

        def is_built(self) -> bool:
            return True

    # The first backward pass of a process counts its devices and starts a thread for each; after that a forked child
    # cannot run backward. Before the device is there to be counted, a pass on the CPU starts none.
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), hook=Hook(), device_guard=make_guard())


@contextmanager
def switched_on() -> Iterator[torch.device]:
    """Announce the device, and run backward in the calling thread: torch may have counted its devices before."""
    device = simulated_device()
    multithreading: Any = torch.autograd.set_multithreading_enabled(False)
    with multithreading, card_announced():
        yield device


def is_on_card(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on the simulated card; `tensor.device` says cuda there, and a fake storage is on meta."""
    shard = getattr(tensor, "_local_tensor", tensor)  # of a tensor that is spread over ranks, this one's part
    device: torch.device | None = getattr(shard, "fake_device", None)
    return device is not None and device.type == NAME


def card_device(value: Any) -> Any:
    """Return the simulated device for one that names a GPU; anything else as it is."""
    if not isinstance(value, torch.device) or value.type != "cuda":
        return value
    refuse_other_cards(value.index)
    return torch.device(NAME, 0)


def refuse_other_cards(index: int | None) -> None:
    """Raise what CUDA raises for a card that is not there."""
    if index:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: the step asks for cuda:{index}, and one card is simulated, cuda:0"
        )
