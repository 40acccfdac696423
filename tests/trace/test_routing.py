"""Steps whose sizes depend on values that a trace must assume: experts, and generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from batchwright import Workload
from batchwright.device.step import StepSettings
from batchwright.errors import InvalidInputError
from batchwright.trace.run import trace_workload
from tests.trace.test_trace import FEW_BYTES, predicted, really

EXPERTS, WIDTH = 4, 32


class Experts(nn.Module):
    """Tokens are sent to their two best experts, as transformers' eager implementation does it."""

    def __init__(self, *, spare_classes: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, 8 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, 8 * WIDTH))
        self.spare_classes = spare_classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
        mask = F.one_hot(chosen, num_classes=EXPERTS + self.spare_classes).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = hit[0]
            if expert == EXPERTS:
                continue
            position, token = torch.where(mask[expert])
            inner = F.linear(F.linear(x[token], self.up[expert]).relu(), self.down[expert])
            out.index_add_(0, token, inner * weights[token, position, None])
        return out


class SameForAll(nn.Module):
    """A router whose choice is even by construction: token i prefers experts i and i + 1. A trace cannot know that."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :EXPERTS] + self.shift


def make_experts(*, spare_classes: int = 1) -> Workload:
    def build() -> nn.Module:
        model = Experts(spare_classes=spare_classes)
        model.router = SameForAll()  # type: ignore[assignment]
        return model

    def batch(n: int) -> torch.Tensor:
        first = torch.arange(n) % EXPERTS
        x = F.one_hot(first, WIDTH) * 2.0 + F.one_hot((first + 1) % EXPERTS, WIDTH)
        return x.float()

    return Workload(
        model=build,
        batch=batch,
        loss=lambda model, x: model(x).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


class TestExperts:
    @pytest.mark.parametrize("spare_classes", [0, 1])
    def test_peak_is_that_of_an_even_choice(self, spare_classes: int) -> None:
        workload = make_experts(spare_classes=spare_classes)
        # Torch makes the one-hot of a fake tensor through a mask of one byte per entry.
        mask_bytes = 512 * 2 * (EXPERTS + spare_classes)
        assert predicted(workload, 512) == pytest.approx(really(workload, 512), abs=mask_bytes + FEW_BYTES)

    def test_worst_is_more_and_the_assumption_is_said(self) -> None:
        balanced, worst = (
            trace_workload(make_experts(), 512, StepSettings(routing=kind)) for kind in ("balanced", "worst")
        )
        assert predicted(make_experts(), 512, routing="worst") > predicted(make_experts(), 512)
        assert "evenly" in " ".join(balanced.notes)
        assert "one expert" in " ".join(worst.notes)

    def test_unknown_assumption_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="balanced, worst"):
            trace_workload(make_experts(), 8, StepSettings(routing="best"))


def generate(model: nn.Module, tokens: torch.Tensor, *, length: int = 12) -> torch.Tensor:
    """Greedy decoding that stops at a length or when every sequence has ended, as transformers decides it."""
    unfinished = torch.ones(tokens.shape[0], dtype=torch.long)
    while True:
        following = model(tokens)[:, -1].argmax(-1)
        tokens = torch.cat([tokens, following[:, None]], 1)
        is_long = torch.full((tokens.shape[0],), tokens.shape[1] >= length)
        unfinished = unfinished & ~(is_long | (following == -1))
        if unfinished.max() == 0:
            return tokens


def test_generation_is_taken_to_its_full_length() -> None:
    changes: dict[str, Any] = {"generate": generate}
    workload = Workload(
        model=lambda: nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50)),
        batch=lambda n: torch.randint(0, 50, (n, 4)),
        **changes,
    )
    traced = trace_workload(workload, 32)
    assert "generation was taken to end at its full length, by no token" in traced.notes
    assert predicted(workload, 32) == pytest.approx(really(workload, 32), abs=FEW_BYTES)
