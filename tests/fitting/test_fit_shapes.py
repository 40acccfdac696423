"""Several shapes: what is said where none of them fits, and where one of them raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import NothingFitsError


def inputs(n: int, copies: int = 1) -> torch.Tensor:
    return torch.zeros(n, 16 * 1024 * copies, 1024)


def workload() -> bw.Workload:
    """64 MiB a sample and copy."""
    return bw.Workload(
        model=lambda: nn.Linear(1024, 1),
        batch=inputs,
        loss=lambda model, batch: model(batch[:, 0]).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


def refused(**options: object) -> list[str]:
    with pytest.raises(NothingFitsError) as error:
        bw.fit(workload(), memory="32MiB", cache=False, **options)  # type: ignore[arg-type]
    return str(error.value).splitlines()


def test_where_no_shape_fits_the_one_that_needs_least_is_told_by_parts_with_the_remedy() -> None:
    problem, which, *details, remedy = refused(shapes={"copies": [3, 1, 2]})
    assert problem == "micro-batch 1 fits on cpu at none of the 3 shapes (32 MiB)."
    assert which == "  least is needed at copies=1"
    only = refused(shapes={"copies": 1})
    assert only[0] == "micro-batch 1 does not fit on cpu (32 MiB)."
    assert [*details, remedy] == only[1:]
    assert details[-1].startswith("  predicted need 64")
    assert "inputs 64 MiB" in details[-1]
    assert remedy.startswith("  try: bw.estimate(workload, what_if=True) prints")


def test_the_size_that_fits_nowhere_is_one_that_every_shape_was_tried_at_or_below() -> None:
    problem, which, *_ = refused(shapes={"copies": [3, 1]}, start=2, max_trials=1)
    assert problem == "micro-batch 2 fits on cpu at none of the 2 shapes (32 MiB)."
    assert which == "  the first is copies=3", "nothing was predicted"


def test_an_error_at_a_later_shape_is_the_users_own_and_tells_what_was_found() -> None:
    def step(n: int, crops: int = 2) -> None:
        if crops == 6:
            raise KeyError("a bug of mine")
        if n * crops > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(KeyError, match="a bug of mine") as error:
        bw.fit(step, shapes={"crops": [2, 16, 4, 6, 8]})
    note = "found before that: micro-batch 4 fits at crops=2; nothing fits at crops=16; micro-batch 2 fits at crops=4"
    assert error.value.__notes__ == [note]


def test_an_error_at_the_first_shape_has_nothing_to_tell() -> None:
    def step(n: int, crops: int = 2) -> None:
        raise KeyError("a bug of mine")

    with pytest.raises(KeyError) as error:
        bw.fit(step, shapes={"crops": [2, 4]})
    assert not hasattr(error.value, "__notes__")
