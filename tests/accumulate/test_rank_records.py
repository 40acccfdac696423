"""What crosses ranks in a window: a record that is packed reads back the same, and packed rows can be added."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.accumulate.micro_batches import REDUCTIONS, Totals
from batchwright.accumulate.parallelism import WindowReport
from batchwright.noise.capture.watched_windows import RankSums

NAMES = ("masked", "next")
# Whole numbers, so that sums are exact in any order.
NUMBERS = st.integers(-(2**40), 2**40).map(float)
FLAGS = st.sampled_from([0.0, 1.0])


def totals(names: tuple[str, ...]) -> st.SearchStrategy[Totals]:
    named = st.fixed_dictionaries(dict.fromkeys(names, NUMBERS))
    return st.builds(Totals, NUMBERS, NUMBERS, NUMBERS, named)


def reports(names: tuple[str, ...]) -> st.SearchStrategy[WindowReport]:
    return st.builds(
        WindowReport,
        used=totals(names),
        ahead=totals(names),
        losses=st.dictionaries(st.sampled_from((*REDUCTIONS, *names)), NUMBERS),
        square=NUMBERS,
        num_ahead=NUMBERS,
        num_failed=FLAGS,
        num_ready=FLAGS,
        watched=st.tuples(NUMBERS, NUMBERS),
    )


def rank_sums(num_groups: int) -> st.SearchStrategy[RankSums]:
    by_group = st.tuples(*[NUMBERS] * num_groups)
    return st.builds(RankSums, by_group, by_group, *[NUMBERS] * 8)


NAMED_REPORTS = st.sampled_from([(), NAMES[:1], NAMES])


@given(NAMED_REPORTS.flatmap(lambda names: st.tuples(st.just(names), reports(names))))
def test_a_report_reads_back_the_same(case: tuple[tuple[str, ...], WindowReport]) -> None:
    names, report = case
    assert WindowReport.unpack(report.pack(names), names) == report


@given(st.lists(reports(NAMES), min_size=1, max_size=4))
def test_the_sum_of_packed_reports_is_the_report_of_all(of_ranks: list[WindowReport]) -> None:
    rows = [report.pack(NAMES) for report in of_ranks]
    total = WindowReport.unpack([sum(column) for column in zip(*rows, strict=True)], NAMES)
    kinds = {kind for report in of_ranks for kind in report.losses}
    assert total == WindowReport(
        used=sum((report.used for report in of_ranks), Totals()),
        ahead=sum((report.ahead for report in of_ranks), Totals()),
        losses={kind: sum(report.losses.get(kind, 0.0) for report in of_ranks) for kind in kinds},
        square=sum(report.square for report in of_ranks),
        num_ahead=sum(report.num_ahead for report in of_ranks),
        num_failed=sum(report.num_failed for report in of_ranks),
        num_ready=sum(report.num_ready for report in of_ranks),
        watched=tuple(sum(column) for column in zip(*(report.watched for report in of_ranks), strict=True)),
    )


def test_a_loss_of_zero_is_told_from_no_loss() -> None:
    report = WindowReport(Totals(), Totals(), {"units": 0.0}, 0.0, 0.0, 0.0, 0.0)
    assert WindowReport.unpack(report.pack(()), ()).losses == {"units": 0.0}
    assert WindowReport.unpack(replace(report, losses={}).pack(()), ()).losses == {}


@given(st.integers(1, 5).flatmap(rank_sums))
def test_the_sums_of_a_rank_read_back_the_same(sums: RankSums) -> None:
    assert RankSums.unpack(sums.pack()) == sums


@given(st.integers(1, 3).flatmap(lambda number: st.lists(rank_sums(number), min_size=1, max_size=4)))
def test_adding_packed_sums_adds_every_field(of_ranks: list[RankSums]) -> None:
    rows = [sums.pack() for sums in of_ranks]
    total = RankSums.unpack([sum(column) for column in zip(*rows, strict=True)])
    for name, value in vars(total).items():
        values = [getattr(sums, name) for sums in of_ranks]
        by_group = isinstance(value, tuple)
        expected = tuple(map(sum, zip(*values, strict=True))) if by_group else sum(values)
        assert value == expected, name


def test_sums_that_lie_on_a_device_are_read_with_the_others() -> None:
    sums = RankSums((torch.tensor(2.0),), (torch.tensor(3.0, dtype=torch.float64),), units=4.0, probe=torch.tensor(5.0))
    assert RankSums.unpack(sums.pack()) == RankSums((2.0,), (3.0,), units=4.0, probe=5.0)
