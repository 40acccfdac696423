"""Recurrent nets on the simulated card: one call of cuDNN, its reserve and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import trace_workload

BATCH, LENGTH, INPUT, HIDDEN = 8, 50, 64, 128


class Net(nn.Module):
    """A recurrent net with a loss on its output."""

    def __init__(self, kind: Any, *, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.net = kind(INPUT, HIDDEN, batch_first=True, **options)
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: Any = x
        if self.packed:
            given = PackedSequence(x.transpose(0, 1).flatten(0, 1), torch.full((LENGTH,), BATCH, device="cpu"))
        out = self.net(given)[0]
        total: torch.Tensor = (out.data if self.packed else out).sum()
        return total


def live_after_forward(build: Any, *, dtype: torch.dtype | None = None) -> int:
    """Return what forward left on the card."""
    card = SimulatedCard(find_card("a100-40gb"))
    left: list[int] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            value: torch.Tensor = model(x)
        left.append(torch.cuda.memory_allocated() - before)
        return value

    workload = bw.Workload(
        model=build,
        batch=lambda n: torch.randn(n, LENGTH, INPUT),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace_workload(workload, BATCH, card=card)
    return left[0]


def output_bytes(directions: int = 1) -> int:
    return BATCH * LENGTH * HIDDEN * directions * 4


@pytest.mark.parametrize(("kind", "kept"), [(nn.LSTM, 5), (nn.GRU, 4), (nn.RNN, 1)])
def test_one_layer_keeps_its_gates_and_cell_beside_its_output(kind: Any, kept: int) -> None:
    left = live_after_forward(lambda: Net(kind))
    assert left == pytest.approx((1 + kept) * output_bytes(), rel=0.02)


def test_a_second_layer_keeps_the_output_of_the_first() -> None:
    left = live_after_forward(lambda: Net(nn.LSTM, num_layers=2, dropout=0.1))
    assert left == pytest.approx((1 + 2 * 5 + 1) * output_bytes(), rel=0.02)


def test_both_directions_are_counted() -> None:
    left = live_after_forward(lambda: Net(nn.LSTM, bidirectional=True))
    assert left == pytest.approx((1 + 5) * output_bytes(2), rel=0.02)


def test_autocast_runs_it_in_half_precision_with_a_copy_of_the_weights() -> None:
    whole = live_after_forward(lambda: Net(nn.LSTM))
    half = live_after_forward(lambda: Net(nn.LSTM), dtype=torch.float16)
    weights = sum(p.numel() for p in nn.LSTM(INPUT, HIDDEN).parameters()) * 2
    inputs = BATCH * LENGTH * INPUT * 2
    assert half == pytest.approx(whole / 2 + weights + inputs, rel=0.02)


def test_a_whole_step_of_a_packed_batch_runs() -> None:
    card = SimulatedCard(find_card("a100-40gb"))
    workload = bw.Workload(
        model=lambda: Net(nn.GRU, packed=True),
        batch=lambda n: torch.randn(n, LENGTH, INPUT),
        loss=lambda model, x: model(x),
        optimizer=lambda params: torch.optim.Adam(params),
    )
    trace_workload(workload, BATCH, card=card)
    assert card.peak_bytes.allocated is not None
    assert card.peak_bytes.allocated > 5 * output_bytes()


INPUT_BYTES = BATCH * LENGTH * INPUT * 4


def peaks_of_a_call(*, batch_first: bool, frozen: bool = False) -> tuple[int, int, torch.Size, tuple[int, ...]]:
    """Return by how much forward and backward of an LSTM rise over what was live before, and how its output lies."""
    found: list[Any] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x if batch_first else x.transpose(0, 1).contiguous()
        model.requires_grad_(not frozen)
        state = x.new_zeros(1, BATCH, HIDDEN)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        # A leaf in front keeps backward going where the weights are frozen.
        out = model(x.requires_grad_(frozen), (state, state))[0]
        forward = torch.cuda.max_memory_allocated() - before
        given = torch.empty_like(out)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        leaves = [x] if frozen else list(model.parameters())
        torch.autograd.grad(out, leaves, given)
        found.append((forward, torch.cuda.max_memory_allocated() - before, out.shape, out.stride()))
        return nn.functional.linear(x, x.new_zeros(1, INPUT).requires_grad_()).sum()

    workload = bw.Workload(
        model=lambda: nn.LSTM(INPUT, HIDDEN, batch_first=batch_first),
        batch=lambda n: torch.randn(n, LENGTH, INPUT),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace_workload(workload, BATCH, card=SimulatedCard(find_card("a100-40gb")))
    first: tuple[int, int, torch.Size, tuple[int, ...]] = found[0]
    return first


def test_batch_first_copies_its_input_in_forward_and_in_backward() -> None:
    forward, backward, shape, strides = peaks_of_a_call(batch_first=True)
    plain_forward, plain_backward, _, _ = peaks_of_a_call(batch_first=False)
    assert forward - plain_forward == INPUT_BYTES
    assert backward - plain_backward == INPUT_BYTES
    assert shape == (BATCH, LENGTH, HIDDEN)
    assert strides == (HIDDEN, BATCH * HIDDEN, 1)


def test_the_gradient_of_the_input_is_made_though_nobody_asks() -> None:
    _, backward, _, _ = peaks_of_a_call(batch_first=False)
    weights = sum(p.numel() for p in nn.LSTM(INPUT, HIDDEN).parameters()) * 4
    states = 4 * BATCH * HIDDEN * 4  # two that nobody gave, and the gradients of both
    assert backward == INPUT_BYTES + weights + states


def test_frozen_weights_get_no_gradient() -> None:
    _, backward, _, _ = peaks_of_a_call(batch_first=False, frozen=True)
    assert backward == INPUT_BYTES + 4 * BATCH * HIDDEN * 4
