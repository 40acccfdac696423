"""What a trace writes down of each operator: FLOPs as torch counts them, bytes, kernels, formats and layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.device.step import StepSettings
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import trace_workload

if TYPE_CHECKING:
    from batchwright.trace.work import StepWork


def work_of(workload: bw.Workload, size: int = 4, *, on: str = "a100-40gb", **settings: Any) -> StepWork:
    card = None if on == "cpu" else SimulatedCard(find_card(on), is_roomy=True)
    traced = trace_workload(workload, size, StepSettings(**settings), card=card)
    assert traced.work is not None
    return traced.work


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.groups = nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.point = nn.Conv2d(16, 8, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.point(self.depth(self.groups(self.first(x).relu())))).relu()
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def conv_net(**changes: Any) -> bw.Workload:
    return replace(
        bw.Workload(
            model=ConvNet,
            batch=lambda n: (torch.zeros(n, 3, 16, 16), torch.zeros(n, dtype=torch.int64)),
            loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        ),
        **changes,
    )


@pytest.mark.parametrize("on", ["a100-40gb", "cpu"])
def test_flops_are_those_of_torchs_own_counter(on: str) -> None:
    model = ConvNet()
    counter: Any = FlopCounterMode(display=False)
    with counter:
        x = torch.zeros(4, 3, 16, 16)
        model(x).sum().backward()
    # torch takes a grouped convolution's backward for a dense one: only the others are compared.
    step = work_of(conv_net(), on=on)
    ours = sum(work.flops for work in step.entries if work.kind not in ("grouped", "depthwise"))
    grouped = {kind: [w.flops for w in step.entries if w.kind == kind] for kind in ("grouped", "depthwise")}
    forward = 4 * 256 * 16 * 2 * 9
    assert grouped == {"grouped": [forward * 4] * 3, "depthwise": [forward] * 3}
    dense = (
        sum(
            flops
            for name, flops in counter.get_flop_counts()["Global"].items()
            if str(name) in ("aten.addmm", "aten.mm", "aten.convolution")
        )
        - 5 * forward
    )
    backward_of_dense = 4 * 256 * 2 * (27 * 16 + 2 * 16 * 8)
    assert ours == dense + backward_of_dense


def test_a_step_is_written_down_whole_and_once() -> None:
    step = work_of(conv_net())
    phases = Counter(work.phase for work in step.entries)
    assert set(phases) == {"batch", "forward", "backward", "optimizer"}
    kinds = Counter(work.kind for work in step.entries if work.phase == "forward")
    assert kinds["winograd"] == kinds["grouped"] == kinds["depthwise"] == kinds["pointwise"] == 1
    assert kinds["matmul"] == kinds["softmax"] == 1
    # the bias of a convolution is added by a kernel of its own, and summed up by one
    biases = [work for work in step.entries if "(bias)" in work.operator]
    assert [work.kind for work in biases] == ["elementwise", "reduce"]
    assert {module for module in step.modules if module} >= {"first", "groups", "depth", "point", "norm", "head"}
    assert all(work.kind == "upload" for work in step.entries if work.phase == "batch")


def test_optimizers_are_as_many_kernels_as_torch_launches() -> None:
    def num_kernels(**options: Any) -> int:
        workload = conv_net(optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, **options))
        return sum(work.kernels for work in work_of(workload).entries if work.phase == "optimizer")

    fused, multi, looped = num_kernels(fused=True), num_kernels(foreach=True), num_kernels(foreach=False)
    assert fused < 4 < multi < 20 < looped


def test_formats_and_layouts() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return functional.cross_entropy(model(batch[0]), batch[1])

    def batch(n: int) -> Any:
        images = torch.zeros(n, 3, 16, 16).contiguous(memory_format=torch.channels_last)
        return images, torch.zeros(n, dtype=torch.int64)

    step = work_of(conv_net(loss=loss, batch=batch))
    assert {w.number_format for w in step.entries if w.flops} == {"fp16"}
    assert {w.layout for w in step.entries if w.kind in ("winograd", "grouped", "depthwise")} == {"nhwc"}
    plain = work_of(conv_net())
    assert {w.number_format for w in plain.entries if w.layout} == {"tf32"}, "cuDNN may use TF32, unless told otherwise"
    assert {w.number_format for w in plain.entries if w.kind == "matmul"} == {"fp32"}


def test_attention_takes_the_cards_kernel_and_counts_the_causal_half() -> None:
    def step_on(card: str, *, is_causal: bool) -> StepWork:
        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            heads = model(x).view(len(x), 32, 4, 16).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal).float().mean()

        workload = bw.Workload(
            model=lambda: nn.Linear(64, 64).half(),
            batch=lambda n: torch.zeros(n, 32, 64, dtype=torch.float16),
            loss=loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        return work_of(workload, 2, on=card)

    full, half = (step_on("a100-40gb", is_causal=is_causal) for is_causal in (False, True))
    (forward,) = [work for work in full.entries if work.kind == "attention"]
    (backward,) = [work for work in full.entries if work.kind == "attention_backward"]
    assert forward.flops == 4 * 2 * 4 * 32 * 32 * 16
    assert (forward.layout, backward.flops) == ("flash", forward.flops * 5 // 2)
    assert [work.flops for work in half.entries if work.kind == "attention"] == [forward.flops // 2]
    assert "efficient" in {work.layout for work in step_on("t4-16gb", is_causal=True).entries}


def test_work_at_a_third_size_lies_on_the_line() -> None:
    small, large, asked = (work_of(conv_net(), size) for size in (3, 5, 11))
    assert small.scaled(large, 3, 5, 11) == asked
    inference = work_of(conv_net(optimizer=None, loss=lambda model, batch: model(batch[0]).sum()), 5)
    assert small.scaled(inference, 3, 5, 11) is None


def test_ranks_send_each_bucket_once_and_only_where_gradients_are_synchronized() -> None:
    spread = conv_net(wrap=lambda model: DistributedDataParallel(model))
    step = work_of(spread, devices=2)
    sent = [work for work in step.entries if work.kind == "all_reduce"]
    assert sum(work.read_bytes for work in sent) == 4 * sum(p.numel() for p in ConvNet().parameters())
    assert {work.phase for work in sent} == {"backward"}
    assert [work for work in work_of(conv_net()).entries if work.kind == "all_reduce"] == []


def test_shards_are_gathered_and_scattered() -> None:
    def shard(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        sharded: Any = fully_shard(model)
        whole: nn.Module = sharded
        return whole

    kinds = Counter(work.kind for work in work_of(conv_net(wrap=shard), devices=4).entries)
    assert kinds["all_gather"] >= 1
    assert kinds["reduce_scatter"] == 1


@pytest.mark.parametrize("on", ["a100-40gb", "cpu"])
def test_recurrent_layers_count_what_the_library_computes(on: str) -> None:
    workload = bw.Workload(
        model=lambda: nn.LSTM(8, 16, num_layers=2, batch_first=True),
        batch=lambda n: torch.zeros(n, 5, 8),
        loss=lambda model, x: model(x)[0].mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    step = work_of(workload, 3, on=on)
    weights = 4 * 16 * (8 + 16) + 4 * 16 * (16 + 16)
    assert sum(work.flops for work in step.entries if work.kind == "recurrent") == 3 * 2 * 3 * 5 * weights


def test_inference_is_a_step_of_its_own() -> None:
    step = work_of(conv_net(optimizer=None, loss=lambda model, batch: model(batch[0]).sum()))
    assert {work.phase for work in step.entries} == {"batch", "forward"}
    assert step.flops == sum(work.flops for work in work_of(conv_net()).entries if work.phase == "forward")
    trained = work_of(conv_net(evaluate=lambda model, batch: model(batch[0])))
    assert "evaluate" not in {work.phase for work in trained.entries}
