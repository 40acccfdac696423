"""Plans that cut a step over ranks by more than its samples: tensors, the sequence, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.device.step import StepSettings
from batchwright.errors import CannotTraceError, InvalidInputError
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import Traced, trace_workload

WIDTH, LENGTH, RANKS = 64, 512, 4


def on_four(workload: bw.Workload, **settings: Any) -> Traced:
    card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
    return trace_workload(workload, 4, StepSettings(devices=RANKS, **settings), card=card)


def taken(traced: Traced, operator: str) -> list[int]:
    return [change for block, change in traced.log.changes if operator in block.operator and change > 0]


def workload(loss: Any, model: Any = lambda: nn.Linear(WIDTH, WIDTH)) -> bw.Workload:
    return bw.Workload(
        model=model,
        batch=lambda n: torch.randn(n, LENGTH, WIDTH),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        wrap=lambda model: model,
    )


def test_a_collective_that_was_waited_for_is_the_tensor_it_was() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        group: Any = dist.group.WORLD
        return all_reduce(model(batch).detach(), "sum", group).sum() * 0 + model(batch).mean()

    traced = on_four(workload(loss))
    assert taken(traced, "all_reduce")
    assert not taken(traced, "wait_tensor")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class TestContextParallel:
    @staticmethod
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        mesh = init_device_mesh("cuda", (RANKS,))
        with context_parallel(mesh, buffers=[batch], buffer_seq_dims=[1]):
            yield model(batch).square().mean()

    def test_each_rank_attends_to_its_part_and_backward_runs_inside(self) -> None:
        attend = F.scaled_dot_product_attention
        cut, whole = (
            max(taken(on_four(workload(loss, Attention)), "addmm"))
            for loss in (self.loss, lambda model, batch: model(batch).square().mean())
        )
        assert cut == whole // RANKS
        assert F.scaled_dot_product_attention is attend

    def test_an_error_in_the_step_ends_it_too(self) -> None:
        attend = F.scaled_dot_product_attention

        def loss(model: nn.Module, batch: torch.Tensor) -> Any:
            for value in self.loss(model, batch):
                yield value.expand(2)

        with pytest.raises(InvalidInputError, match="scalar"):
            on_four(workload(loss, Attention))
        assert F.scaled_dot_product_attention is attend

    def test_a_loss_that_is_yielded_twice(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> Any:
            yield model(batch).mean()
            yield model(batch).mean()

        with pytest.raises(InvalidInputError, match="yielded twice"):
            bw.estimate(workload(loss), on="cpu")

    def test_a_loss_that_is_yielded_needs_no_ranks(self) -> None:
        def yielding(model: nn.Module, batch: torch.Tensor) -> Any:
            yield model(batch).mean()

        returning = workload(lambda model, batch: model(batch).mean())
        assert bw.estimate(replace(returning, loss=yielding), on="cpu").peak == bw.estimate(returning, on="cpu").peak


EXPERTS, CHOSEN = 8, 2


class Experts(nn.Module):
    """Tokens travel to the rank of their expert; how many arrive is told by the ranks they come from."""

    def __init__(self, *, by_bins: bool) -> None:
        super().__init__()
        self.router, self.by_bins = nn.Linear(WIDTH, EXPERTS), by_bins
        self.up = nn.Parameter(torch.randn(EXPERTS // RANKS, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        _, choice = torch.topk(self.router(x), CHOSEN, dim=-1)
        if self.by_bins:
            counts = torch.bincount(choice.flatten(), minlength=EXPERTS)
        else:
            counts = torch.histc(choice.flatten().float(), bins=EXPERTS, min=0, max=EXPERTS).long()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = counts.view(RANKS, -1).sum(1).tolist(), arriving.view(RANKS, -1)
        order = choice.flatten().argsort()
        group: Any = dist.group.WORLD
        tokens = all_to_all_single_autograd(x[order // CHOSEN], received.sum(1).tolist(), sent, group)
        pieces = tokens.split(received.sum(0).tolist())
        return torch.cat([(piece @ weight).relu() for piece, weight in zip(pieces, self.up, strict=True)])


class TestExpertParallel:
    @pytest.mark.parametrize("by_bins", [False, True])
    def test_tokens_are_spread_evenly_and_the_answer_says_so(self, by_bins: bool) -> None:
        traced = on_four(workload(lambda model, batch: model(batch).mean(), lambda: Experts(by_bins=by_bins)))
        tokens = 4 * LENGTH * CHOSEN
        assert tokens // EXPERTS * RANKS * WIDTH * 4 in taken(traced, "relu")
        assert traced.routing == "balanced"

    def test_at_worst_all_ranks_send_all_to_one(self) -> None:
        traced = on_four(
            workload(lambda model, batch: model(batch).mean(), lambda: Experts(by_bins=False)), routing="worst"
        )
        assert 4 * LENGTH * CHOSEN * RANKS * WIDTH * 4 in taken(traced, "relu")


class TestBadInput:
    """Plans that PyTorch itself refuses, on real ranks too: its words, the user's line, and what runs."""

    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]

    @staticmethod
    def cut(plan: dict[str, Any], size: int = RANKS) -> Any:
        return lambda model: parallelize_module(model, init_device_mesh("cuda", (size,)), plan)

    def asked(self, wrap: Any, **fields: Any) -> bw.Workload:
        return replace(workload(lambda model, batch: model(batch).mean(), self.Feed), wrap=wrap, **fields)

    @pytest.mark.parametrize(
        ("plan", "size", "words"),
        [
            ({"up": ColwiseParallel(), "down": RowwiseParallel()}, RANKS, r"(?s)_foreach_.*mixed.*foreach=False"),
            ({"up": ColwiseParallel(use_local_output=False)}, RANKS, r"(?s)addmm.*mixed.*use_local_output=True"),
            ({"norm": ColwiseParallel()}, RANKS, r"(?s)only support nn\.Linear.*test_parallel_plans.*SequenceParallel"),
            ({"up": ColwiseParallel()}, 2 * RANKS, r"(?s)not be bigger.*test_parallel_plans.*devices="),
        ],
    )
    def test_it_is_told_what_runs(self, plan: dict[str, Any], size: int, words: str) -> None:
        with pytest.raises(CannotTraceError, match=words):
            on_four(self.asked(self.cut(plan, size)))

    def test_what_the_message_says_runs(self) -> None:
        feed = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
        clipped = on_four(self.asked(self.cut({"norm": SequenceParallel(), **feed})), clip_norm=1.0)
        assert taken(clipped, "_foreach_norm")
        one_by_one = self.asked(
            self.cut({"up": ColwiseParallel(), "down": RowwiseParallel()}),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
        )
        assert on_four(one_by_one).on_card[0].allocated

    def test_a_mistake_of_the_users_keeps_its_words(self) -> None:
        with pytest.raises(RuntimeError, match="same reduction dim") as raised:
            on_four(self.asked(self.cut({"up": ColwiseParallel()})))
        assert not isinstance(raised.value, CannotTraceError)
