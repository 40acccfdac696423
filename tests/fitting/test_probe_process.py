"""What crosses processes and ranks comes back as it was sent."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchwright import errors
from batchwright.device.outcome import Outcome
from batchwright.fitting.fit_result import Fit, MemoryLine, NextSize, Restored
from batchwright.fitting.probe_process import Instruction, Job, ProbeReport, Rendezvous
from batchwright.units import PeakBytes

names = st.text(max_size=8)
sizes = st.integers(1, 2**50)
maybe_bytes = st.none() | st.integers(0, 2**50)
seconds = st.floats(0, 1e6)
shapes = st.dictionaries(names, st.integers(0, 10**6), max_size=2)
notes = st.lists(names, max_size=2).map(tuple)
outcomes = st.builds(
    Outcome,
    micro_batch=sizes,
    shape=shapes,
    verdict=st.sampled_from(["fits", "out_of_memory", "failed"]),
    peak_bytes=st.none() | st.builds(PeakBytes, maybe_bytes, maybe_bytes, maybe_bytes),
    seconds=seconds,
    step_seconds=st.none() | seconds,
    accumulation=st.integers(1, 99),
    rule=st.none() | names,
    doubt=names,
    is_too_small=st.booleans(),
    num_compilations=st.integers(0, 9),
    error=st.none() | names,
    traceback=st.none() | names,
    exception=st.none(),
)
jobs = st.builds(
    Job,
    sizes,
    target=st.none() | names,
    pickled=st.none() | names,
    on=names,
    limit_bytes=maybe_bytes,
    shape=shapes,
    accumulation=st.integers(1, 99),
    clip_norm=st.none() | seconds,
    only_evaluate=st.booleans(),
    order=st.none() | st.lists(sizes, max_size=3).map(tuple),
    rendezvous=st.none() | st.builds(Rendezvous, names, sizes, names, sizes, sizes, sizes),
)
fits = st.builds(
    Fit,
    name=names,
    on=names,
    micro_batch=st.none() | sizes,
    limit=sizes,
    limit_bytes=maybe_bytes,
    trials=st.lists(outcomes, max_size=2).map(tuple),
    next_size=st.none() | st.builds(NextSize, sizes, st.none() | names, names),
    reason=names,
    shape=shapes,
    shapes=st.just(()),
    evaluation=st.none(),
    line=st.none() | st.builds(MemoryLine, sizes, sizes, names),
    restored=st.builds(Restored, notes, notes),
    ranks=st.integers(1, 9),
    where=names,
    plan=st.none(),
    notes=notes,
    source=names,
)
raised = st.builds(
    lambda kind, problem, details, remedy: kind(problem, details=details, remedy=remedy),
    st.sampled_from([errors.NothingFitsError, errors.StepFailedError, errors.RankFailedError]),
    names,
    st.lists(names, max_size=2),
    names,
)


def send(record: Any) -> Any:
    return type(record).from_dict(json.loads(json.dumps(record.to_dict())))


def described(error: errors.BatchwrightError | None) -> dict[str, Any] | None:
    return None if error is None else {**error.to_dict(), "text": str(error)}


@given(jobs)
def test_a_job_comes_back(job: Job) -> None:
    assert send(job) == job


@given(outcomes)
def test_an_outcome_comes_back(outcome: Outcome) -> None:
    assert send(ProbeReport(outcome)) == ProbeReport(outcome)
    assert send(ProbeReport(outcome)).unwrap() == outcome


@given(fits)
def test_an_answer_comes_back(fit: Fit) -> None:
    assert send(Instruction(answer=fit)) == Instruction(answer=fit)


@given(jobs)
def test_an_instruction_to_run_comes_back(job: Job) -> None:
    assert send(Instruction(job=job)) == Instruction(job=job)


@given(raised)
def test_an_error_comes_back_as_one_of_its_kind(error: errors.BatchwrightError) -> None:
    for record in (ProbeReport(error=error), Instruction(error=error)):
        assert described(send(record).error) == described(error)


def test_an_interrupt_is_raised_where_the_report_is_read() -> None:
    report = send(ProbeReport(is_interrupted=True))
    try:
        report.unwrap()
    except KeyboardInterrupt:
        return
    raise AssertionError("the interrupt was lost")
