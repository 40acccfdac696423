"""Losses that count nothing run through the graph and leave no trace, not even where they are not numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchwright.accumulate.boundary import counting_nothing, zero_backward


class Net(nn.Module):
    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 1)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.reentrant is None:
            hidden = self.body(x)
        else:
            hidden = checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)
        empty = nn.functional.cross_entropy(self.head(hidden), torch.full((len(x),), -100))
        return self.side(hidden).square().mean(), empty


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_mean_over_nothing_adds_zeros_to_every_weight_it_reaches(reentrant: bool | None) -> None:
    net = Net(reentrant=reentrant)
    _, empty = net(torch.randn(4, 3))
    assert empty.isnan()
    zero_backward(empty)
    reached = [*net.body.parameters(), *net.head.parameters()]
    assert all(weight.grad is not None and not weight.grad.any() for weight in reached)
    assert net.side.weight.grad is None


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_beside_one_that_counts_only_that_one_counts(reentrant: bool | None) -> None:
    net = Net(reentrant=reentrant)
    x = torch.randn(4, 3)
    counted, empty = net(x)
    with counting_nothing([empty], beside=counted):
        (counted + empty).backward()
    found = {name: weight.grad.clone() for name, weight in net.named_parameters() if weight.grad is not None}
    assert set(found) == {name for name, _ in net.named_parameters()}
    net.zero_grad()
    net(x)[0].backward()
    for name, weight in net.named_parameters():
        assert torch.equal(found[name], torch.zeros_like(weight) if weight.grad is None else weight.grad)
