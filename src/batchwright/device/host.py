"""The host as a device: counted by tensors, or under a real byte budget that the kernel keeps.

Promises:
- `HostDevice` counts bytes of tensors from before the model is built. A limit is kept by counting: the operator that
  would exceed it raises a MemoryError, and the machine is never filled;
- a storage counts once, however many views it has, from the operator that made or first used it until its last owner
  lets go, autograd and optimizers included;
- free memory respects the cgroup, so that what is asked for does not wake the kernel's killer;
- the budget of `LimitedHost` covers everything taken from before the model is built: tensors, thread stacks, what
  kernels keep. Weights of a model that was handed in, and so exist already, are inside it; what a process held besides
  them is outside. The limit is on during a probe only, is soft, is never raised above one that was there before, and
  is taken back whatever happens;
- what is limited is private writable memory (`VmData`): tensors, heaps, thread stacks; files and imported code are not;
- a peak under it is that of the time watched, whatever the process held before; it was within 0.3 MiB of the smallest
  limit under which the same step ran.

What an operator takes and gives back inside itself is not counted: a oneDNN LSTM was counted 9.6 % low, an MLP, a
transformer and a conv net to the byte or nearly so. A counted run is slower than a plain one, and torch.compile does
not compile while it is counted.

One change lasts: glibc is told to give blocks of 64 KiB and more back to the system as soon as they are freed.
Without that, freed memory stays in the process, and what fits depends on what ran before. What was freed inside the
heap before that stays there; `holes_filled` takes it, so that a step cannot use it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter, tree_leaves

from batchwright.device.outcome import Outcome, judge
from batchwright.device.step import Device
from batchwright.state.kept_tensor import storages_of
from batchwright.units import PeakBytes, format_bytes

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_THRESHOLD = 65536
_LARGEST_HOLE = 2**28
# From malloc.c of glibc: a block that has a mapping of its own, in the word before it.
_IS_MMAPPED = 2
# The same for a process that is about to start.
PINNED_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": str(_THRESHOLD)}


@dataclass(frozen=True)
class Reading:
    """What the kernel says about this process, in bytes."""

    data: int
    size: int
    peak_size: int


def can_limit() -> bool:
    """Whether this system keeps a limit on private memory and tells how much there is: Linux does."""
    return sys.platform == "linux" and read_memory() is not None


def read_memory() -> Reading | None:
    """Ask the kernel; None where it does not say."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/status").read_text().splitlines()
        amounts = {name: value for name, _, value in (line.partition(":") for line in lines)}
        data, size, peak = (int(amounts[name].split()[0]) * 1024 for name in ("VmData", "VmSize", "VmPeak"))
        return Reading(data, size, peak)
    return None


class PeakWatch:
    """Reads the most private memory that this process held while it was on.

    >>> with PeakWatch() as watch:
    ...     block = bytearray(64 * 2**20)
    ...     del block
    ...     grown = watch.peak_bytes() - watch.bytes_before
    >>> 64 <= grown / 2**20 < 66
    True

    The kernel keeps a peak of the whole address space only, and never lowers it. So addresses without memory are
    taken until the space is as large as it ever was; from there on each new peak shows.
    """

    def __enter__(self) -> PeakWatch:
        before = read_memory()
        assert before is not None, "a PeakWatch needs a kernel that tells the memory of a process"
        self.bytes_before = before.data
        self._fillers = [_take_addresses(before.peak_size - before.size)]
        return self

    def __exit__(self, *_: object) -> None:
        for filler in self._fillers:
            if filler is not None:
                filler.close()

    def look_from_here(self) -> None:
        """Forget the peaks so far: a new thread takes twice the addresses of its heap for a moment, and no memory."""
        now = read_memory()
        assert now is not None
        self._fillers.append(_take_addresses(now.peak_size - now.size))

    def peak_bytes(self) -> int:
        """Return the peak so far."""
        now = read_memory()
        assert now is not None
        # What of the space is not private memory (files, bare addresses) hardly ever shrinks while a step runs, so its
        # size now is its size at the peak.
        return max(now.peak_size - (now.size - now.data), self.bytes_before)


def _take_addresses(num_bytes: int) -> mmap.mmap | None:
    if num_bytes <= 0:
        return None
    # Without access rights it is no memory, and no limit on memory counts it.
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)


def give_back() -> None:
    """Pin glibc's thresholds and hand free memory back to the system."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD)
        libc.malloc_trim(0)


@contextmanager
def holes_filled() -> Iterator[int]:
    """Take what is free inside the heap until this ends, and tell how many bytes that is.

    A tensor that fits into such a hole needs no new memory, and no limit sees it: a process that had freed 40 tensors
    of 1 MiB found 14 % more samples within 64 MiB than a fresh one. Above the pinned threshold glibc looks for a hole
    first and maps new memory otherwise, so that each size is asked for until it has a mapping of its own.
    """
    blocks: list[int] = []
    num_bytes = 0
    give_back()
    libc = _glibc()
    try:
        size = _LARGEST_HOLE
        while libc is not None and size >= _THRESHOLD:
            block = libc.malloc(size)
            if block and not ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _IS_MMAPPED:
                blocks.append(block)
                num_bytes += libc.malloc_usable_size(block)
                continue
            libc.free(block)
            size //= 2
        yield num_bytes
    finally:
        for block in blocks:
            libc.free(block)


def _glibc() -> Any:
    """Return the C library if it is glibc, whose blocks can be told apart; None elsewhere."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        assert libc.gnu_get_libc_version
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        libc.malloc_usable_size.restype, libc.malloc_usable_size.argtypes = ctypes.c_size_t, (ctypes.c_void_p,)
        libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
        return libc
    return None


def room_under_the_limit() -> int | None:
    """Return what may still be taken under a limit that somebody has set; None where there is none."""
    reading = read_memory()
    if reading is None or sys.platform != "linux":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - reading.data)


@contextmanager
def limited_to(data_bytes: int) -> Iterator[None]:
    """Let this process hold no more than so many bytes of private memory, all that it holds already included."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_DATA)
    tightest = [bound for bound in (*old, data_bytes) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(tightest), old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)


class ByteCounter(TorchDispatchMode):
    """A mode under which the bytes alive in main memory are counted.

    >>> with ByteCounter() as counter:
    ...     a = torch.zeros(1024)
    ...     b = a.view(32, 32)
    ...     del a
    >>> counter.alive_bytes, counter.peak_bytes
    (4096, 4096)
    >>> del b
    >>> counter.alive_bytes, counter.peak_bytes
    (0, 4096)
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.alive_bytes = 0
        self.peak_bytes = 0
        # Keyed by the address of the C++ storage. The reference is to its Python object, which torch keeps for as
        # long as the C++ one lives once it has been asked for; so its end is the storage's end.
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def count(self, tensors: Iterable[Any]) -> None:
        """Count what no operator under this mode has made: the weights of a model that was handed in."""
        for value in tensors:
            for tensor in _plain_tensors(value):
                self._see(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and look at what it was given and what it returned."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # The inputs as well: a tensor from numpy, or one made before, is first met as an input.
        self.count(tree_iter((args, kwargs)))
        self.count(tree_iter(result))
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # Sparse and oneDNN tensors have none; what they are made of was counted when it was made.
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            if known[1] == num_bytes:
                return
            self._alive[key] = (known[0], num_bytes)  # Resized in place, as FSDP does.
            self._change(num_bytes - known[1])
            return
        self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), num_bytes)
        self._change(num_bytes)

    def _change(self, num_bytes: int) -> None:
        self.alive_bytes += num_bytes
        if self.limit_bytes is not None and self.alive_bytes > self.limit_bytes:
            raise MemoryError(
                f"the tensors alive would take {format_bytes(self.alive_bytes)} and the limit is "
                f"{format_bytes(self.limit_bytes)} ({self.alive_bytes:,} and {self.limit_bytes:,} bytes)."
            )
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _forget(self, key: int) -> None:
        self.alive_bytes -= self._alive.pop(key)[1]


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold memory: a wrapper such as DTensor only points at them."""
    if not isinstance(value, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(value, name))
    else:
        yield value


@dataclass(frozen=True)
class HostDevice(Device):
    """This machine's processor and memory.

    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params),
    ... )
    >>> HostDevice().probe(workload, 4).verdict, HostDevice(limit_bytes=100).probe(workload, 4).verdict
    ('fits', 'out_of_memory')
    """

    limit_bytes: int | None = None

    @property
    def free_bytes(self) -> int | None:
        """Memory that can still be taken without swapping; None where the system does not say."""
        amounts = (self.limit_bytes, _available_bytes(), *(limit - used for limit, used in _cgroups()))
        return min((max(0, amount) for amount in amounts if amount is not None), default=None)

    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
        held: Iterable[torch.Tensor] = (),
    ) -> Outcome:
        """Run anything and say how it ended; `held` are tensors that exist already and count."""
        counter = ByteCounter(limit_bytes=self.limit_bytes)

        def run_counted() -> tuple[float, ...]:
            with counter:
                counter.count(held)
                return run()

        return judge(
            run_counted,
            micro_batch=micro_batch,
            shape=shape or {},
            accumulation=accumulation,
            # No caching allocator of torch's stands between a CPU tensor and the system: nothing is reserved.
            peak=lambda: PeakBytes(allocated=counter.peak_bytes),
        )


def _available_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """Return (limit, used) of each cgroup around this process that has a limit; of version 2 and of version 1."""
    limits = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, limit_file, used_file = root, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                base, limit_file, used_file = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            # A limit may sit on any group above ours; inside a container our own path may not be visible at all.
            group = base / path.lstrip("/")
            for place in (group, *group.parents):
                # "max" is no number, and version 1 writes "no limit" as a number near 2**63.
                with suppress(OSError, ValueError):
                    limit = int((place / limit_file).read_text())
                    if limit < 2**60:
                        limits.append((limit, int((place / used_file).read_text())))
                if place == base:
                    break
    return limits


# A later process takes a little more than a probe of two steps saw: what its heaps had free at the start differs, and a
# process creeps after its second step. 0.3 MiB on the models of benchmarks/fit_heaps.py, 0.8 MiB the most on any other
# that no tolerance is judged on; 1 MiB is held back.
_HEAPS_DIFFER_BYTES = 2**20
# torch splits an elementwise operator over its threads in pieces of 32,768.
_ENOUGH_FOR_ALL_THREADS = 32_768 * 64


@dataclass(frozen=True)
class LimitedHost(Device):
    """This machine's memory, of which a probe may take so many bytes.

    >>> from batchwright.workload import Workload
    >>> workload = Workload(model=nn.Linear(8, 1), batch=lambda n: torch.zeros(n, 8), loss=lambda m, b: m(b).mean())
    >>> LimitedHost(limit_bytes=2**28).probe(workload, 4).verdict
    'fits'
    >>> LimitedHost(limit_bytes=2**28).probe(workload, 2**24).verdict
    'out_of_memory'
    """

    limit_bytes: int
    held_bytes: int = 0
    """Of what the process holds before a probe, this much belongs to the budget: a live model's weights."""

    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
        held: Iterable[torch.Tensor] = (),
    ) -> Outcome:
        """Run anything under the budget and say how it ended."""
        import torch._dynamo

        clear_kernel_buffers()
        with holes_filled(), PeakWatch() as watch:
            outside = watch.bytes_before - self.held_bytes - _HEAPS_DIFFER_BYTES
            # Threads first: their stacks belong to the budget, but OpenMP ends the process if it cannot start one.
            torch.ones(_ENOUGH_FOR_ALL_THREADS).add_(1)
            watch.look_from_here()

            def run_limited() -> tuple[float, ...]:
                with limited_to(outside + self.limit_bytes):
                    return run()

            outcome = judge(
                run_limited,
                micro_batch=micro_batch,
                shape=shape or {},
                accumulation=accumulation,
                # What ran under the limit cannot have exceeded it, though the reading is only so exact.
                peak=lambda: PeakBytes(device=min(watch.peak_bytes() - outside, self.limit_bytes)),
            )
        give_back()
        # What the kernel refused counts in its peak as well, so after a refusal the peak says nothing.
        return outcome if outcome.fits else replace(outcome, peak_bytes=None)


def live_bytes(things: Iterable[Any]) -> int:
    """Bytes of what exists already: weights, buffers and gradients of modules, states of optimizers; nothing twice.

    >>> live_bytes([nn.Linear(8, 1), "no module"])
    36
    """
    tensors: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            tensors += [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, torch.optim.Optimizer):
            tensors += [parameter for group in thing.param_groups for parameter in group["params"]]
            tensors += [t for state in thing.state.values() for t in tree_leaves(dict(state)) if torch.is_tensor(t)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    real = [t for t in tensors if t.device.type == "cpu" and not is_traceable_wrapper_subclass(t)]
    return sum(dict(storage for tensor in real for storage in storages_of(tensor)).values())


def clear_kernel_buffers() -> None:
    """Have MKL give back the buffers it keeps for sizes that ran before: 3 to 50 MiB that a fresh process has free."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers()
