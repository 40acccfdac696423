"""The simulated allocator against a plain one on random calls, and by hand with numbers that anyone can check."""

from __future__ import annotations

import pytest

from batchwright.errors import InvalidInputError
from batchwright.simulated.allocator.caching_allocator import CachingAllocator, SimulatedOutOfMemory
from batchwright.simulated.allocator.settings import AllocatorSettings
from tests.simulated.allocator.event_sequences import CASES, Case, run_sequence

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def allocator(text: str = "", capacity: int | None = None, memory_fraction: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity, AllocatorSettings.parse(text), memory_fraction)


def reserved(of: CachingAllocator) -> int:
    return of.stats.reserved.current


def block_sizes(of: CachingAllocator) -> list[list[int]]:
    return [[block["size"] for block in segment["blocks"]] for segment in of.segments()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_calls_give_what_the_plain_allocator_gives_byte_for_byte(case: Case) -> None:
    outcomes = [run_sequence(case, seed, events=80) for seed in range(23)]
    assert [outcome.mismatch for outcome in outcomes if outcome.mismatch] == []
    assert sum(outcome.ooms for outcome in outcomes) > 10, "the sequences come near the limit"


class TestSizes:
    @pytest.mark.parametrize(("asked", "block"), [(1, 512), (512, 512), (513, 1024), (1_000_000, 1_000_448)])
    def test_a_request_is_rounded_up_to_512_bytes(self, asked: int, block: int) -> None:
        one = allocator()
        assert one.malloc(asked).size == block
        assert one.stats.requested.current == asked

    @pytest.mark.parametrize(
        ("asked", "segment", "kind"),
        [
            (1, 2 * MIB, "small"),
            (MIB, 2 * MIB, "small"),
            (MIB + 1, 20 * MIB, "large"),
            (10 * MIB - 512, 20 * MIB, "large"),
            (10 * MIB, 10 * MIB, "large"),
            (10 * MIB + 1, 12 * MIB, "large"),
            (100 * MIB + 1, 102 * MIB, "large"),
        ],
    )
    def test_the_segment_that_the_card_is_asked_for(self, asked: int, segment: int, kind: str) -> None:
        one = allocator()
        one.malloc(asked)
        assert [(s["total_size"], s["segment_type"]) for s in one.segments()] == [(segment, kind)]

    @pytest.mark.parametrize(
        ("asked", "block"),
        [(1200 * KIB, 1280 * KIB), (1024 * KIB, 1024 * KIB), (1793 * KIB, 2048 * KIB), (2048, 2048), (2049, 2560)],
    )
    def test_four_divisions_round_to_quarters_between_powers_of_two(self, asked: int, block: int) -> None:
        assert allocator("roundup_power2_divisions:4").malloc(asked).size == block

    def test_divisions_by_size_leave_the_rest_at_512_bytes(self) -> None:
        text = "roundup_power2_divisions:[2:1,4:2,>:1]"
        sizes = [allocator(text).malloc(mib * MIB + 1).size for mib in (2, 5, 9)]
        assert sizes == [2 * MIB + 512, 6 * MIB, 9 * MIB + 512]

    def test_no_bytes_are_no_block(self) -> None:
        one = allocator()
        nothing = one.malloc(0)
        one.free(nothing)
        one.free(nothing)
        assert (nothing.address, nothing.size, reserved(one)) == (0, 0, 0)


class TestSplitting:
    def test_a_small_segment_is_split_down_to_the_last_512_bytes(self) -> None:
        one = allocator()
        one.malloc(MIB)
        one.malloc(MIB - 512)
        one.malloc(512)
        assert block_sizes(one) == [[MIB, MIB - 512, 512]]

    def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left(self) -> None:
        one = allocator()
        one.free(one.malloc(12 * MIB))
        assert one.malloc(11 * MIB).size == 12 * MIB, "a rest of 1 MiB stays in the block"
        other = allocator()
        other.free(other.malloc(12 * MIB))
        assert other.malloc(11 * MIB - 512).size == 11 * MIB - 512
        assert block_sizes(other) == [[11 * MIB - 512, MIB + 512]]
        assert other.stats.inactive_split.current == MIB + 512

    def test_freed_neighbours_become_one_block_again(self) -> None:
        one = allocator()
        first, second, third = (one.malloc(4 * MIB) for _ in range(3))
        one.free(first)
        one.free(third)
        assert block_sizes(one) == [[4 * MIB, 4 * MIB, 12 * MIB]]
        assert one.stats.inactive_split.current == 16 * MIB
        one.free(second)
        assert block_sizes(one) == [[20 * MIB]]
        assert one.stats.inactive_split.current == 0

    def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest(self) -> None:
        one = allocator()
        blocks = [one.malloc(size * MIB) for size in (30, 14, 12, 12)]
        lowest = min(block.address for block in blocks[2:])
        for block in reversed(blocks):
            one.free(block)
        assert one.malloc(12 * MIB).address == lowest


class TestUnsplittableBlocks:
    def test_a_block_of_the_limit_is_not_given_to_a_smaller_request(self) -> None:
        one = allocator("max_split_size_mb:32")
        one.free(one.malloc(32 * MIB))
        one.malloc(30 * MIB)
        assert reserved(one) == 62 * MIB

    @pytest.mark.parametrize(("cached", "total"), [(58, 58), (60, 100)])
    def test_it_serves_another_such_request_if_less_than_20_mebibytes_larger(self, cached: int, total: int) -> None:
        one = allocator("max_split_size_mb:32")
        one.free(one.malloc(cached * MIB))
        one.malloc(40 * MIB)
        assert reserved(one) == total * MIB
        assert len(block_sizes(one)[0]) == 1, "it is not split"

    def test_near_the_limit_one_that_is_large_enough_is_given_back_and_others_stay(self) -> None:
        one = allocator("max_split_size_mb:20", capacity=100 * MIB)
        cached = [one.malloc(size * MIB) for size in (24, 70)]
        for block in cached:
            one.free(block)
        one.malloc(46 * MIB)
        assert (one.stats.num_alloc_retries, one.stats.num_device_free) == (0, 1)
        assert block_sizes(one) == [[24 * MIB], [46 * MIB]]


class TestNearTheLimit:
    def test_cached_segments_are_given_back_and_the_request_is_served(self) -> None:
        one = allocator(capacity=64 * MIB)
        one.free(one.malloc(40 * MIB))
        one.free(one.malloc(1))
        assert reserved(one) == 42 * MIB
        one.malloc(50 * MIB)
        assert (reserved(one), one.stats.reserved.peak) == (50 * MIB, 50 * MIB)
        assert (one.stats.num_alloc_retries, one.stats.num_ooms) == (1, 0)

    def test_a_segment_with_one_block_in_use_cannot_be_given_back(self) -> None:
        one = allocator(capacity=40 * MIB)
        one.malloc(2 * MIB)
        with pytest.raises(SimulatedOutOfMemory) as full:
            one.malloc(22 * MIB)
        assert vars(full.value) == {
            "requested": 22 * MIB,
            "allocated": 2 * MIB,
            "reserved": 20 * MIB,
            "free": 20 * MIB,
            "capacity": 40 * MIB,
        }
        assert (one.stats.num_alloc_retries, one.stats.num_ooms) == (1, 1)
        one.malloc(20 * MIB)
        assert reserved(one) == 40 * MIB

    def test_the_card_hands_out_whole_granules_of_2_mebibytes(self) -> None:
        one = allocator("large_segment_size_mb:11", capacity=23 * MIB)
        one.malloc(9 * MIB)
        assert reserved(one) == 11 * MIB
        with pytest.raises(SimulatedOutOfMemory) as full:
            one.malloc(3 * MIB)
        assert full.value.free == one.free_on_card == 11 * MIB, "12 of 23 are taken, and 11 more are asked for as 12"

    def test_an_allowed_share_caps_what_is_reserved(self) -> None:
        one = allocator(capacity=1 * GIB, memory_fraction=30 * MIB)
        one.malloc(20 * MIB)
        with pytest.raises(SimulatedOutOfMemory) as full:
            one.malloc(12 * MIB)
        assert full.value.free == 1004 * MIB

    def test_more_than_an_exabyte_is_refused_before_anything_is_counted(self) -> None:
        one = allocator()
        with pytest.raises(SimulatedOutOfMemory):
            one.malloc(2**60)
        assert (one.stats.num_ooms, one.stats.num_alloc_retries) == (0, 0)


class TestGarbageCollection:
    def test_the_oldest_cached_segments_go_once_the_threshold_is_passed(self) -> None:
        one = allocator("garbage_collection_threshold:0.5", capacity=GIB, memory_fraction=100 * MIB)
        old, new = one.malloc(20 * MIB), one.malloc(22 * MIB)
        one.free(old)
        one.malloc(21 * MIB)
        one.free(new)
        assert reserved(one) == 64 * MIB
        # 14 MiB over the threshold: the older of the two cached segments is given back, and is enough.
        one.malloc(30 * MIB)
        assert block_sizes(one) == [[22 * MIB], [22 * MIB], [30 * MIB]]
        assert one.stats.num_alloc_retries == 0

    def test_without_a_cap_nothing_is_collected(self) -> None:
        one = allocator("garbage_collection_threshold:0.5", capacity=100 * MIB)
        one.free(one.malloc(60 * MIB))
        one.malloc(80 * MIB)
        one.malloc(1)
        assert (reserved(one), one.stats.num_alloc_retries) == (82 * MIB, 1)


class TestExpandableSegments:
    def test_large_blocks_share_one_segment_that_grows_by_20_mebibytes(self) -> None:
        one = allocator("expandable_segments:True", capacity=GIB)
        one.malloc(15 * MIB)
        assert reserved(one) == 20 * MIB
        one.malloc(15 * MIB)
        assert reserved(one) == 40 * MIB
        assert block_sizes(one) == [[15 * MIB, 15 * MIB, 10 * MIB]]
        assert [(s["is_expandable"], s["segment_type"]) for s in one.segments()] == [(True, "large")]
        one.malloc(1)
        assert reserved(one) == 42 * MIB, "small blocks have pages of 2 MiB"

    def test_only_pages_that_are_free_from_end_to_end_are_given_back(self) -> None:
        one = allocator("expandable_segments:True", capacity=GIB)
        first, second, third = (one.malloc(30 * MIB) for _ in range(3))
        one.free(second)
        one.empty_cache()
        assert reserved(one) == 80 * MIB, "of 30..60 MiB only the page from 40 to 60 is whole"
        assert block_sizes(one) == [[30 * MIB, 10 * MIB], [30 * MIB, 10 * MIB]]
        assert one.malloc(30 * MIB).address == first.address + 30 * MIB, "the gap is filled first"
        assert reserved(one) == 100 * MIB
        assert third.address == first.address + 60 * MIB

    def test_pages_move_to_the_other_pool_when_the_card_is_full(self) -> None:
        one = allocator("expandable_segments:True", capacity=60 * MIB)
        one.free(one.malloc(60 * MIB))
        one.malloc(1)
        assert (reserved(one), one.stats.num_alloc_retries) == (2 * MIB, 1)

    def test_a_card_that_runs_out_between_two_gaps_leaves_the_first_one_mapped(self) -> None:
        heard: list[tuple[str, int, int]] = []
        one = CachingAllocator(
            100 * MIB,
            AllocatorSettings(expandable_segments=True),
            listener=lambda *entry: heard.append(entry),
        )
        first, middle, last = (one.malloc(size * MIB) for size in (30, 20, 30))
        start = first.address
        one.free(first)
        one.free(last)
        one.empty_cache()
        assert block_sizes(one) == [[10 * MIB, 20 * MIB, 10 * MIB]], "gaps before and behind"
        one.free(middle)
        for _ in range(40):  # 20 pages of the small pool
            one.malloc(MIB)
        heard.clear()
        with pytest.raises(SimulatedOutOfMemory):
            one.malloc(70 * MIB)
        assert heard == [
            ("segment_map", start, 20 * MIB),
            ("segment_unmap", start, 60 * MIB),
            ("oom", 60 * MIB, 70 * MIB),
        ]
        assert one.stats.reserved.peak == 100 * MIB

    def test_every_byte_left_over_becomes_a_block(self) -> None:
        one = allocator("expandable_segments:True", capacity=GIB)
        assert one.malloc(20 * MIB - 512).size == 20 * MIB - 512
        assert block_sizes(one) == [[20 * MIB - 512, 512]]


class TestAccounts:
    def test_the_history_tells_every_step(self) -> None:
        heard: list[tuple[str, int, int]] = []
        one = CachingAllocator(32 * MIB, listener=lambda *entry: heard.append(entry))
        block = one.malloc(12 * MIB)
        one.free(block)
        one.empty_cache()
        with pytest.raises(SimulatedOutOfMemory):
            one.malloc(40 * MIB)
        at = block.address
        assert heard == [
            ("segment_alloc", at, 12 * MIB),
            ("alloc", at, 12 * MIB),
            ("free_requested", at, 12 * MIB),
            ("free_completed", at, 12 * MIB),
            ("segment_free", at, 12 * MIB),
            ("oom", 32 * MIB, 40 * MIB),
        ]

    def test_peaks_start_again_from_what_there_is(self) -> None:
        one = allocator()
        keep, drop = one.malloc(12 * MIB), one.malloc(14 * MIB)
        one.free(drop)
        one.stats.reset_peaks()
        assert (one.stats.allocated.peak, one.stats.reserved.peak) == (keep.size, 26 * MIB)

    def test_a_block_is_freed_once(self) -> None:
        one = allocator()
        block = one.malloc(1)
        one.free(block)
        with pytest.raises(InvalidInputError, match="freed before"):
            one.free(block)
        with pytest.raises(InvalidInputError, match="not handed out by this allocator"):
            one.free(allocator().malloc(1))
