"""A process group of gloo's whose tensors never leave the thread that called, so that their memory can be counted.

Gloo's own threads let go of tensors last, and the profiler does not hear what another thread frees. Here gloo is handed
memory of numpy's, which the profiler does not count, and results are copied from it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist


class _Done(dist._Work):  # type: ignore[name-defined, misc]
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = torch.futures.Future()  # type: ignore[var-annotated]
        self._result.set_result(result)

    def wait(self, *_: Any) -> bool:
        return True

    def get_future(self) -> Any:
        return self._result


def _outside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that nobody counts."""
    return torch.from_numpy(tensor.detach().contiguous().numpy().copy())


_Group: Any = dist.ProcessGroup


class _CountedGroup(_Group):  # type: ignore[misc]
    """What gloo does, waited for at once."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = "counted"
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=120))

    def getBackendName(self) -> str:  # noqa: N802 - torch's own name
        return "counted"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's own name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's own name
        return self._name

    def _gathered(self, tensor: torch.Tensor) -> Any:
        """What every rank has, by rank, as bytes."""
        own = torch.from_numpy(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        parts = torch.from_numpy(numpy.zeros((self.size(), own.numel()), dtype=numpy.uint8))
        parts[self.rank()] = own
        # As a sum: gloo's own gather lays out its results in memory that is counted.
        self._gloo.allreduce([parts]).wait()
        return parts

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        for output, part in zip(outputs[0], self._gathered(inputs[0]), strict=True):
            output.view(-1).view(torch.uint8).copy_(part)
        return _Done(outputs)

    def _allgather_base(self, output: Any, tensor: Any, *_: Any) -> Any:
        output.view(-1).view(torch.uint8).copy_(self._gathered(tensor).view(-1))
        return _Done([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _Done(outputs)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        for tensor in tensors:
            summed = _outside(tensor)
            self._gloo.allreduce([summed]).wait()
            tensor.copy_(summed)
            if options is not None and options.reduceOp == dist.ReduceOp.AVG:
                tensor.div_(self.size())
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Any:
        return self.allreduce(tensors, options)

    def _reduce_scatter_base(self, output: Any, tensor: Any, options: Any = None) -> Any:
        summed = _outside(tensor)
        self._gloo.allreduce([summed]).wait()
        output.copy_(summed.view(self.size(), -1)[self.rank()].view_as(output))
        if options is not None and options.reduceOp == dist.ReduceOp.AVG:
            output.div_(self.size())
        return _Done([output])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, options)
        return _Done(outputs)

    # As newer functions of torch.distributed call them.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def alltoall_base(self, output: Any, tensor: Any, outputs: Any, inputs: Any, *_: Any) -> Any:
        received = _outside(output)
        self._gloo.alltoall_base(received, _outside(tensor), outputs, inputs).wait()
        output.copy_(received)
        return _Done([output])

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        for tensor in tensors:
            sent = _outside(tensor)
            self._gloo.broadcast([sent], options).wait()
            tensor.copy_(sent)
        return _Done(tensors)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        parts = [[_outside(tensor) for tensor in tensors] for tensors in inputs]
        received = [_outside(output) for output in outputs]
        self._gloo.scatter(received, parts, options).wait()
        for output, part in zip(outputs, received, strict=True):
            output.copy_(part)
        return _Done(outputs)

    def barrier(self, *_: Any, **__: Any) -> Any:
        self._gloo.barrier().wait()
        return _Done([])

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: Any, sender: int, tag: int = 0) -> Any:
        return self._gloo.recv(tensors, sender, tag)


def register() -> None:
    """Let torch make such groups, as backend "counted"."""
    dist.Backend.register_backend(
        "counted", lambda store, rank, size, _: _CountedGroup(store, rank, size), devices=["cpu"]
    )
