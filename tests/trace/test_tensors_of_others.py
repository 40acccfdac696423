"""Tensors made of others (8-bit optimizer states, float8 weights) count what lies in memory, not what they look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw

WIDTH = 1024
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Coded(torch.Tensor):
    """Looks like fp32; holds a byte per element and a scale per row."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Coded:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(pieces: dict[str, torch.Tensor], _: Any, size: Any, stride: Any) -> Coded:
        return Coded(pieces["codes"], pieces["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.mul.Tensor:  # decoded, then done
            given = [a.codes.float() * a.scale if isinstance(a, Coded) else a for a in args]
            return func(*given, **(kwargs or {}))
        raise NotImplementedError(func)


class ByteMomentum(torch.optim.Optimizer):
    """SGD that keeps its momentum in bytes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                codes = torch.zeros_like(parameter, dtype=torch.int8)
                state["momentum"] = Coded(codes, torch.ones(parameter.shape[0], 1, device=parameter.device))
            parameter.sub_(parameter.grad * state["momentum"])


@pytest.mark.parametrize("on", ["cpu", "a100-40gb"])
def test_states_in_bytes_take_bytes_and_are_the_optimizers(on: str) -> None:
    workload = bw.Workload(
        model=lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        batch=lambda n: torch.randn(n, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=ByteMomentum,
    )
    found = bw.estimate(workload, micro_batch=2, on=on)
    assert found.parts["weights"] == WEIGHT_BYTES
    assert found.parts["optimizer"] == WEIGHT_BYTES // 4 + WIDTH * 4
    assert not any("outside the workload" in note for note in found.notes)
