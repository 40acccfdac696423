"""The counters of torch.cuda.memory_stats that a simulated card keeps: how much now, and how much at most."""

from __future__ import annotations

from dataclasses import dataclass, field


class Counter:
    """A number with its peak, and by how much it ever rose and fell.

    >>> counter = Counter()
    >>> counter.add(3); counter.subtract(1); counter
    Counter(current=2, peak=3)
    """

    __slots__ = ("_at_reset", "current", "peak", "risen")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.risen = 0
        self._at_reset = 0

    def __repr__(self) -> str:
        return f"Counter(current={self.current}, peak={self.peak})"

    def add(self, amount: int) -> None:
        """Count up."""
        self.current += amount
        self.risen += amount
        if self.current > self.peak:
            self.peak = self.current

    def subtract(self, amount: int) -> None:
        """Count down."""
        self.current -= amount

    @property
    def fallen(self) -> int:
        """By how much it fell; found from the rest, because counting is done for every block."""
        return self.risen - (self.current - self._at_reset)

    def forget_changes(self) -> None:
        """Let what rose and fell start again from nothing."""
        self.risen, self._at_reset = 0, self.current


@dataclass(slots=True)
class AllocatorCounters:
    """What the allocator has done; bytes, unless the name says otherwise."""

    allocated: Counter = field(default_factory=Counter)
    """In blocks that are handed out: what max_memory_allocated shows."""
    active: Counter = field(default_factory=Counter)
    """The same, and blocks that were freed and wait for other streams."""
    reserved: Counter = field(default_factory=Counter)
    """Taken from the card: what max_memory_reserved shows."""
    requested: Counter = field(default_factory=Counter)
    """As asked for, before any rounding, of the active blocks."""
    inactive_split: Counter = field(default_factory=Counter)
    """Free, in segments that other blocks keep from being given back; expandable segments are not counted."""
    num_segments: Counter = field(default_factory=Counter)
    """Segments from cudaMalloc; expandable segments are not counted."""
    num_allocations: Counter = field(default_factory=Counter)
    """Blocks that are handed out."""
    num_alloc_retries: int = 0
    """How often everything cached was given back for one request."""
    num_ooms: int = 0
    num_oom_rejections: int = 0
    """Refused at once for the allowed bytes (throw_on_cudamalloc_oom)."""
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    """Calls that took memory from the card, and those that gave some back: each is slow on a real one."""
    num_device_free: int = 0

    def reset_peaks(self) -> None:
        """Let every peak start again from what there is now."""
        for counter in self._counters():
            counter.peak = counter.current

    def reset_accumulated(self) -> None:
        """Forget by how much numbers rose and fell, and how often things happened."""
        for counter in self._counters():
            counter.forget_changes()
        self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = 0
        self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = 0

    def _counters(self) -> tuple[Counter, ...]:
        return (
            self.allocated,
            self.active,
            self.reserved,
            self.requested,
            self.inactive_split,
            self.num_segments,
            self.num_allocations,
        )
