"""Indexing with Python values on a simulated card gives what it gives on the CPU, and refuses what CUDA refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from batchwright.simulated.torch_patches.backend import is_on_card
from tests.simulated.torch_patches.test_redirected_calls import in_a_step

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 4, 6
INDICES: dict[str, Any] = {
    "a list": (slice(None), [0, 2]),
    "a list alone": [0],
    "negative": (..., [-1]),
    "a tuple within": (slice(None), (0, 2)),
    "two lists": ([0, 1], [1, 2]),
    "a list of lists, which are several": [[0, 1], [1, 2]],
    "a nested list": (slice(None), [[0, 1], [1, 2]]),
    "a range": range(3),
    "a range within": (slice(None), range(3)),
    "truths": [True, False, True, False],
    "truths within": (slice(None), [True, False] * 3),
    "an array": (slice(None), np.array([0, 2])),
    "an array of truths": np.array([True, False, True, True]),
    "a number of numpy": np.int64(1),
    "new dimensions": (None, ..., [0]),
    "nothing": [],
    "fractions, which torch cuts": [0.5],
    "true": True,
    "false": False,
    "numbers of the host": (slice(None), torch.tensor([0, 2])),
    "truths of the host": torch.tensor([True, False, True, True]),
    "numbers in a list": (slice(None), [torch.tensor(0), torch.tensor(1)]),
    "bytes": torch.tensor([1, 0, 1, 0], dtype=torch.uint8),
}


def on_card(ask: Callable[[torch.Tensor], Any]) -> Any:
    """Return what a question about a tensor of the card is answered with."""
    (answer,) = in_a_step(lambda *_: ask(torch.zeros(ROWS, COLUMNS, device="cuda")))
    return answer


@pytest.mark.filterwarnings("ignore:.*(uint8|non-tuple sequence|multidimensional indexing).*")
def test_shapes_are_those_of_the_cpu() -> None:
    def ask(tensor: torch.Tensor) -> dict[str, Any]:
        return {name: tuple(tensor[index].shape) for name, index in INDICES.items()}

    assert on_card(ask) == ask(torch.zeros(ROWS, COLUMNS))


@pytest.mark.filterwarnings("ignore:.*(uint8|non-tuple sequence|multidimensional indexing).*")
def test_what_is_indexed_can_be_assigned_and_stays_on_the_card() -> None:
    def ask(tensor: torch.Tensor) -> list[bool]:
        for index in INDICES.values():
            tensor[index] = 0
            tensor[index] = torch.tensor(1.0)  # a single number of the host may
            tensor[index] = tensor[index] * 2
        return [is_on_card(tensor), is_on_card(tensor[:, [0, 2]])]

    assert on_card(ask) == [True, True]


def test_a_step_that_indexes_with_a_list_trains() -> None:
    def ask(tensor: torch.Tensor) -> tuple[int, ...]:
        weight = torch.nn.Parameter(tensor)
        (weight[:, [0, 2]].sum() + weight[[True, False, True, False]].sum()).backward()
        assert weight.grad is not None
        return tuple(weight.grad.shape)

    assert on_card(ask) == (ROWS, COLUMNS)


@pytest.mark.parametrize(
    "refused",
    [
        lambda tensor: tensor[[True, False]],
        lambda tensor: tensor["name"],
        lambda tensor: tensor[0.5],
        lambda tensor: tensor[[0], [0], [0]],
        lambda tensor: tensor[:, [[0, 1], [2]]],
        lambda tensor: tensor[:, [COLUMNS]],
        lambda tensor: tensor[[-ROWS - 1]],
        lambda tensor: tensor[[True, False, True, False], [0, COLUMNS]],
        lambda tensor: tensor.__setitem__((slice(None), [COLUMNS]), 0),
    ],
)
def test_what_the_cpu_refuses_is_refused_alike(refused: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises((IndexError, TypeError, ValueError)) as on_cpu:
        refused(torch.zeros(ROWS, COLUMNS))
    with pytest.raises(on_cpu.type):
        on_card(refused)


@pytest.mark.parametrize(
    "refused",
    [
        lambda tensor: torch.zeros(ROWS)[torch.tensor([0], device="cuda")],
        lambda tensor: tensor.index_select(1, torch.tensor([0])),
        lambda tensor: tensor.gather(1, torch.zeros(ROWS, 1, dtype=torch.int64)),
        lambda tensor: tensor.__setitem__((slice(None), [0, 2]), torch.ones(ROWS, 2)),
    ],
)
def test_what_cuda_refuses_is_refused(refused: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="device"):
        on_card(refused)
