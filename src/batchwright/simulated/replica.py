"""What DistributedDataParallel does to memory: its reducer is C++ that reads memory, so its buckets are made for it.

Promises:
- buckets hold every gradient once more, by DDP's own sizes, unless gradients are views of them;
- a communication hook of the user's runs for each bucket as it is full, and what it makes lives to the end of backward,
  as the reducer's futures do.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import CannotTraceError
from batchwright.simulated.torch_patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# torch/nn/parallel/distributed.py: the first bucket is small so that communication starts early.
_FIRST_BUCKET, _BUCKET_MIB = 1 << 20, 25
_REFUSED = (
    "_register_builtin_comm_hook",
    "_register_fused_optim",
    "_get_ddp_logging_data",
    "_get_data_parallel_params",
)


def replicas() -> Iterator[Patch]:
    """Have DistributedDataParallel take what it takes, without its reducer."""
    for name, answer in (*vars(_Replica).items(), *((name, _refusal(name)) for name in _REFUSED)):
        if callable(answer) and name in vars(DistributedDataParallel):
            yield Patch(DistributedDataParallel, name, answer)


@dataclass
class _Bucket:
    """A bucket as a communication hook is handed it: torch's GradBucket, without its C++."""

    number: int
    flat: torch.Tensor
    held: list[nn.Parameter]
    is_final: bool
    num_ready: int = 0

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def parameters(self) -> list[nn.Parameter]:
        return list(self.held)

    def gradients(self) -> list[torch.Tensor]:
        pieces = self.flat.split([parameter.numel() for parameter in self.held])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.held, strict=True)]

    def is_last(self) -> bool:
        return self.is_final


class _Replica:
    def __init__(self: Any, module: nn.Module, *_: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.device_ids, self.output_device = options.get("device_ids"), options.get("output_device")
        self.device = next(module.parameters()).device
        self.gradient_as_bucket_view = bool(options.get("gradient_as_bucket_view", False))
        self.find_unused_parameters = bool(options.get("find_unused_parameters", False))
        self.static_graph = bool(options.get("static_graph", False))
        limit = int(float(options.get("bucket_cap_mb") or _BUCKET_MIB) * 2**20)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        trained = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
        groups = _buckets(trained, limit)
        self._buckets = [
            _Bucket(number, held[0].detach().new_empty(sum(p.numel() for p in held)), held, number == len(groups) - 1)
            for number, held in enumerate(groups)
        ]
        self.gradient_buckets = [bucket.flat for bucket in self._buckets]  # the trace reads them
        self.require_backward_grad_sync = True  # loops that accumulate set it instead of asking for no_sync
        self._futures: list[Any] = []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._pre_forward(*args, **kwargs)
        return self.module(*args, **kwargs)

    def _pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for bucket in self._buckets:
            bucket.num_ready = 0
        if self.gradient_as_bucket_view and torch.is_grad_enabled():
            for bucket in self._buckets:
                for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    if parameter.grad is None:
                        parameter.grad = gradient
        return args, kwargs

    def _post_forward(self: Any, output: Any) -> Any:
        return output

    @contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self: Any, state: object, hook: Callable[[object, Any], Any]) -> None:
        def gradient_is_ready(bucket: _Bucket) -> None:
            bucket.num_ready += self.require_backward_grad_sync
            if not self.require_backward_grad_sync or bucket.num_ready < len(bucket.held):
                return
            if not self._futures:
                engine: Any = Variable._execution_engine
                engine.queue_callback(self._futures.clear)
            self._futures.append(hook(state, bucket))

        for bucket in self._buckets:
            for parameter in bucket.held:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: gradient_is_ready(bucket))

    def join(self: Any, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def _set_static_graph(self: Any) -> None:
        pass


def _refusal(name: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise CannotTraceError(
            f"DistributedDataParallel.{name} reaches into a reducer that is not there: ranks are simulated.",
            remedy="leave that call out of the wrap and the step that are traced",
        )

    return refuse


def _buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Group parameters as DDP does: in reverse order, one number format each, up to a size."""
    buckets: list[list[nn.Parameter]] = []
    sizes: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        bucket, held = sizes.get(parameter.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        held += parameter.numel() * parameter.element_size()
        is_full = held >= (_FIRST_BUCKET if len(buckets) == 1 else limit)
        sizes[parameter.dtype] = ([], 0) if is_full else (bucket, held)
    return buckets
