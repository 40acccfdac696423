"""What torch's compilers see of a simulated card: a GPU of CUDA's, on which Triton runs.

Dynamo and Inductor decide by `device.type == "cuda"` what a step may do, which kernels there are and what is fused.
Between the two, AOTAutograd dispatches operators, and there the card has to be the device that torch knows.

Replaces, while something is compiled: FakeTensor.device, is_cuda and _normalize_fake_device (__new__ where there is
none), FakeTensorMode.dispatch, torch._inductor.scheduler.has_triton, torch.utils._triton.triton_hash_with_backend, what
CudaInterface asks the driver, the initialisation of Inductor's patterns, and where its constants are computed.

Promises:
- tensors of the card say `cuda:0` to Dynamo and Inductor, the truth to AOTAutograd and to torch's rules of shapes;
- whatever is made on `cuda` meanwhile lies on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from batchwright.simulated.torch_patches.backend import NAME, card_device
from batchwright.simulated.torch_patches.patches import Patch, outside

CUDA = torch.device("cuda", 0)
_TRUE_DEVICE: Any = vars(FakeTensor)["device"]
_DISPATCH: Any = FakeTensorMode.dispatch
# Which device a fake tensor keeps; torch 2.10 decides it where one is made.
_NORMALIZE: Any = getattr(FakeTensor, "_normalize_fake_device", None)
_NEW: Any = FakeTensor.__new__


class Sight:
    """Whether tensors of the card say `cuda:0` just now, or the truth."""

    def __init__(self) -> None:
        self._is_on = False
        self._num_rules = 0

    @contextmanager
    def switched(self, is_on: bool) -> Iterator[None]:
        """Have tensors say `cuda:0`, or the truth."""
        before, self._is_on = self._is_on, is_on
        try:
            yield
        finally:
            self._is_on = before

    def patches(self) -> Iterator[Patch]:
        """Have fake tensors of the card say what they are taken for, and `cuda` mean the card to torch's own rules."""

        def device(tensor: Any) -> torch.device:
            # A view that torch 2.10 makes keeps the device that its base was seen on.
            true: torch.device = card_device(_TRUE_DEVICE.fget(tensor))
            return CUDA if self._is_on and not self._num_rules and true.type == NAME else true

        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self._num_rules += 1
            try:
                named = {name: card_device(value) for name, value in (kwargs or {}).items()}
                return _DISPATCH(mode, func, types, tuple(map(card_device, args)), named)
            finally:
                self._num_rules -= 1

        def normalize(device: torch.device) -> torch.device:
            return _NORMALIZE(card_device(device))  # type: ignore[no-any-return]

        def make(kind: Any, mode: Any, elem: Any, device: Any, *rest: Any, **named: Any) -> Any:
            return _NEW(kind, mode, elem, card_device(device), *rest, **named)

        yield Patch(FakeTensor, "device", property(device))
        yield Patch(FakeTensor, "is_cuda", property(lambda tensor: device(tensor).type == "cuda"))
        if _NORMALIZE is not None:
            yield Patch(FakeTensor, "_normalize_fake_device", staticmethod(normalize))
        else:
            yield Patch(FakeTensor, "__new__", staticmethod(make))
        yield Patch(FakeTensorMode, "dispatch", dispatch)


def with_devices(graph: Any, change: Callable[[Any], Any]) -> Any:
    """Return a graph with every device that it names changed."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args = map_aggregate(node.args, change)
                node.kwargs = map_aggregate(node.kwargs, change)
            module.recompile()
    return graph


def as_cuda(value: Any) -> Any:
    """Return `cuda:0` for the device of the card; anything else as it is."""
    return CUDA if isinstance(value, torch.device) and value.type == NAME else value


def inductor_on_card(capability: tuple[int, int]) -> Iterator[Patch]:
    """Have Inductor find a GPU with Triton."""
    yield Patch(import_module("torch._inductor.scheduler"), "has_triton", lambda: True)
    yield Patch(import_module("torch.utils._triton"), "triton_hash_with_backend", lambda: "")
    cuda = import_module("torch._dynamo.device_interface").CudaInterface
    properties = staticmethod(lambda device=None: torch.cuda.get_device_properties())
    for place in (cuda, cuda.Worker):
        yield Patch(place, "get_device_properties", properties)
        yield Patch(place, "current_device", staticmethod(lambda: 0))
    yield Patch(cuda, "is_available", staticmethod(lambda: True))
    yield Patch(cuda, "get_compute_capability", staticmethod(lambda device=None: 10 * capability[0] + capability[1]))
    for name in ("joint_graph", "post_grad", "pre_grad"):
        passes = import_module(f"torch._inductor.fx_passes.{name}")
        yield Patch(passes, "lazy_init", _outside_of_the_run(passes.lazy_init))
    # It runs in one place only: without freezing, which is of inference, no other constants are computed.
    folder = import_module("torch._inductor.constant_folding").ConstantFolder
    yield Patch(folder, "run", _on_host(folder.run))


def _outside_of_the_run(set_up: Callable[..., Any]) -> Callable[..., Any]:
    """Patterns that Inductor looks for are drawn up once per process, from tensors of the host."""

    def set_up_outside(*device: Any) -> None:
        with outside(), _disable_current_modes():
            # Called as it is for the host, so that it is done once for both.
            set_up(*[torch.device("cpu")] * len(device))

    return set_up_outside


def _on_host(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Constants are computed for real, and there is nothing to compute with on the card."""

    def run_on_host(folder: Any) -> Any:
        given = {node: node.kwargs for node in folder.module.graph.nodes if as_cuda(node.kwargs.get("device")) == CUDA}
        for node, kwargs in given.items():
            node.kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return run(folder)
        finally:
            for node, kwargs in given.items():
                node.kwargs = kwargs

    return run_on_host
