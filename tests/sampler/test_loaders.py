"""TokenBatchSampler in a real DataLoader, with workers, and under the Accumulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.errors import InvalidInputError
from batchwright.report.display import render_plain
from batchwright.sampler.token_batch_sampler import TokenBatchSampler
from tests.sampler.sentences import LENGTHS, Sentences, Tagger, loader_of, samples_of

if TYPE_CHECKING:
    from pathlib import Path

# Two cores are fewer than the four workers that a test has on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def sampler_of(**options: Any) -> TokenBatchSampler:
    return TokenBatchSampler(LENGTHS, 120, **{"rank": 0, "world_size": 1, **options})


@pytest.mark.parametrize("workers", [0, 4])
def test_a_real_loader_yields_every_sample_once_within_the_budget(workers: int) -> None:
    sampler = sampler_of()
    batches = list(loader_of(sampler, workers))
    assert sorted(i for batch in batches for i in samples_of(batch)) == list(range(len(LENGTHS)))
    assert max(batch["ids"].numel() for batch in batches) <= 120


@pytest.mark.parametrize("workers", [0, 4])
def test_a_tracked_loop_resumes_where_it_stood_whatever_workers_drew_ahead(workers: int) -> None:
    whole = [samples_of(batch) for batch in loader_of(sampler_of())]
    first = sampler_of()
    begun, state = [], {}
    for number, batch in enumerate(first.track(loader_of(first, workers))):
        begun.append(samples_of(batch))
        if number == 4:
            state = first.state_dict()
            break
    second = sampler_of()
    second.load_state_dict(state)
    assert begun + [samples_of(batch) for batch in loader_of(second, workers)] == whole


def test_workers_and_nobody_who_counts_are_refused() -> None:
    sampler = sampler_of()
    iterator = iter(loader_of(sampler, 2))
    next(iterator)
    with pytest.raises(InvalidInputError, match="workers draw batches ahead"):
        sampler.state_dict()
    del iterator


def test_without_workers_somebody_has_to_count_too() -> None:
    sampler = sampler_of()
    iterator = iter(loader_of(sampler))
    next(iterator)
    with pytest.raises(InvalidInputError, match="nobody counts"):
        sampler.state_dict()
    tracked = iter(sampler.track(loader_of(sampler)))
    for _ in range(3):
        next(tracked)
    assert sampler.state_dict()["segments"] == [[1, 3]]


def test_epochs_follow_each_other_without_set_epoch() -> None:
    sampler = sampler_of()
    loader = loader_of(sampler, 2)
    epochs = [[samples_of(batch) for batch in sampler.track(loader)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(i for batch in epoch for i in batch) == list(range(len(LENGTHS)))
    plain = loader_of(sampler_of(), 2)
    assert [[samples_of(batch) for batch in plain] for _ in range(2)] == epochs


def count_tokens(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] >= 0).sum())


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_hold_about_as_many_tokens_and_resume_with_the_accumulator(workers: int) -> None:
    def run(stop: int | None, state: Any = None) -> tuple[list[float], Any]:
        sampler, model = sampler_of(max_tokens_per_step=500), Tagger()
        accumulator = bw.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), sampler.windows)
        if state is not None:
            sampler.load_state_dict(state[0])
            accumulator.load_state_dict(state[1])
        units = []
        for batch in accumulator.micro_batches(loader_of(sampler, workers), weight=count_tokens):
            step = accumulator.backward(model(**batch)["loss"])
            if step is not None:
                units.append(step.units)
            if len(units) == stop:
                break
        # The window at hand is counted when the loop asks for the next batch; here it has broken off.
        return units, (sampler.state_dict(), accumulator.state_dict())

    whole, _ = run(None)
    assert max(whole) <= 500
    assert min(whole) > 300
    assert sum(whole) == LENGTHS.sum()
    assert len(whole) == len(list(sampler_of(max_tokens_per_step=500).windows))
    begun, state = run(3)
    rest, _ = run(None, state)
    assert begun + rest == whole


def test_windows_are_those_of_the_epoch_that_comes() -> None:
    sampler, model = sampler_of(max_tokens_per_step=500), Tagger()
    accumulator = bw.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), sampler.windows)
    for _ in range(4):
        units = []
        for batch in accumulator.micro_batches(loader_of(sampler), weight=count_tokens):
            step = accumulator.backward(model(**batch)["loss"])
            units += [] if step is None else [step.units]
        assert max(units) <= 500
        assert sum(units) == LENGTHS.sum()


def test_the_accumulator_goes_on_with_another_number_of_ranks() -> None:
    def part_of(ranks: int, stop: int | None, states: Any) -> tuple[list[int], Any]:
        seen, told = [], None
        for rank in range(ranks):
            sampler, model = sampler_of(rank=rank, world_size=ranks), Tagger()
            accumulator = bw.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), 2)
            if states is not None:
                sampler.load_state_dict(states[0])
                accumulator.load_state_dict(states[1])
            for batch in accumulator.micro_batches(loader_of(sampler)):
                seen += samples_of(batch)
                step = accumulator.backward(model(**batch)["loss"])
                if step is not None and step.number == stop:
                    break
            told = (sampler.state_dict(), accumulator.state_dict())
        return seen, told

    begun, states = part_of(4, 2, None)
    rest, _ = part_of(3, None, states)
    assert sorted(begun + rest) == list(range(len(LENGTHS)))


def test_the_figures_of_an_epoch_before_it_starts() -> None:
    stats = TokenBatchSampler(LENGTHS, 120, rank=0, world_size=2).stats()
    assert stats.samples == 200
    assert 0 < stats.waste < 0.2
    assert 0 < stats.fill <= 1
    assert stats.largest_cost <= 120
    assert "padding" in render_plain(stats)
    assert "<table>" in stats._repr_html_()


def test_lengths_come_in_every_form() -> None:
    as_list = list(sampler_of())
    forms: list[Any] = [LENGTHS.tolist(), torch.tensor(LENGTHS), tuple(LENGTHS), LENGTHS.astype(float)]
    for form in forms:
        assert list(TokenBatchSampler(form, 120, rank=0, world_size=1)) == as_list
    measured = TokenBatchSampler(lambda sample: len(sample["ids"]), 120, dataset=Sentences(), rank=0, world_size=1)
    assert list(measured) == as_list


def test_long_measuring_is_spoken_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("batchwright.sampler.cost._SECONDS_BETWEEN", 0.0)
    said: list[str] = []
    for progress in (said.append, None):
        TokenBatchSampler(len, 120, dataset=["a", "bc", "d"], rank=0, world_size=1, progress=progress)
    assert said[-1] == "measuring lengths: 2 of 3 samples"
    assert capsys.readouterr().err.splitlines() == said


def test_lengths_that_were_measured_are_remembered(tmp_path: Path) -> None:
    calls: list[int] = []

    def length_of(sample: Any) -> int:
        calls.append(1)
        return len(sample["ids"])

    file = tmp_path / "lengths.npy"
    options: dict[str, Any] = {"dataset": Sentences(), "remember": file, "rank": 0, "world_size": 1}
    assert list(TokenBatchSampler(length_of, 120, **options)) == list(TokenBatchSampler(length_of, 120, **options))
    assert len(calls) == len(LENGTHS)
    np.save(file, np.ones(3, int))
    with pytest.raises(InvalidInputError, match="remembers the lengths of 3 samples, the dataset has 200"):
        TokenBatchSampler(length_of, 120, **options)


@pytest.mark.parametrize(
    ("lengths", "options", "told"),
    [
        ([3, -1], {}, "the length of sample 1 must be a whole number from 1 to .*; received -1"),
        ([3, 0, 0], {}, r"sample 1 .* received 0 \(1 more"),
        ([3, float("nan")], {}, "sample 1 .* received nan"),
        ([3, None], {}, "sample 1 .* received None"),
        ([3, 2.5], {}, "sample 1 .* received 2.5"),
        ([[1, 2, 3]], {}, "one number per sample, or two"),
        ([[1], [1, 2]], {}, "rows of different sizes"),
        (["long"], {}, "sample 0|whole numbers"),
        ([200, 300, 5], {}, "2 samples of 3 cost more than the budget of 120 alone"),
        ([3], {"max_tokens": 0}, "must be a number above 0"),
        ([3], {"seed": -1}, "seed must be a whole number"),
        ([3], {"rank": 2, "world_size": 2}, "counted from 0"),
        ([3], {"rank": None, "world_size": 2}, "go together"),
        ([3], {"oversize": "ignore"}, "oversize is error, drop, single"),
        ([3], {"waste": 2}, "waste is a share"),
        ([3], {"multiple_of": 8, "max_samples": 4}, "no batch is both"),
        ([3], {"max_tokens_per_step": 50}, "at least one batch on each rank"),
        (len, {}, "no dataset= was handed in"),
        ([3], {"dataset": [1, 2]}, "1 length for a dataset of 2 samples"),
    ],
)
def test_wrong_input_says_which_and_where(lengths: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        TokenBatchSampler(lengths, **{"max_tokens": 120, "rank": 0, "world_size": 1, **options})


def test_a_state_of_other_samples_or_another_seed_is_refused() -> None:
    state = sampler_of().state_dict()
    with pytest.raises(InvalidInputError, match="other samples or another budget"):
        TokenBatchSampler(LENGTHS[:-1], 120, rank=0, world_size=1).load_state_dict(state)
    with pytest.raises(InvalidInputError, match="other samples or another budget"):
        TokenBatchSampler(LENGTHS, 121, rank=0, world_size=1).load_state_dict(state)
    with pytest.raises(InvalidInputError, match="seed 0"):
        sampler_of(seed=1).load_state_dict(state)
