"""What cannot be traced ends in an error that names the operator and the user's line."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from batchwright import Workload
from batchwright.errors import CannotTraceError
from batchwright.trace.run import trace_workload
from tests.trace.test_trace import FEW_BYTES, predicted, really

if TYPE_CHECKING:
    from collections.abc import Callable


@torch.library.custom_op("batchwright_tests::no_rule", mutates_args=())
def no_rule(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Around(nn.Module):
    """A layer, and something odd done to its output."""

    def __init__(self, odd: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.odd = nn.Linear(64, 64), odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.layer, self.layer(x))


def make_odd(odd: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Workload:
    return Workload(
        model=lambda: Around(odd),
        batch=lambda n: torch.randn(n, 64),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.AdamW(params),
    )


def saved(x: torch.Tensor) -> torch.Tensor:
    torch.save(x.detach(), io.BytesIO())
    return x


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged).to_padded_tensor(0.0)


REFUSED: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "item": ("aten._local_scalar_dense", lambda x: x * x.sum().item()),
    "branch": ("aten._local_scalar_dense", lambda x: x if x.sum() > 0 else -x),
    "boolean mask": ("aten.nonzero", lambda x: x[x > 0]),
    "nonzero": ("aten.nonzero", lambda x: x[torch.nonzero(x[:, 0])[:, 0]]),
    "unique": ("aten._unique2", lambda x: x + torch.unique(x).sum()),
    "numpy": ("Tensor.numpy", lambda x: x * x.detach().numpy().sum()),
    "numpy by its protocol": ("Tensor.numpy", lambda x: x * np.asarray(x.detach()).sum()),
    "dlpack": ("Tensor.__dlpack__", lambda x: x * np.from_dlpack(x.detach()).sum()),
    "pickle": ("Tensor.__reduce_ex__", lambda x: x * len(pickle.dumps(x.detach()))),
    "save": ("Tensor.__reduce_ex__", saved),
    "sparse": ("aten._to_sparse", lambda x: torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x)),
    "oneDNN tensor": ("aten.to_mkldnn", lambda x: x + x.detach().to_mkldnn().to_dense()),
    "nested": ("nested_tensor", nested),
    "an operator without a rule": ("batchwright_tests.no_rule", lambda x: x + torch.ops.batchwright_tests.no_rule(x)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refusal_names_the_operator_and_the_line(name: str) -> None:
    operator, odd = REFUSED[name]
    with pytest.raises(CannotTraceError) as refused:
        trace_workload(make_odd(lambda _, x: odd(x)), 16)
    assert operator in refused.value.problem
    assert __file__ in str(refused.value.details)


def test_torchs_class_is_left_as_it_was() -> None:
    before = set(vars(FakeTensor))
    with pytest.raises(CannotTraceError):
        trace_workload(make_odd(lambda _, x: x * x.detach().numpy().sum()), 16)
    assert set(vars(FakeTensor)) == before


def test_a_mistake_in_shapes_stays_the_users_own_error() -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        trace_workload(make_odd(lambda _, x: x @ torch.ones(3, 3)), 16)


def swapped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(layer, nn.Linear)
    layer.weight.data = layer.weight.data.clone()
    return x * 2


def replaced(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.data = torch.zeros_like(x)
    return x * 2


def emptied(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (x * 3).untyped_storage().resize_(0)
    return x * 2


@pytest.mark.parametrize("trick", [swapped, replaced, emptied])
def test_data_tricks_are_followed(trick: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    workload = make_odd(trick)
    assert predicted(workload, 256) == pytest.approx(really(workload, 256), abs=FEW_BYTES)
