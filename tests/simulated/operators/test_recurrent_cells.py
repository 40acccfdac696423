"""nn.GRUCell on the simulated card: its one kernel, and the workspace that it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import trace_workload

BATCH, STEPS, INPUT, HIDDEN = 256, 5, 64, 128


class Loop(nn.Module):
    """A cell that runs over the steps of a batch, and what is live after each of them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.cell = nn.GRUCell(INPUT, HIDDEN, bias=bias)
        self.live: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], HIDDEN)
        for step in range(STEPS):
            state = self.cell(x[:, step], state)
            self.live.append(torch.cuda.memory_allocated())
        return state


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_keeps_both_gates_the_state_and_five_numbers_for_each_unit(bias: bool, dtype: torch.dtype) -> None:
    growth: list[int] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Loop)
        model.live.clear()
        value: torch.Tensor = model(x).float().mean()
        growth.extend(later - earlier for earlier, later in zip(model.live[1:], model.live[2:], strict=False))
        return value

    workload = bw.Workload(
        model=lambda: Loop(bias=bias).to(dtype),
        batch=lambda n: torch.randn(n, STEPS, INPUT, dtype=dtype),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace_workload(workload, BATCH, card=SimulatedCard(find_card("a100-40gb")))
    # Both products of three gates are kept by the kernel's node, for a backward that can be differentiated again.
    unit = BATCH * HIDDEN * dtype.itemsize
    assert set(growth) == {unit * (3 + 3 + 1 + 5)}
