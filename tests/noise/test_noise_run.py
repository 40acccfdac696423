"""measure_noise: models that are odd to hooks are measured, and what cannot be trained on is answered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from batchwright.errors import InvalidInputError
from batchwright.noise.noise_run import measure_noise
from batchwright.workload import Workload


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()  # type: ignore[no-any-return]


def workload(**changes: Any) -> Workload:
    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        "batch": lambda n: torch.randn(n, 6),
        "loss": square,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    }
    return Workload(**{**parts, **changes})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore::batchwright.noise.noise_scale.NoiseScaleWarning")
@pytest.mark.parametrize("micro_batch", [2, 8])
def test_a_scripted_model_has_the_noise_of_the_model_itself(micro_batch: int) -> None:
    own = workload()

    def scripted() -> Any:
        return torch.jit.script(own.model())

    plain, other = (
        measure_noise(work, effective_batch=8, micro_batch=micro_batch, steps=10)
        for work in (own, workload(model=scripted))
    )
    if micro_batch == 2:  # by examples and by halves the same quantity is measured with other errors
        assert other.critical_batch.value == pytest.approx(plain.critical_batch.value, rel=1e-3)
    assert other.critical_batch.observations == plain.critical_batch.observations > 0


@pytest.mark.parametrize("micro_batch", [2, 8])
@pytest.mark.parametrize("is_live", [True, False])
def test_lazy_parameters_are_materialised(micro_batch: int, is_live: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))

    model = build()
    run = measure_noise(
        workload(model=model if is_live else build), effective_batch=8, micro_batch=micro_batch, steps=4
    )
    assert run.critical_batch.observations > 0
    assert isinstance(model[0], nn.LazyLinear)  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:.*batch normalization")
def test_single_samples_for_batch_normalization_name_the_split() -> None:
    normalized = workload(model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
    with pytest.raises(InvalidInputError, match=r"^an effective batch of 4, as 1x4, has micro-batches that"):
        measure_noise(normalized, effective_batch=4, steps=2)


def test_a_loss_without_the_model_is_answered() -> None:
    with pytest.raises(InvalidInputError, match="or computed losses that do not depend on the weights"):
        measure_noise(workload(loss=lambda model, batch: torch.ones((), requires_grad=True) * 2), effective_batch=8)
