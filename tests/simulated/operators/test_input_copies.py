"""Copies that kernels make of what they read: of what lies otherwise than they read it, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.simulated.card import SimulatedCard
from batchwright.simulated.operators.input_copies import copied_bytes
from batchwright.trace.run import trace_workload

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
aten = torch.ops.aten
ROWS, WIDTH = 64, 16
PLAIN, TURNED, EXPANDED = torch.empty(ROWS, WIDTH), torch.empty(WIDTH, ROWS).t(), torch.empty(()).expand(ROWS, WIDTH)
SIZE = 4 * ROWS * WIDTH


@pytest.mark.parametrize(
    ("func", "args", "sizes"),
    [
        (aten._softmax.default, (PLAIN, 1, False), []),
        (aten._log_softmax.default, (TURNED, 1, False), [SIZE]),
        (aten._log_softmax_backward_data.default, (PLAIN, TURNED, 1, torch.float32), [SIZE]),
        (aten._softmax_backward_data.default, (PLAIN, PLAIN, 1, torch.float32), [SIZE]),
        (aten._softmax_backward_data.default, (TURNED, TURNED, 1, torch.float32), [SIZE, SIZE, SIZE]),
        (aten.native_layer_norm.default, (TURNED, [WIDTH], None, None, 1e-5), [SIZE]),
        (aten.native_layer_norm_backward.default, (PLAIN, TURNED, [WIDTH]), [SIZE]),
        (aten.mm.default, (TURNED, PLAIN), []),  # rows or columns one after another: cuBLAS reads either
        (aten.mm.default, (PLAIN[:, :8], PLAIN), []),
        (aten.mm.default, (EXPANDED, PLAIN), [SIZE]),
        (aten.addmm.default, (EXPANDED, PLAIN, PLAIN), []),  # what is added is no matrix of cuBLAS's
        (aten.bmm.default, (PLAIN[None, ::2, ::2], PLAIN[None]), [SIZE // 4]),
        (aten.relu.default, (TURNED,), []),
    ],
)
def test_what_is_copied(func: Any, args: tuple[Any, ...], sizes: list[int]) -> None:
    assert copied_bytes(func, args) == sizes


def test_flash_attention_copies_a_gradient_by_head_and_not_one_by_place() -> None:
    by_place = torch.empty(2, ROWS, 4, WIDTH).transpose(1, 2)
    by_head = torch.empty(2, 4, ROWS, WIDTH)
    func = aten._scaled_dot_product_flash_attention_backward.default
    assert copied_bytes(func, (by_place, by_head, by_head, by_head, by_place)) == []
    assert copied_bytes(func, (by_head, by_head, by_head, by_head, by_place)) == [2 * 4 * ROWS * WIDTH * 4]


def peak(*, is_compiled: bool) -> int:
    def build() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
        if is_compiled:
            model.compile()
        return model

    card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
    workload = bw.Workload(
        build,
        batch=lambda n: torch.randn(n, 256),
        loss=lambda model, x: model(x).sum(),
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
    )
    trace_workload(workload, 2048, card=card)
    return card.peak_bytes.of_allocator[0]


def test_the_gradient_of_a_sum_is_laid_out_by_cublas_and_by_a_compiled_backward_alike() -> None:
    assert peak(is_compiled=False) == peak(is_compiled=True)
