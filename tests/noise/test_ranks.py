"""Two gloo ranks under one torchrun: the noise of a step is that of one process with the same micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.noise.regression import DTYPES, expected
from tests.torchrun import told_by_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")
KINDS = ("ddp", "fsdp")
TOLERANCE = {"float64": 1e-11, "float32": 1e-5}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run every case once and return what the ranks told, which must be the same."""
    first, second = told_by_ranks(WORKER, tmp_path_factory)
    assert first == second
    return first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "sizes"), [("even", [4] * 4), ("ragged", [3, 1, 2, 4]), ("one each", [4] * 2)])
def test_ranks_times_accumulation_gives_the_observations_of_one_process(
    told: Any, kind: str, dtype: str, case: str, sizes: list[int]
) -> None:
    seen = told[f"{case}, {kind}, {dtype}"]
    for found, wanted in zip(seen, expected(sizes, dtype), strict=True):
        assert found == pytest.approx(wanted, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_ones_own_on_ranks_gives_the_same_and_clipping_does_not_matter(told: Any, kind: str) -> None:
    seen = told[f"own loop, {kind}"]
    # The first step only: what comes after depends on the clipped step.
    assert seen[0] == pytest.approx(expected([4] * 4)[0], rel=1e-11)
    assert len(seen) == 3


def test_ranks_with_data_of_their_own_are_noticed(told: Any) -> None:
    assert any("ranks with data of their own" in warning for warning in told["stratified"])
