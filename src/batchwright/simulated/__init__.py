"""A simulated card: its allocator, its operators, its ranks, and what of torch it replaces.

Following a step and simulating a card lean on names that torch does not promise to keep. They are looked up here, once,
before anything that uses them is imported, so that a torch without them ends in a sentence and not in an ImportError.

Promises:
- a torch in which a name is missing raises `UnsupportedTorchError`: it says which, what for, and what to install.
"""

from __future__ import annotations

import importlib
from functools import cache

from batchwright.errors import UnsupportedTorchError

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


check_torch()  # before the modules of this folder import what an older torch does not have
