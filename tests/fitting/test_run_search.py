from __future__ import annotations

import pytest

from batchwright.device.outcome import Outcome
from batchwright.errors import StepFailedError
from batchwright.fitting.run_search import Cap, Cause, run_series
from batchwright.planning.search import by_doubling, by_powers_of_two


def outcome(size: int, verdict: str, **fields: object) -> Outcome:
    return Outcome(size, {}, verdict, None, seconds=0.1, **fields)  # type: ignore[arg-type]


def up_to(largest: int, *, least: int = 1) -> object:
    def probe(size: int) -> Outcome:
        if size < least:
            return outcome(size, "failed", is_too_small=True, error="ValueError: Expected more than 1 value")
        return outcome(size, "fits" if size <= largest else "out_of_memory")

    return probe


def series(largest: int, cap: int = 100, *, max_trials: int = 40, least: int = 1):  # type: ignore[no-untyped-def]
    lines: list[str] = []
    options = {"cap": Cap(cap, Cause.LIMIT), "max_trials": max_trials, "say": lines.append}
    return run_series(by_doubling(cap), up_to(largest, least=least), **options)  # type: ignore[arg-type]


def test_the_answer_ran_and_the_next_size_did_not_fit() -> None:
    result = series(37)
    assert result.micro_batch == 37
    assert (result.next_size.micro_batch, result.next_size.outcome) == (38, "out_of_memory")


def test_the_limit_is_the_reason_where_it_is() -> None:
    result = series(1000)
    assert result.micro_batch == 100
    assert result.next_size.outcome is None
    assert result.reason == "the limit is 100"


def test_used_up_trials_are_the_reason_where_they_are() -> None:
    result = series(1000, 4096, max_trials=3)
    assert (result.micro_batch, len(result.trials)) == (4, 3)
    assert "3 trials were used up" in result.reason
    result = series(37, max_trials=8)
    assert (result.micro_batch, result.next_size.outcome) == (32, None)


def test_nothing_fits() -> None:
    assert series(0).micro_batch is None


def test_a_size_too_small_for_the_step_is_passed_over() -> None:
    assert series(37, least=2).micro_batch == 37
    assert series(1, least=2).micro_batch is None


def test_powers_of_two_say_why_the_next_size_was_not_tried() -> None:
    options = {"cap": Cap(100, Cause.LIMIT), "max_trials": 40, "say": lambda _: None, "is_stepwise": True}
    result = run_series(by_powers_of_two(100), up_to(37), **options)  # type: ignore[arg-type]
    assert result.micro_batch == 32
    assert "only powers of two" in result.next_size.why


def test_powers_of_two_that_all_fit_are_ended_by_the_limit() -> None:
    options = {"cap": Cap(100, Cause.LIMIT), "max_trials": 40, "say": lambda _: None, "is_stepwise": True}
    result = run_series(by_powers_of_two(100), up_to(1000), **options)  # type: ignore[arg-type]
    assert (result.micro_batch, result.reason) == (64, "the limit is 100")
    assert (result.next_size.micro_batch, result.next_size.why) == (128, "not tried: the limit is 100")


def test_a_bug_surfaces_at_once_with_its_own_exception() -> None:
    def probe(size: int) -> Outcome:
        return outcome(size, "failed", exception=KeyError("mine"), traceback="...")

    with pytest.raises(KeyError, match="mine"):
        run_series(by_doubling(8), probe, cap=Cap(8, Cause.LIMIT), max_trials=5, say=lambda _: None)

    def elsewhere(size: int) -> Outcome:
        return outcome(size, "failed", traceback="Traceback ...\nKeyError: 'mine'")

    with pytest.raises(StepFailedError, match="KeyError"):
        run_series(by_doubling(8), elsewhere, cap=Cap(8, Cause.LIMIT), max_trials=5, say=lambda _: None)
