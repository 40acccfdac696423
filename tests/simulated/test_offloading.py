"""What a step keeps on the host instead of the card: it takes nothing there, and the answer says how much it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.device.step import StepSettings
from batchwright.memory.breakdown import break_down
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import Traced, trace_workload

WIDTH, LAYERS, ROWS = 512, 3, 2048
WEIGHTS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
# Outputs of layers and of activation functions, which backward reads.
SAVED = 2 * LAYERS * ROWS * WIDTH * 4


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def traced(devices: int = 1, **fields: Any) -> Traced:
    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))),
        "batch": lambda n: torch.randn(n, WIDTH),
        "loss": mean_square,
        "optimizer": lambda params: torch.optim.AdamW(params),
    }
    card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
    return trace_workload(bw.Workload(**{**parts, **fields}), ROWS, StepSettings(devices=devices), card=card)


def part(run: Traced, name: str) -> int:
    return break_down(run.log).parts.get(name, 0)


def on_host(run: Traced) -> float:
    """What the answer says of the host, in MiB."""
    return next((float(note.split("up to ")[1].split(" MiB")[0]) for note in run.notes if "on the host" in note), 0.0)


def through_the_host(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return mean_square(model, batch)


def on_a_stream_of_its_own(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Activations leave and come back on a second stream, as trainers write it."""
    aside, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def pack(tensor: torch.Tensor) -> Any:
        if not tensor.is_cuda or isinstance(tensor, nn.Parameter):
            return tensor
        aside.wait_stream(main)
        with torch.cuda.stream(aside):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
            return kept.copy_(tensor, non_blocking=True)

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        if isinstance(kept, nn.Parameter):
            return kept
        with torch.cuda.stream(aside):
            tensor = kept.to("cuda", non_blocking=True)
        main.wait_stream(aside)
        tensor.record_stream(main)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return mean_square(model, batch)


class TestActivations:
    def test_they_are_on_the_card_as_a_rule_and_nothing_is_said_of_the_host(self) -> None:
        run = traced()
        assert part(run, "activations") >= SAVED
        assert not on_host(run)

    @pytest.mark.parametrize("loss", [through_the_host, on_a_stream_of_its_own])
    def test_those_that_are_sent_to_the_host_are_there(self, loss: Any) -> None:
        run = traced(loss=loss)
        assert part(run, "activations") < SAVED / 2
        assert SAVED <= on_host(run) * 2**20 <= 1.5 * SAVED + WEIGHTS


def test_sharded_weights_gradients_and_states_wait_on_the_host() -> None:
    def wrap(model: Any) -> nn.Module:
        for layer in model:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        whole: nn.Module = fully_shard(model, offload_policy=CPUOffloadPolicy())
        return whole

    run = traced(devices=4, wrap=wrap)
    assert part(run, "weights") == part(run, "optimizer") == 0
    # Weights, gradients and two states, of a quarter each.
    assert on_host(run) * 2**20 == pytest.approx(WEIGHTS, rel=0.3)


class OnHost:
    """An optimizer whose weights and states are the host's; it is none of torch's, and has no `state` of its own."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.own = [torch.empty_like(p, device="cpu", pin_memory=True) for p in self.params]
        self.inner = torch.optim.AdamW(self.own)
        self.param_groups = [{"params": self.params}]

    def step(self) -> None:
        for parameter, own in zip(self.params, self.own, strict=True):
            own.grad = parameter.grad.to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        self.inner.step()
        for parameter, own in zip(self.params, self.own, strict=True):
            parameter.data.copy_(own, non_blocking=True)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for parameter in (*self.params, *self.own):
            parameter.grad = None


def test_an_optimizer_on_the_host_takes_nothing_of_the_card() -> None:
    run = traced(optimizer=OnHost)
    assert part(run, "optimizer") == 0
    assert on_host(run) * 2**20 == pytest.approx(4 * WEIGHTS, rel=0.4)
