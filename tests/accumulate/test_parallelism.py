"""Two gloo ranks under one torchrun: the gradient is that of the big batch of both, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import told_by_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")
KINDS = ("ddp", "fsdp")
NO_UNITS = "the window holds no units: every weight is 0"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run every case once and return what the ranks told, which must be the same."""
    first, second = told_by_ranks(WORKER, tmp_path_factory)
    assert first == second
    return first


@pytest.mark.parametrize("kind", [*KINDS, "fsdp root only"])
def test_ragged_windows_on_uneven_ranks_equal_the_big_batch(told: Any, kind: str) -> None:
    for run in told[f"ragged, {kind}"]:
        assert run["error"] <= 1e-12
        assert run["steps"] == run["expected"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_spread_a_model_tells_the_same_steps(told: Any, kind: str) -> None:
    for run, other in zip(told["ragged, ddp"], told[f"ragged, {kind}"], strict=True):
        assert run["losses"] == pytest.approx(other["losses"], rel=1e-12)
        assert run["norms"] == pytest.approx(other["norms"], rel=1e-12)


@pytest.mark.parametrize(("kind", "num_groups"), [("ddp", 1), ("fsdp", 2), ("fsdp root only", 1)])
def test_gradients_are_synchronised_once_per_step_and_scalars_exchanged_once(
    told: Any, kind: str, num_groups: int
) -> None:
    for run in told[f"ragged, {kind}"]:
        num_steps = len(run["steps"])
        # One exchange before the first window, then one at the end of each. FSDP2 reduces each group by itself.
        assert run["collectives"] == [num_steps * num_groups, num_steps + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_without_units_on_one_rank_or_on_all(told: Any, kind: str) -> None:
    error, skipped = told[f"no_units, {kind}"]
    assert error <= 1e-12
    assert skipped == [None, NO_UNITS]


def test_a_term_without_units_still_reaches_every_weight_that_others_wait_for(told: Any) -> None:
    error, num_synchronisations = told["term_without_tokens, ddp"]
    assert error <= 1e-12
    assert num_synchronisations == 1


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_is_by_the_norm_over_all_ranks(told: Any, kind: str) -> None:
    gradient_error, norm_error = told[f"clipped, {kind}"]
    assert gradient_error <= 1e-12
    assert abs(norm_error) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinity_on_one_rank_skips_the_window_on_all(told: Any, kind: str) -> None:
    assert told[f"infinity_on_one_rank, {kind}"] == [[True, False], 512.0, 1]


@pytest.mark.parametrize(("kind", "num_groups"), [("ddp", 1), ("fsdp", 2)])
def test_a_plain_loop_whose_weights_differ_between_ranks(told: Any, kind: str, num_groups: int) -> None:
    error, num_synchronisations, num_exchanges = told[f"plain_loop, {kind}"]
    assert error <= 1e-12
    assert (num_synchronisations, num_exchanges) == (num_groups, 1)


def test_a_tail_can_be_flushed_under_ddp(told: Any) -> None:
    error, num_synchronisations, num_exchanges = told["flushed_tail, ddp"]
    assert error <= 1e-12
    assert (num_synchronisations, num_exchanges) == (1, 1)


def test_a_tail_cannot_be_flushed_under_fsdp2_and_the_error_says_what_to_use(told: Any) -> None:
    message = told["flushed_tail, fsdp"]
    assert message.startswith("this window ended before its last micro-batch, and under FSDP2 its gradients are not")
    assert "accumulator.micro_batches(loader)" in message


@pytest.mark.parametrize(("kind", "name"), [("ddp", "DDP"), ("fsdp", "FSDP2")])
def test_a_micro_batch_that_others_wait_for_cannot_be_skipped(told: Any, kind: str, name: str) -> None:
    message = told[f"skip_that_others_wait_for, {kind}"]
    assert message.startswith(f"this micro-batch cannot be left out: under {name} the other ranks wait for it.")


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_raises_on_one_rank_ends_the_epoch_on_all(told: Any, kind: str) -> None:
    assert told[f"loader_that_raises_on_one_rank, {kind}"] == [1, "raised"]


@pytest.mark.parametrize(("kind", "num_groups"), [("ddp", 1), ("fsdp", 2)])
def test_accumulation_changes_at_a_boundary(told: Any, kind: str, num_groups: int) -> None:
    error, num_synchronisations = told[f"changed_at_a_boundary, {kind}"]
    assert error <= 1e-12
    assert num_synchronisations == 3 * num_groups


def test_precise_gradients_where_one_rank_has_none(told: Any) -> None:
    assert told["precise, ddp"] == [[None], True]


def test_a_rank_that_runs_out_of_memory_splits_alone(told: Any) -> None:
    error, num_synchronisations, splits = told["out_of_memory_on_one_rank, ddp"]
    assert error <= 1e-12
    assert num_synchronisations == 1
    assert splits == [0, 3]


def test_the_flag_covers_the_forward_and_is_put_back(told: Any) -> None:
    # Eight micro-batches on two ranks: a window of three, and a tail of one.
    assert told["flag_is_put_back, ddp"] == [[False, False, True, True], True]


@pytest.mark.parametrize("kind", ["ddp", "ddp, unused found", "fsdp", "fsdp root only"])
def test_weights_frozen_and_unfrozen_after_wrapping_are_stepped_with_the_big_batchs_gradient(
    told: Any, kind: str
) -> None:
    for how, error in told[f"weights_that_change, {kind}"].items():
        assert error <= 1e-12, how


def test_a_plain_loop_of_single_micro_batches_says_that_ddp_cannot_be_told_in_time(told: Any) -> None:
    assert told["frozen_before_the_only_micro_batch, ddp"].startswith("weights were frozen since DDP wrapped the model")


def test_a_weight_outside_of_the_wrapped_model_stays_alike_on_all_ranks(told: Any) -> None:
    assert told["a_weight_outside_of_the_wrapped_model, ddp"] is True


def test_a_tail_with_gradients_of_rows_and_of_complex_weights_is_flushed(told: Any) -> None:
    error, is_sparse, rows = told["rows_and_complex_numbers, ddp"]
    assert error <= 1e-12
    assert is_sparse
    assert rows == [0, 1, 3]  # of the table that one rank alone has read


def test_terms_with_counts_of_their_own_are_means_over_all_ranks(told: Any) -> None:
    assert told["terms_with_counts_of_their_own, ddp"] <= 1e-12
