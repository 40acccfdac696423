"""The device of a simulated card: known to torch by name, and fake tensors on it behave as on a GPU.

torch lets one further backend be registered per process. Fake tensors on it take the paths of a GPU (dropout keeps a
mask of bytes, optimizers their multi-tensor form), and no kernel is ever run.

Replaces: torch.autograd._engine_run_backward. Registers, for good: torch's PrivateUse1 backend, as "simulated".

Promises:
- registered once, when first asked for, and announced as available only while a card is simulated, and only to the
  threads that run on it; the registration is all that stays in the process;
- a process that has simulated a card can fork and run backward in the child, as before;
- works in a process that has trained on the CPU before: backward runs in the calling thread;
- an error that is raised inside a backward comes out of it as it was raised.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from batchwright.errors import InvalidInputError
from batchwright.simulated.torch_patches.patches import Patch, card_announced, is_on_simulated_card

# Errors of Python's that pass through torch's own code while tensors are on the simulated device: on its way out of
# torch's engine an error meets guards that ask the device for its type, in Python, with the error still pending. Python
# then objects, in a place where nothing may be raised, and the process is ended. So the one who is asked takes the
# pending error aside; what comes out of torch is an error about a missing error, and the one taken is raised instead.

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


def count_no_devices() -> None:
    """Have the first backward pass of the process be one on the CPU, which starts no threads.

    That one counts the devices and starts a thread for each, after which a forked child cannot run backward. A
    simulated card is counted; and over fake tensors a build of torch for GPUs counts eight where there is none.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def _register() -> None:
    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return is_on_simulated_card()

        def has_primary_context(self, _: int) -> bool:
            return is_on_simulated_card()

        def is_built(self) -> bool:
            return True

    count_no_devices()
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
    if isinstance(shard, FunctionalTensor):  # as AOTAutograd has it
        device = shard.device
    return device is not None and device.type == NAME


def card_device(value: Any) -> Any:
    """Return the simulated device for one that names a GPU; anything else as it is."""
    if not isinstance(value, torch.device) or value.type != "cuda":
        return value
    refuse_other_cards(value.index)
    return torch.device(NAME, 0)


# torchrun numbers the ranks of a node so, and each takes the card of its number.
_CARDS_OF_A_NODE = 8


def refuse_other_cards(index: int | None) -> None:
    """Raise what CUDA raises for a card beyond the simulated one."""
    own = dist.get_rank() % _CARDS_OF_A_NODE if dist.is_available() and dist.is_initialized() else 0
    if index and index != own:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: the step asks for cuda:{index}, and one card is simulated, cuda:0"
        )
