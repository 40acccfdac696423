"""Probes see the longest batches of a program's loaders, or a note says that they do not."""

from __future__ import annotations

import random
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from batchwright.scripts.estimate_script import estimate_script
from batchwright.scripts.longest_batches import LongestBatches
from batchwright.scripts.script import Script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class Samples(Dataset[torch.Tensor]):
    """Samples of the given lengths, each of its own number, which may be read only once."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.read = lengths, set[int]()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index not in self.read, "a sample that was read is gone"
        self.read.add(index)
        return torch.full((self.lengths[index],), index)


class Unreadable(Samples):
    """Its samples must not be read at all."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("read though it is known")


class Stream(IterableDataset[int]):
    """A stream has no order to change."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def as_lists(samples: list[Any]) -> list[list[int]]:
    return [sample.tolist() for sample in samples]


def lengths_of(loader: Any) -> list[list[int]]:
    return [[len(sample) for sample in batch] for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_longest_come_first_and_every_sample_once(tmp_path: Path, num_workers: int) -> None:
    notes: dict[str, None] = {}
    loader = DataLoader(Samples(LENGTHS), 2, shuffle=True, collate_fn=as_lists, num_workers=num_workers)
    LongestBatches(tmp_path / "lengths.json", notes).lead(loader)
    batches = lengths_of(loader)
    assert batches[:3] == [[9, 8], [6, 5], [5, 5]]
    assert sorted(length for batch in batches for length in batch) == sorted(LENGTHS)
    assert list(notes) == ["the longest of 12 samples were probed first"]


def test_what_one_probe_read_the_next_one_knows(tmp_path: Path) -> None:
    LongestBatches(tmp_path / "lengths.json", {}).lead(DataLoader(Samples(LENGTHS), 2, collate_fn=as_lists))
    again = Samples(LENGTHS)
    loader = DataLoader(again, 4, collate_fn=as_lists)
    notes: dict[str, None] = {}
    again.__class__ = type("Samples", (Unreadable,), {})
    LongestBatches(tmp_path / "lengths.json", notes).lead(loader)
    assert list(notes) == ["the longest of 12 samples were probed first"]
    again.__class__ = Samples
    assert lengths_of(loader)[0] == [9, 8, 6, 5]


def test_equal_samples_keep_their_order_and_the_random_numbers_are_the_programs(tmp_path: Path) -> None:
    notes: dict[str, None] = {}
    order = []
    for is_led in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        loader = DataLoader(Samples([5] * 12), 2, shuffle=True, collate_fn=as_lists)
        if is_led:
            LongestBatches(tmp_path / "lengths.json", notes).lead(loader)
        order.append([sample[0] for batch in loader for sample in batch] + [random.randrange(100)])
    assert order[0] == order[1]
    assert notes == {}


def test_what_cannot_be_reordered_is_noted(tmp_path: Path) -> None:
    notes: dict[str, None] = {}
    longest = LongestBatches(tmp_path / "lengths.json", notes)
    longest.lead(DataLoader(Stream(), 2))

    class ByBucket(BatchSampler):
        """Groups samples by a rule of its own."""

    samples = Samples(LENGTHS)
    longest.lead(DataLoader(samples, batch_sampler=ByBucket(SequentialSampler(samples), 2, False), collate_fn=as_lists))
    assert list(notes) == [
        "a stream of samples cannot be reordered: its first batches were probed",
        "samples differ in length, and ByBucket groups them: its first batches were probed",
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_large_batch_of_samples_that_are_alike_is_filled_up_with_copies_on_a_card(
    tmp_path: Path, num_workers: int
) -> None:
    program = """
        import sys, torch
        from torch.utils.data import DataLoader
        class Rows(torch.utils.data.Dataset):
            def __len__(self): return 1500
            def __getitem__(self, index):
                return {"x": torch.ones(8), "label": index}
        def collate(rows):
            labels = torch.tensor([row.pop("label") for row in rows])
            return torch.stack([row["x"] for row in rows]), labels
        model = torch.nn.Linear(8, 8).to(sys.argv[1]); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, labels in DataLoader(Rows(), 700, collate_fn=collate, num_workers=WORKERS):
            assert len(labels) == len(x)
            model(x.to(sys.argv[1])).sum().backward(); optimizer.step()
    """
    (tmp_path / "rows.py").write_text(dedent(program).replace("WORKERS", str(num_workers)))
    notes = "of each batch 128 samples were read: the others are as long, and were copied"
    on_card = estimate_script(Script(["rows.py", "cuda"], cwd=tmp_path), on="t4-16gb").run
    assert on_card.input_shapes == ((700, 8), (700, 8))
    assert on_card.notes == (notes,)
    on_host = estimate_script(Script(["rows.py", "cpu"], cwd=tmp_path), on="cpu").run
    assert on_host.input_shapes == ((700, 8), (700, 8))
    assert on_host.notes == ()
