"""Gradients of one tensor that meet: the trace adds them up as a real backward does, in place or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import batchwright as bw
from batchwright.trace.run import trace_workload
from batchwright.trace.trace import counts_when_alone
from tests.trace.test_trace import FEW_BYTES, predicted, really

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 64


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))

    def forward(self) -> torch.Tensor:
        return self.weight * 2


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


KEPT: list[torch.Tensor] = []
twice: Any = Twice.apply


def hooked(h: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    seen = h.view_as(h)
    seen.register_hook(hook)
    return seen


MEETINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two fresh ones": lambda h: h.sin().sum() + (h.cos() * 2).sum(),
    "one that is passed on": lambda h: (h + h.sin()).pow(2).sum(),
    "one that is still to be read": lambda h: (h.sin() + h.cos() + h + h).pow(2).sum(),
    "two of one node": lambda h: (h * h).sin().sum(),
    "two of one product": lambda h: (h @ h.t()).sin().sum(),
    "an expanded one first": lambda h: h.sin().sum() + h.sum(),
    "an expanded one last": lambda h: h.sum() + h.sin().sum(),
    "a transposed one": lambda h: h.sin().sum() + h.t().exp().sum(),
    "rows": lambda h: torch.stack([h[i].exp().sum() for i in range(5)]).sum(),
    "halves": lambda h: (h.chunk(2)[0] * h.chunk(2)[1]).sum() + h.sin().sum(),
    "parts of a stack": lambda h: torch.stack([h, h.sin(), h]).exp().sum(),
    "a function of one's own first": lambda h: h.sin().sum() + twice(h).exp().sum(),
    "a function of one's own last": lambda h: twice(h).exp().sum() + h.sin().sum(),
    "a hook that looks": lambda h: h.sin().sum() + hooked(h, lambda _: None).exp().sum(),
    "a hook that keeps": lambda h: h.sin().sum() + hooked(h, KEPT.append).exp().sum(),
    "a hook that changes": lambda h: h.sin().sum() + hooked(h, lambda g: g * 3).exp().sum(),
    "formulas that add": lambda h: torch.atan2(h, h.cos()).sum() + torch.lerp(h, h.sin(), h.cos()).sum(),
    "formulas that write into zeros": lambda h: (
        h[torch.arange(8)].exp().sum() + h.gather(0, torch.zeros(4, SIZE, dtype=torch.long)).exp().sum() + h.sin().sum()
    ),
    "rows by number": lambda h: h.index_select(0, torch.arange(8)).exp().sum() + h.sin().sum(),
    "a gradient of a gradient": lambda h: (
        torch.autograd.grad((h.sin() * h).sum(), h, create_graph=True)[0].pow(2).sum()
    ),
    "a loss of logits": lambda h: F.binary_cross_entropy_with_logits(h, torch.ones(SIZE, SIZE)) + h.sin().sum(),
    "weighted logits": lambda h: F.binary_cross_entropy_with_logits(
        h, torch.ones(SIZE, SIZE), pos_weight=torch.ones(SIZE)
    ),
}
# Right in their additions; to the byte they are not, for reasons of their own: a row that a kernel converts, the state
# of the random generator that a checkpoint keeps.
ALMOST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f"recomputed, {'in a backward of its own' if own else 'in place'}": lambda h, own=own: (  # type: ignore[misc]
        checkpoint(lambda y: y.sin() * y.cos() * y + y, h, use_reentrant=own).exp().sum() + h.sin().sum()
    )
    for own in (False, True)
}
ALMOST["a largest"] = lambda h: h.amax(0).sum() + h.sin().sum()


def workload_of(meet: Callable[[torch.Tensor], torch.Tensor]) -> bw.Workload:
    return bw.Workload(
        model=Weight,
        batch=torch.zeros,
        loss=lambda model, _: meet(model()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


def traced_adds(meet: Callable[[torch.Tensor], torch.Tensor]) -> int:
    log = trace_workload(workload_of(meet), 1, steps=1).log
    return sum(
        block.phase == "backward" and block.operator == "aten.add.Tensor" for block, grown in log.changes if grown > 0
    )


def real_adds(meet: Callable[[torch.Tensor], torch.Tensor]) -> int:
    loss = meet(Weight()())
    # Without acc_events torch 2.10 warns of cycles that are not used here.
    recording = profile(activities=[ProfilerActivity.CPU], acc_events=True)
    with recording as profiler, record_function("whole backward"):
        loss.backward()
    KEPT.clear()
    assert profiler.profiler is not None
    return sum(event.name() == "aten::add" for event in profiler.profiler.kineto_results.events())


def test_a_gradient_that_only_the_engine_holds_is_recognised_by_this_torch() -> None:
    assert counts_when_alone() is not None


@pytest.mark.parametrize("name", [name for name in MEETINGS if "one" in name or "formulas" in name or "logits" in name])
def test_the_peak_is_the_real_one_to_a_few_bytes(name: str) -> None:
    workload = workload_of(MEETINGS[name])
    assert predicted(workload, 1) == pytest.approx(really(workload, 1), abs=FEW_BYTES)
    KEPT.clear()


@pytest.mark.parametrize("name", [name for name in {**MEETINGS, **ALMOST} if "logits" not in name])
def test_as_many_additions_are_out_of_place_as_in_a_real_backward(name: str) -> None:
    meet = {**MEETINGS, **ALMOST}[name]
    assert traced_adds(meet) == real_adds(meet)


class Trunk(nn.Module):
    """A wide trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(16, 256), nn.Linear(256, 6), nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        out: torch.Tensor = self.policy(hidden).mean() + self.value(hidden).pow(2).mean()
        return out


def two_heads() -> bw.Workload:
    return bw.Workload(
        model=Trunk,
        batch=lambda n: torch.randn(n, 16),
        loss=lambda model, batch: model(batch),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_heads_on_one_trunk_need_no_third_gradient(accumulation: int) -> None:
    real = really(two_heads(), 512, accumulation=accumulation)
    assert predicted(two_heads(), 512, accumulation=accumulation) == pytest.approx(real, abs=FEW_BYTES)


def test_nor_do_they_on_a_simulated_card() -> None:
    parts = [bw.estimate(two_heads(), micro_batch=2048, on=on).parts for on in ("cpu", "t4-16gb")]
    assert parts[0]["temporaries"] == parts[1]["temporaries"]
