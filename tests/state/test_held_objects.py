"""What a plain step function holds is found, wherever Python lets a function hold it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from batchwright.state.held_objects import held_objects

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = nn.Linear(2, 1)
ELSEWHERE = nn.Linear(2, 1)


def global_step(size: int) -> Any:
    return MODEL(torch.ones(size, 2))


def global_step_in_a_lambda(size: int) -> Any:
    run = functools.partial(lambda n: MODEL(torch.ones(n, 2)), size)
    return run()


def calls_a_function_beside_it(size: int) -> Any:
    return global_step(size)


def measured(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizers = [torch.optim.SGD(self.model.parameters())]
        self.scaler = torch.amp.GradScaler("cpu")
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1)
        self.name = "a trainer"

    def step(self, size: int) -> Any:
        return self.model(torch.ones(size, 2)) + ELSEWHERE(torch.ones(size, 2))

    def __call__(self, size: int) -> Any:
        return self.step(size)


TRAINERS = {"self.model", "self.optimizers[0]", "self.scaler", "self.scheduler"}


def test_closure_cells_and_containers_in_them() -> None:
    model, parts = nn.Linear(2, 1), {"head": nn.Linear(1, 1), "size": 3}

    def step(size: int) -> Any:
        return parts["head"](model(torch.ones(size, 2)))  # type: ignore[operator]

    assert held_objects(step) == {"model": model, "parts['head']": parts["head"]}


def test_a_cell_that_is_not_assigned_yet() -> None:
    def step(size: int) -> Any:
        return later(size)

    assert held_objects(step) == {}
    later = MODEL
    assert held_objects(step) == {"later": MODEL}


def test_defaults() -> None:
    other = nn.Linear(1, 1)

    def step(size: int, model: nn.Module = MODEL, *, head: nn.Module = other) -> Any:
        return head(model(torch.ones(size, 2)))

    assert held_objects(step) == {"model": MODEL, "head": other}


def test_partial_of_a_partial() -> None:
    def step(model: nn.Module, size: int, *, optimizer: Any) -> None: ...

    optimizer = torch.optim.SGD(MODEL.parameters())
    bound = functools.partial(functools.partial(step, MODEL), optimizer=optimizer)
    assert held_objects(bound) == {"args[0]": MODEL, "optimizer": optimizer}


def test_a_method_and_a_callable_object_by_their_attributes() -> None:
    trainer = Trainer()
    assert held_objects(trainer.step).keys() == TRAINERS | {"ELSEWHERE"}
    assert held_objects(trainer).keys() == TRAINERS
    assert held_objects(lambda size: trainer.step(size)).keys() == {n.replace("self", "trainer") for n in TRAINERS}


def test_globals_also_through_nested_code_and_functions_beside() -> None:
    assert held_objects(global_step) == {"MODEL": MODEL}
    assert held_objects(global_step_in_a_lambda) == {"MODEL": MODEL}
    assert held_objects(calls_a_function_beside_it) == {"MODEL": MODEL}


def test_a_decorator_hides_nothing() -> None:
    model = nn.Linear(2, 1)
    assert held_objects(measured(lambda size: model(torch.ones(size, 2)))) == {"model": model}
    assert held_objects(measured(global_step)) == {"MODEL": MODEL}


def test_one_name_for_two_objects_loses_neither() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)

    def inner(size: int, model: nn.Module = first) -> None: ...
    def step(size: int, model: nn.Module = second) -> None:
        inner(size)

    assert list(map(id, held_objects(step).values())) == [id(second), id(first)]


def test_an_object_is_found_once() -> None:
    model = nn.Linear(2, 1)
    same = [model, model]
    assert held_objects(lambda size: (model, same)) == {"model": model}


def test_the_model_itself() -> None:
    assert held_objects(MODEL) == {"Linear": MODEL}


def test_functions_that_hold_nothing() -> None:
    assert held_objects(len) == {}
    assert held_objects(Trainer) == {}
    assert held_objects(lambda size: torch.ones(size)) == {}
