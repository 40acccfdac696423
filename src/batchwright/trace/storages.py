"""The storages of a traced run: born, resized, dead; each in a log, and taken from the memory that is traced.

Promises:
- nothing is summed while tracing; the peak and its parts are read off the log afterwards, when it is known what each
  block turned out to be;
- the same log can be replayed with some blocks made smaller, which is how sharding is asked about;
- a block belongs to the module that is running: in forward by its call, in backward by the number of the node that a
  forward left behind.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from batchwright.simulated.torch_patches.patches import Patch
from batchwright.trace.refused_operators import local_part, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.device.device import Owner, TracedMemory


@dataclass(eq=False, slots=True)
class Block:
    """One storage, from birth to death."""

    num_bytes: int
    phase: str
    module: str
    operator: str
    shape: tuple[int, ...] = ()
    part: str | None = None
    is_recomputed: bool = False
    died_in: str | None = None
    # What the memory handed out for it.
    handle: Any = None


@dataclass
class Log:
    """Births and deaths in order, with the phase each happened in."""

    # (block, change in bytes); a block that is resized changes by the difference.
    changes: list[tuple[Block, int]] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)

    def enter(self, phase: str) -> None:
        """Note that a phase begins here."""
        self.phases.append((phase, len(self.changes)))

    @property
    def phase(self) -> str:
        """The phase that is running."""
        return self.phases[-1][0] if self.phases else "build"


@dataclass(frozen=True)
class Peak:
    """The largest sum in a log: when it was reached, and which blocks were alive then."""

    num_bytes: int
    position: int
    alive: dict[Block, int]


def find_peak(
    log: Log, scale: Callable[[Block], float] | None = None, *, since: int = 0, until: int | None = None
) -> Peak:
    """Replay a log and find its peak; `scale` makes blocks smaller, as sharding them would.

    `since` and `until` are positions between which it is looked for.

    >>> log = Log()
    >>> a, b = Block(10, "forward", "", "mm"), Block(5, "forward", "", "add")
    >>> log.changes += [(a, 10), (b, 5), (a, -10)]
    >>> peak = find_peak(log)
    >>> peak.num_bytes, peak.position, [block.operator for block in peak.alive]
    (15, 1, ['mm', 'add'])
    """
    position, highest = -1, 0
    now = 0.0
    for index, (block, change) in enumerate(log.changes[:until]):
        now += change if scale is None else change * scale(block)
        if now > highest and index >= since:
            position, highest = index, round(now)
    return Peak(highest, position, alive_at(log, position))


def alive_at(log: Log, position: int) -> dict[Block, int]:
    """The blocks that are alive once the change at `position` has happened, with their bytes."""
    alive: dict[Block, int] = {}
    for block, change in log.changes[: position + 1]:
        amount = alive.get(block, 0) + change
        if amount:
            alive[block] = amount
        else:
            alive.pop(block, None)
    return alive


def peaks_of_phases(log: Log) -> dict[str, int]:
    """The largest memory held during each phase, in the order in which they first ran."""
    peaks: dict[str, int] = {}
    now = 0
    ends = [start for _, start in log.phases[1:]] + [len(log.changes)]
    for (phase, start), end in zip(log.phases, ends, strict=True):
        highest = now
        for _, change in log.changes[start:end]:
            now += change
            highest = max(highest, now)
        peaks[phase] = max(highest, peaks.get(phase, 0))
    return peaks


class RunningModules:
    """The names of a model's modules, and the stack of those that run."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        # Which module ran when an autograd node was made, so that its backward is attributed to the same module.
        self._of_node: dict[int, str] = {}

    def learn(self, model: nn.Module) -> None:
        """Learn the names of a model's modules."""
        self._names.update({module: name for name, module in model.named_modules()})

    def seeing_calls(self) -> Iterator[Patch]:
        """See modules begin and end."""
        # Not by hooks: torch's global ones are every thread's, and a module with hooks of its own leaves fast paths.
        call: Any = nn.Module._call_impl

        def call_and_note(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))
            try:
                return call(module, *args, **kwargs)
            finally:
                if self._stack:
                    self._stack.pop()

        yield Patch(nn.Module, "_call_impl", call_and_note)

    @property
    def are_running(self) -> bool:
        """Whether any module is running its forward."""
        return bool(self._stack)

    def clear(self) -> None:
        """Begin a phase in which none is running."""
        self._stack.clear()

    def note_node(self) -> None:
        """Note whose operator has just been numbered: its backward will carry the same number."""
        if self._stack:
            self._of_node[torch._C._autograd._get_sequence_nr() - 1] = self._stack[-1]

    def now(self, *, in_backward: bool) -> str:
        """Return the name of the module that is running, or whose backward is."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node() if in_backward else None
        return self._of_node.get(node._sequence_nr(), "") if node is not None else ""


class HostMemory:
    """The host as the memory that is traced: every tensor counts, and no allocator stands in between."""

    def holds(self, _: torch.Tensor) -> bool:
        """Say yes: on the host a trace follows whatever the step makes."""
        return True

    def malloc(self, _: int, __: Owner) -> None:
        """Take nothing: what is alive is in the log."""

    def free(self, _: None) -> None:
        """Give nothing back."""

    def record_stream(self, _: None, __: int) -> None:
        """Note nothing: the host has no streams."""

    def launched(self) -> None:
        """Note nothing: the host waits for its operators."""

    def waited_for(self) -> None:
        """Note nothing."""


class FollowedStorages:
    """Knows which block every living storage is."""

    def __init__(
        self,
        log: Log,
        modules: RunningModules,
        memory: TracedMemory,
        note: Callable[[str], None],
        forget: Callable[[int], None],
    ) -> None:
        self.log = log
        self.mode: Any = None
        """The mode of the run's own fake tensors."""
        self._modules, self._memory, self._note, self._forget = modules, memory, note, forget
        self._alive: dict[int, Block] = {}
        # Not weakref.finalize: its registry is the process's, and would hold the trace as long as any storage lives,
        # while the trace holds the storages.
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # What lies on the host while a card is traced, but for batches.
        self._on_host: dict[int, int] = {}
        self._bytes_on_host = self.most_on_host = 0

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the block a tensor lies in, if it is followed."""
        return self._alive.get(local_part(tensor).untyped_storage()._cdata)

    def see(self, tensor: torch.Tensor, operator: str) -> bool:
        """Note the storage of a tensor, if it has another size or is new; say whether it is new."""
        if isinstance(tensor, FakeTensor) and self.mode is not None and tensor.fake_mode is not self.mode:
            return False  # somebody else's thought: sharded tensors find out their shapes on fake ones of full size
        storage = storage_of(tensor, operator)
        key, num_bytes = storage._cdata, storage.nbytes()
        if not self._memory.holds(local_part(tensor)):
            # Another memory is another question; but a tensor's values may be known, and must be forgotten in time.
            self._await_death(storage, key)
            if self.log.phase != "batch":
                self.note_on_host(tensor)
            return False
        block = self._alive.get(key)
        if block is not None:
            self._resized(block, num_bytes, operator)
            return False
        if not isinstance(local_part(tensor), FakeTensor) and tensor.device.type != "meta":
            self._note("some tensors are real: what they hold was counted, but was also allocated")
        self._alive[key] = self.born(num_bytes, operator, shape=tuple(tensor.shape))
        self._await_death(storage, key)
        return True

    def note_on_host(self, tensor: torch.Tensor) -> None:
        """Note a tensor that the step keeps on the host: a weight, its state, or what was copied from the card."""
        tensor = local_part(tensor)
        if self._memory.holds(tensor) or not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        self._bytes_on_host += storage.nbytes() - self._on_host.get(storage._cdata, 0)
        self._on_host[storage._cdata] = storage.nbytes()
        self.most_on_host = max(self.most_on_host, self._bytes_on_host)
        self._await_death(storage, storage._cdata)

    def _await_death(self, storage: torch.UntypedStorage, key: int) -> None:
        if key not in self._deaths:
            self._deaths[key] = weakref.ref(storage, lambda _: self._storage_died(key))

    def let_go(self) -> None:
        """Follow nothing any more: the run is over."""
        self._deaths.clear()
        self._alive.clear()
        self._on_host.clear()

    def _resized(self, block: Block, num_bytes: int, operator: str) -> None:
        if num_bytes == block.num_bytes:
            return
        self.log.changes.append((block, num_bytes - block.num_bytes))
        block.num_bytes = num_bytes
        before, block.handle = block.handle, self._memory.malloc(num_bytes, (operator, block.module, self.log.phase))
        self._memory.free(before)

    def seeing_resizes(self) -> Iterator[Patch]:
        """Storages are resized past every dispatcher: so FSDP2 lets go of gathered weights, and takes them again."""
        resize: Any = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            block = self._alive.get(storage._cdata)
            if block is not None:
                self._resized(block, storage.nbytes(), "resize_")
            return resized

        yield Patch(torch.UntypedStorage, "resize_", resize_and_note)

    def seeing_streams(self) -> Iterator[Patch]:
        """See which memory a stream uses besides the one that it was taken on."""

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            block = self.block_of(tensor)
            if block is not None:
                self._memory.record_stream(block.handle, getattr(stream, "cuda_stream", 0))

        yield Patch(torch.Tensor, "record_stream", record_stream)

    def note_launch(self, tensor: torch.Tensor | None) -> None:
        """Note that an operator runs; one that reads a tensor of the card on the host waits for it."""
        self._memory.launched()
        if tensor is not None and self._memory.holds(tensor):
            self._memory.waited_for()

    def born(self, num_bytes: int, operator: str, *, part: str | None = None, shape: tuple[int, ...] = ()) -> Block:
        """Note a block, and take its memory."""
        phase = self.log.phase
        in_backward = phase == "backward"
        module = self._modules.now(in_backward=in_backward)
        block = Block(
            num_bytes, phase, module, operator, shape, part, is_recomputed=in_backward and self._modules.are_running
        )
        block.handle = self._memory.malloc(num_bytes, (operator, module, phase))
        self.log.changes.append((block, num_bytes))
        return block

    def note_library(self, num_bytes: int) -> None:
        """Note what a library takes for itself, if it takes anything, and never gives back."""
        if num_bytes:
            block = Block(num_bytes, self.log.phase, "", "cuBLAS", part="workspaces")
            block.handle = self._memory.malloc(num_bytes, ("cuBLAS workspace", "", self.log.phase))
            self.log.changes.append((block, num_bytes))

    def died(self, block: Block) -> None:
        """Note a block's end, and give its memory back."""
        block.died_in = self.log.phase
        self.log.changes.append((block, -block.num_bytes))
        self._memory.free(block.handle)

    def _storage_died(self, key: int) -> None:
        self._deaths.pop(key, None)
        self._bytes_on_host -= self._on_host.pop(key, 0)
        block = self._alive.pop(key, None)
        if block is not None:
            self.died(block)
        self._forget(key)
