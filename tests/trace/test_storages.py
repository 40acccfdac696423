"""A log against counting: the peak, what was alive, and the peaks of its phases."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.memory.breakdown import break_down, part_of, parts_at_the_same_moment
from batchwright.trace.storages import Block, Log, alive_at, find_peak, peaks_of_phases

PHASES = ["build", "batch", "forward", "backward", "optimizer"]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Births, resizes and deaths in any order, phase by phase."""
    log = Log()
    alive: list[Block] = []
    for phase in PHASES:
        log.enter(phase)
        for _ in range(draw(st.integers(0, 6))):
            what = draw(st.sampled_from(["birth", "birth", "death", "resize"]))
            if what == "birth" or not alive:
                block = Block(
                    draw(st.integers(0, 1000)), phase, "", "op", part=draw(st.sampled_from([None, "weights"]))
                )
                alive.append(block)
                log.changes.append((block, block.num_bytes))
                continue
            block = alive[draw(st.integers(0, len(alive) - 1))]
            if what == "death":
                alive.remove(block)
                block.died_in = phase
                log.changes.append((block, -block.num_bytes))
            else:
                size = draw(st.integers(0, 1000))
                log.changes.append((block, size - block.num_bytes))
                block.num_bytes = size
    return log


def running_sums(log: Log) -> list[int]:
    return [sum(change for _, change in log.changes[: end + 1]) for end in range(len(log.changes))]


@settings(max_examples=100)
@given(log=logs())
def test_the_peak_is_the_largest_running_sum(log: Log) -> None:
    peak = find_peak(log)
    assert peak.num_bytes == max([0, *running_sums(log)])
    assert sum(peak.alive.values()) == peak.num_bytes


@settings(max_examples=100)
@given(log=logs(), share=st.sampled_from([0.5, 0.125]))
def test_a_scaled_peak_is_that_of_a_log_of_smaller_blocks(log: Log, share: float) -> None:
    def scale(block: Block) -> float:
        return share if block.part == "weights" else 1.0

    sums = [0.0]
    for block, change in log.changes:
        sums.append(sums[-1] + change * scale(block))
    assert abs(find_peak(log, scale).num_bytes - max(sums)) <= 0.5


@settings(max_examples=100)
@given(log=logs(), window=st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_a_peak_can_be_looked_for_in_a_stretch(log: Log, window: tuple[int, int]) -> None:
    since, until = min(window), max(window)
    assert find_peak(log, since=since, until=until).num_bytes == max([0, *running_sums(log)[since:until]])


@settings(max_examples=100)
@given(log=logs())
def test_every_byte_of_the_peak_is_in_one_part(log: Log) -> None:
    found = break_down(log)
    assert sum(found.parts.values()) == found.peak_bytes
    assert max((owner.num_bytes for owner in found.largest), default=0) <= found.peak_bytes
    assert parts_at_the_same_moment(log, log) == found.parts


@settings(max_examples=100)
@given(log=logs())
def test_the_highest_phase_holds_the_peak(log: Log) -> None:
    phases = peaks_of_phases(log)
    assert list(phases) == PHASES
    assert max(phases.values()) == find_peak(log).num_bytes


def test_what_is_alive_is_what_was_born_and_has_not_died() -> None:
    log = Log()
    first, second = Block(10, "forward", "", "mm"), Block(5, "forward", "", "add")
    log.changes += [(first, 10), (second, 5), (first, -4), (second, -5)]
    assert [alive_at(log, position) for position in range(-1, 4)] == [
        {},
        {first: 10},
        {first: 10, second: 5},
        {first: 6, second: 5},
        {first: 6},
    ]


def test_an_empty_log_has_no_peak() -> None:
    assert find_peak(Log()).num_bytes == 0
    assert find_peak(Log()).alive == {}


def test_what_forward_leaves_is_an_activation_and_what_is_gone_by_then_a_temporary() -> None:
    assert part_of(Block(1, "forward", "", "mm", died_in="backward")) == "activations"
    assert part_of(Block(1, "forward", "", "mm", died_in="forward")) == "temporaries"
    assert part_of(Block(1, "backward", "", "mm", died_in="backward")) == "temporaries"
    assert part_of(Block(1, "backward", "", "mm", died_in="backward", is_recomputed=True)) == "activations"
    assert part_of(Block(1, "batch", "", "randn")) == "inputs"
    assert part_of(Block(1, "build", "", "empty")) == "weights"
    assert part_of(Block(1, "backward", "", "mm", part="gradients")) == "gradients"


def test_a_run_of_another_length_is_compared_within_the_same_phase() -> None:
    def make(size: int, *, extra: bool) -> Log:
        log = Log()
        log.enter("forward")
        kept = Block(size, "forward", "", "mm", died_in="optimizer")
        log.changes.append((kept, size))
        if extra:
            scratch = Block(1, "forward", "", "mm", died_in="forward")
            log.changes += [(scratch, 1), (scratch, -1)]
        log.enter("optimizer")
        log.changes += [(Block(100, "optimizer", "", "sqrt", part="temporaries"), 100), (kept, -size)]
        return log

    log, other = make(10, extra=False), make(20, extra=True)
    assert break_down(log).parts == {"activations": 10, "temporaries": 100}
    assert parts_at_the_same_moment(log, other) == {"activations": 20, "temporaries": 100}
