"""Operators that are one kernel on CUDA: the simulated card runs each as one, by torch's own table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen  # type: ignore[import-untyped]
import yaml
from torch import nn

import batchwright as bw
from batchwright.catalogue.cards import cublas_workspace_bytes, find_card
from batchwright.simulated.card import SimulatedCard
from batchwright.simulated.operators.cuda_kernels import _FUSED_ON_CUDA
from batchwright.trace.run import trace_workload

MIB = 2**20
ROWS, WIDTH = 4096, 256  # 4 MiB in fp32


class ListeningCard(SimulatedCard):
    """Remembers who asked for how much."""

    def __init__(self) -> None:
        super().__init__(find_card("a100-40gb"))
        self.asked: list[tuple[int, str, str]] = []

    def twin(self) -> SimulatedCard:
        return ListeningCard()

    def malloc(self, num_bytes: int, owner: Any = ("", "", "")) -> Any:
        self.asked.append((num_bytes, owner[0], owner[2]))
        return super().malloc(num_bytes, owner)


def asked_by(module: Any) -> list[tuple[int, str, str]]:
    card = ListeningCard()
    workload = bw.Workload(
        model=module,
        batch=lambda n: torch.randn(n, WIDTH, requires_grad=True),
        loss=lambda model, x: model(x).sum(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace_workload(workload, ROWS, card=card)
    return [(size, name, phase) for size, name, phase in card.asked if size >= MIB]


def names_with_a_cuda_kernel_beside_a_composite() -> set[str]:
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found = set()
    for entry in yaml.safe_load(table.read_text()):
        keys = {key.strip() for keys in entry.get("dispatch") or {} for key in keys.split(",")}
        has_kernel = "CUDA" in keys or "structured_delegate" in entry
        if "CompositeImplicitAutograd" in keys and has_kernel:
            found.add(entry["func"].partition("(")[0])
    return found


def test_the_list_is_that_of_torchs_own_table() -> None:
    assert set(_FUSED_ON_CUDA) == names_with_a_cuda_kernel_beside_a_composite()


@pytest.mark.parametrize(("activation", "name"), [(nn.SiLU, "aten.silu_backward"), (nn.Mish, "aten.mish_backward")])
def test_the_backward_of_an_activation_makes_one_tensor(activation: Any, name: str) -> None:
    asked = asked_by(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), activation()))
    others = {who for _, who, phase in asked if phase == "backward"} - {"aten.mm", "cuBLAS workspace"}
    assert name in others
    assert not others & {"aten.mul.Tensor", "aten.empty_like"}


def test_rms_norm_keeps_one_number_per_row_beside_its_input() -> None:
    asked = asked_by(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)))
    assert {(size, who) for size, who, phase in asked if phase == "forward"} <= {
        (ROWS * WIDTH * 4, "aten.addmm"),
        (ROWS * WIDTH * 4, "aten._fused_rms_norm"),
        (cublas_workspace_bytes(find_card("a100-40gb")), "cuBLAS workspace"),
    }
