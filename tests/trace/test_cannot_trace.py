"""What cannot be traced ends in an error that names the operator and the user's line, never in a number."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.errors import CannotTraceError
from batchwright.memory.breakdown import break_down
from batchwright.trace.run import trace_workload
from tests.device.workloads import make_linear, mean_square

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def reads_an_item(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = mean_square(model, batch)
    return loss / loss.item()


def branches_on_data(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = mean_square(model, batch)
    return loss if loss > 1 else 2 * loss


def makes_a_list(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch) * len(model(batch).tolist())


def selects_by_a_mask(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch[model(batch)[:, 0] > 0])


def finds_what_is_unique(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch) * len(model(batch).unique())


def asks_numpy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch) * float(model(batch).detach().numpy().sum())


def calls_its_own_operator(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.batchwright_tests.twice(model(batch)).mean()
    return out


@pytest.fixture
def operator_without_a_shape_rule() -> Iterator[None]:
    library = torch.library.Library("batchwright_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("operator_without_a_shape_rule")
@pytest.mark.parametrize(
    ("loss", "operator", "why", "line"),
    [
        (reads_an_item, "aten._local_scalar_dense", "reads a value out of a tensor", "return loss / loss.item()"),
        (branches_on_data, "aten._local_scalar_dense", "reads a value out of a tensor", "if loss > 1 else"),
        (makes_a_list, "aten._local_scalar_dense", "reads a value out of a tensor", "model(batch).tolist()"),
        (
            selects_by_a_mask,
            "aten.nonzero",
            "the size of its result depends on values",
            "batch[model(batch)[:, 0] > 0]",
        ),
        (finds_what_is_unique, "aten._unique2", "the size of its result depends on values", "model(batch).unique()"),
        (calls_its_own_operator, "batchwright_tests.twice", "torch knows no shape rule", "batchwright_tests.twice("),
        (asks_numpy, "Tensor.numpy", "takes values out of a tensor", ".detach().numpy()"),
    ],
)
def test_the_operator_the_reason_and_the_line_are_named(
    loss: Callable[..., Any], operator: str, why: str, line: str
) -> None:
    with pytest.raises(CannotTraceError) as refused:
        trace_workload(make_linear(loss=loss), 4)
    text = str(refused.value)
    first, where, remedy = text.splitlines()
    assert f"operator {operator}" in first
    assert why in first
    source, start = inspect.getsourcelines(loss)
    number = next(n for n, written in enumerate(source, start) if line in written)
    assert where.startswith(f"  at {Path(__file__)}:{number}: ")
    assert line in where
    assert remedy.startswith("  try: bw.fit(workload) runs the step instead; or keep that line out of the step")
    assert refused.value.exit_code == 1


def test_the_line_is_the_users_also_where_a_module_of_theirs_reads_the_value() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out if out.sum().item() > 0 else -out

    with pytest.raises(CannotTraceError, match=r"out\.sum\(\)\.item\(\) > 0"):
        trace_workload(make_linear(model=Gate), 4)


def test_values_that_follow_from_constants_can_be_read() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(0, 1, 5)[1].item() + torch.tensor([2.0]).item()
        assert scale == 2.25
        return mean_square(model, batch) * scale

    assert break_down(trace_workload(make_linear(loss=loss), 4).log).peak_bytes > 0


def test_what_the_model_computes_is_never_taken_for_known() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return mean_square(model, batch) * (torch.zeros(1) + batch.sum() * model.weight.sum()).item()  # type: ignore[operator]

    with pytest.raises(CannotTraceError, match="reads a value out of a tensor"):
        trace_workload(make_linear(loss=loss), 4)


def test_a_batch_from_numpy_and_a_dataset_of_real_samples_are_traced() -> None:
    def peak(**changes: Any) -> int:
        return break_down(trace_workload(make_linear(**changes), 4).log).peak_bytes

    assert peak(batch=lambda n: torch.from_numpy(np.zeros((n, 8), dtype=np.float32))) >= peak()
    assert peak(batch=None, data=[torch.zeros(8)] * 4) >= peak()


def test_reading_through_data_is_traced_like_the_tensor_itself() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return mean_square(model, batch.data)

    plain, through_data = (trace_workload(make_linear(loss=f), 4).log for f in (mean_square, loss))
    assert break_down(plain).parts == break_down(through_data).parts


def test_the_users_own_error_is_left_alone() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        trace_workload(make_linear(loss=loss), 4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_model_that_torch_cannot_run_on_fake_tensors_is_said() -> None:
    def build() -> Any:
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))

    with pytest.raises(CannotTraceError, match="TorchScript runs its operators on real tensors only"):
        trace_workload(make_linear(model=build), 4)
