"""The settings of the allocator: read from text as PyTorch's own parser reads them, and refused as there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInputError
from batchwright.simulated.allocator.settings import AllocatorSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024 * 1024


class TestText:
    def test_every_option_that_matters(self) -> None:
        text = (
            "expandable_segments:True, max_split_size_mb:128, max_non_split_rounding_mb:64, large_segment_size_mb:24,"
            "garbage_collection_threshold:0.8, roundup_power2_divisions:8, per_process_memory_fraction:0.5,"
            "throw_on_cudamalloc_oom:True, backend:native"
        )
        assert AllocatorSettings.parse(text) == AllocatorSettings(
            expandable_segments=True,
            max_split_size=128 * MIB,
            max_non_split_rounding_size=64 * MIB,
            large_segment_size=24 * MIB,
            garbage_collection_threshold=0.8,
            roundup_power2_divisions=8,
            per_process_memory_fraction=0.5,
            throw_on_cudamalloc_oom=True,
        )

    @pytest.mark.parametrize("text", ["", "  ", "backend:native", "expandable_segments:False,"])
    def test_nothing_asked_for_is_the_default(self, text: str) -> None:
        assert AllocatorSettings.parse(text) == AllocatorSettings()

    def test_a_table_of_divisions(self) -> None:
        parsed = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
        assert parsed.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
        sizes = [1000, *(mib * MIB for mib in (1, 511, 512, 1024, 4096, 10**6))]
        assert [parsed.divisions_of(size) for size in sizes] == [1, 1, 1, 2, 4, 8, 8]

    def test_what_changes_nothing_on_the_card_is_named(self) -> None:
        parsed = AllocatorSettings.parse("pinned_num_register_threads:8,release_lock_on_cudamalloc:True")
        assert parsed.ignored == ("pinned_num_register_threads:8", "release_lock_on_cudamalloc:True")

    @pytest.mark.parametrize(
        ("text", "given", "allowed"),
        [
            ("max_split_size_mb:19", "19 MiB", "20 MiB"),
            ("large_segment_size_mb:40,max_split_size_mb:30", "30 MiB", "40 MiB"),
            ("max_non_split_rounding_mb:10", "10 MiB", "20 MiB"),
            ("large_segment_size_mb:10", "10 MiB", "more than 10 MiB"),
            ("expandable_segments:True,large_segment_size_mb:21", "21 MiB", "multiple of 2 MiB"),
            ("garbage_collection_threshold:1.0", "1.0", "between 0 and 1"),
            ("garbage_collection_threshold:0", "is 0", "between 0 and 1"),
            ("garbage_collection_threshold:much", "'much'", "a share"),
            ("per_process_memory_fraction:1.5", "1.5", "from 0 to 1"),
            ("roundup_power2_divisions:3", "3 steps", "powers of two"),
            ("roundup_power2_divisions:0", "is 0", "only in a list"),
            ("roundup_power2_divisions:[3:4]", "size 3", "powers of two"),
            ("roundup_power2_divisions:[4:5]", "5 steps", "powers of two"),
            ("roundup_power2_divisions:[4:2", "[4:2", "bracket"),
            ("roundup_power2_divisions:[4]", "'4'", "size:steps"),
            ("expandable_segments:true", "'true'", "True and False"),
            ("max_split_size_mb:-5", "'-5'", "whole number"),
            ("max_split_size_mb", "'max_split_size_mb'", "option:value"),
            ("expandable_segments:True,,", "''", "option:value"),
            ("backend:cudaMallocAsync", "cudaMallocAsync", "PyTorch's own"),
            ("backend:mine", "'mine'", "native"),
            ("expandable_segment:True", "'expandable_segment'", "try: expandable_segments"),
            ("pinned_use_background_threads:1", "'1'", "True and False"),
        ],
    )
    def test_a_refusal_says_what_was_given_and_what_is_allowed(self, text: str, given: str, allowed: str) -> None:
        with pytest.raises(InvalidInputError) as refusal:
            AllocatorSettings.parse(text)
        assert given in str(refusal.value)
        assert allowed in str(refusal.value)

    def test_a_table_of_the_wrong_length_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="3 entries"):
            AllocatorSettings(roundup_power2_divisions=(1, 2, 4))


def test_a_share_of_the_card_in_bytes() -> None:
    assert AllocatorSettings().allowed_bytes(80 << 30) is None
    assert AllocatorSettings(per_process_memory_fraction=0.25).allowed_bytes(80 << 30) == 20 << 30


class PyTorchsOwn:
    """PyTorch's parser, and the numbers it keeps, by the layout in c10/core/AllocatorConfig.h."""

    MANGLED = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig"

    def __init__(self) -> None:
        import torch

        library: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        self.set = torch._C._accelerator_setAllocatorSettings
        self.divisions = library[f"{self.MANGLED}24roundup_power2_divisionsEm"]
        self.divisions.argtypes, self.divisions.restype = [ctypes.c_size_t], ctypes.c_size_t
        instance = library[f"{self.MANGLED}8instanceEv"]
        instance.restype = ctypes.c_void_p
        self.address: int = instance()

    def numbers(self) -> tuple[int, int, int, float, bool]:
        """Return large segment, largest split, largest slack, threshold and whether segments expand."""
        sizes = (ctypes.c_size_t * 3).from_address(self.address)
        threshold = ctypes.c_double.from_address(self.address + 48).value
        return sizes[0], sizes[1], sizes[2], threshold, ctypes.c_bool.from_address(self.address + 56).value


@pytest.fixture(scope="module")
def own() -> Iterator[PyTorchsOwn]:
    import torch

    if torch.__version__.split("+")[0] != "2.13.0":
        pytest.skip("the layout of the numbers is that of PyTorch 2.13.0")
    try:
        parser = PyTorchsOwn()
    except (OSError, AttributeError) as error:
        pytest.skip(f"the parser cannot be called here: {error}")
    yield parser
    parser.set("large_segment_size_mb:20,expandable_segments:False")


COUNTS = st.sampled_from([0, 1, 2, 3, 4, 8, 10, 11, 12, 16, 19, 20, 21, 24, 32, 64, 128, 1024, 65536])
ENTRIES = st.tuples(st.one_of(COUNTS.map(str), st.just(">")), COUNTS).map(lambda pair: f"{pair[0]}:{pair[1]}")
OPTIONS = st.one_of(
    st.builds("max_split_size_mb:{}".format, COUNTS),
    st.builds("max_non_split_rounding_mb:{}".format, COUNTS),
    st.builds("roundup_power2_divisions:{}".format, COUNTS),
    st.builds("garbage_collection_threshold:{}".format, st.sampled_from(["0", "0.0", "0.3", "0.99", "1", "1.5", "x"])),
    st.builds("expandable_segments:{}".format, st.sampled_from(["True", "False", "true", "1"])),
    st.lists(ENTRIES, min_size=1, max_size=4).map(lambda entries: f"roundup_power2_divisions:[{', '.join(entries)}]"),
)


@settings(max_examples=300)
@given(st.lists(OPTIONS, max_size=4, unique_by=lambda option: option.split(":")[0]), COUNTS)
def test_text_is_understood_and_refused_as_by_pytorchs_own_parser(
    own: PyTorchsOwn, options: list[str], segment: int
) -> None:
    # Both options are kept from one text to the next there, so each text names them.
    named = [] if any(option.startswith("expandable") for option in options) else ["expandable_segments:False"]
    text = ",".join([f"large_segment_size_mb:{segment}", *named, *options])
    try:
        own.set(text)
    except ValueError:
        with pytest.raises(InvalidInputError):
            AllocatorSettings.parse(text)
        own.set("large_segment_size_mb:20")
        return
    if "expandable_segments:True" in text and segment % 2:
        # There the driver refuses it, at the first page.
        return
    mine = AllocatorSettings.parse(text)
    unlimited = 2**64 - 1
    assert own.numbers() == (
        mine.large_segment_size,
        unlimited if mine.max_split_size is None else mine.max_split_size,
        mine.largest_slack,
        mine.garbage_collection_threshold,
        mine.expandable_segments,
    )
    sizes = [1, MIB - 1, *(MIB << power for power in range(18)), (5 << 20) + 1]
    assert [own.divisions(size) for size in sizes] == [mine.divisions_of(size) for size in sizes]
