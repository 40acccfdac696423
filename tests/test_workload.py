"""A workload says what is wrong with it when it is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import InvalidInputError
from tests.device.workloads import make_linear, mean_square


def test_a_workload_with_an_optimizer_trains_and_one_without_does_not() -> None:
    assert make_linear().is_training
    assert not make_linear(optimizer=None).is_training


def test_a_live_module_is_a_model_too() -> None:
    live = nn.Linear(8, 1)
    assert make_linear(model=live).model is live


def test_data_takes_the_place_of_batch() -> None:
    workload = make_linear(batch=None, data=[torch.zeros(8)] * 4)
    assert len(workload.data) == 4


def test_generate_or_evaluate_is_work_enough_without_a_loss() -> None:
    for name in ("generate", "evaluate"):
        assert not make_linear(loss=None, optimizer=None, **{name: lambda model, batch: model(batch)}).is_training


def test_a_workload_is_not_changed_but_replaced() -> None:
    workload = make_linear()
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.loss = None  # type: ignore[misc]
    assert dataclasses.replace(workload, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": 3}, "model is a module or a function that builds one; received 3."),
        ({"loss": "mse"}, "loss is a function; received 'mse'."),
        ({"optimizer": 0.1}, "optimizer is a function; received 0.1."),
        ({"scaler": True}, "scaler is a function; received True."),
        ({"batch": 8}, "batch is a function; received 8."),
        ({"batch": None}, "exactly one of them; received neither."),
        ({"data": [1, 2]}, "exactly one of them; received both."),
        ({"batch": None, "data": iter([1, 2])}, "data is a dataset with a length and samples by number; received"),
        ({"loss": None, "optimizer": None}, "needs something to run: loss, or generate or evaluate"),
        ({"loss": None, "evaluate": mean_square}, "a workload with an optimizer needs a loss."),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_value_received(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        make_linear(**changes)
    assert said in str(refused.value)


def test_an_optimizer_that_was_built_already_is_refused() -> None:
    model = nn.Linear(8, 1)
    with pytest.raises(InvalidInputError, match="optimizer is a function"):
        make_linear(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_front_door_has_it() -> None:
    assert isinstance(make_linear(), bw.Workload)


def test_a_loader_as_data_is_answered_with_its_dataset() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2)
    with pytest.raises(InvalidInputError, match=r"try: data=loader\.dataset, collate=loader\.collate_fn"):
        bw.Workload(model=torch.nn.Linear(2, 1), data=loader, loss=lambda model, batch: model(batch[0]).mean())
