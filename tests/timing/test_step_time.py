"""Seconds of a step: they follow rates and sizes, have an interval, and are not given where nothing is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchwright.catalogue.speeds import find_speed
from batchwright.errors import InvalidInputError
from batchwright.timing.collectives import Network, collective_seconds, read_network
from batchwright.timing.constants import fitted_constants
from batchwright.timing.profile import Machine, Profile
from batchwright.timing.step_time import NoTime, StepTime, time_here, time_step
from batchwright.trace.work import StepWork, Work

A100 = find_speed("a100-40gb-sxm")


def product(size: int, **changes: Any) -> Work:
    num_bytes = 2 * size * size
    work = Work("aten.mm", "matmul", 2 * size**3, 2 * num_bytes, num_bytes, 1, "fp16", dims=(1, size, size, size))
    return work._replace(**changes)


def step_of(*work: Work) -> StepWork:
    return StepWork(work, tuple(f"layer{number}" for number in range(len(work))))


def timed(*work: Work, speed: Any = A100, **options: Any) -> StepTime:
    time = time_step(step_of(*work), speed, samples=8, **options)
    assert isinstance(time, StepTime)
    return time


def test_large_products_run_near_what_the_card_sustains() -> None:
    time = timed(*[product(8192)] * 50)
    assert time.bound_by == "flops"
    assert 0.5 < time.seconds * A100.sustained["fp16"] / time.flops < 1.6
    assert time.mfu is not None
    assert 0.4 < time.mfu < 0.87
    assert time.low < time.seconds < time.high


def test_small_kernels_are_bound_by_the_host_and_the_answer_says_what_helps() -> None:
    time = timed(*[product(64)] * 500)
    assert time.bound_by == "host"
    assert "torch.compile" in time.helps
    assert any("host" in reason for reason in time.unsure)


def test_element_wise_kernels_are_bound_by_memory() -> None:
    work = Work("aten.add", "elementwise", 0, 2 << 30, 1 << 30, 1, "fp16")
    time = timed(*[work] * 20)
    assert time.bound_by == "bytes"
    slower = replace(A100, memory=A100.memory / 2)
    assert timed(*[work] * 20, speed=slower).seconds == pytest.approx(2 * time.seconds, rel=0.05)


def test_a_step_that_is_hard_to_predict_has_a_wider_interval_and_says_why() -> None:
    plain = timed(*[product(8192)] * 10)
    hard = timed(*[product(8192, kind="grouped", layout="nhwc")] * 10)
    unseen = timed(*[product(8192)] * 10, speed=find_speed("rtx-4090-24gb"))
    assert plain.unsure == ()
    assert "grouped convolutions" in hard.unsure[0]
    assert "ada family" in unseen.unsure[0]
    assert all(t.high / t.seconds > plain.high / plain.seconds for t in (hard, unseen))


def test_a_format_that_the_card_has_not_is_no_time() -> None:
    answer = time_step(step_of(product(64, number_format="bf16")), find_speed("t4-16gb"), samples=1)
    assert isinstance(answer, NoTime)
    assert "t4-16gb has no bf16 arithmetic" in answer.reason
    falls_back = time_step(step_of(product(64, number_format="tf32")), find_speed("v100-32gb-sxm"), samples=1)
    assert isinstance(falls_back, StepTime)


def test_more_than_a_node_needs_a_network() -> None:
    reduce = Work("DDP bucket", "all_reduce", 0, 1 << 28, 0, 0, "fp32", phase="backward")
    answer = time_step(step_of(product(4096), reduce), A100, samples=8, devices=16)
    assert isinstance(answer, NoTime)
    assert "no network was named" in answer.reason
    by_network = timed(product(4096), reduce, devices=16, network=Network.parse("400Gb/s"))
    assert any("a model" in reason for reason in by_network.unsure)
    slower = timed(product(4096), reduce, devices=16, network=Network.parse("50GB/s, 2 ms"))
    assert 0.0015 < slower.seconds - by_network.seconds < 0.0025


@pytest.mark.parametrize("text", ["fast", "400", "0Gb/s", "400Gb/s,soon", "-1GB/s", "", ",", 400, None])
def test_a_network_is_a_bandwidth_and_a_latency(text: object) -> None:
    with pytest.raises(InvalidInputError, match="network is the bandwidth of one node, and its latency if known"):
        Network.parse(text)  # type: ignore[arg-type]


def test_a_network_within_one_node_joins_nothing() -> None:
    assert read_network("100Gbit/s", 16) == Network(12.5e9)
    with pytest.raises(InvalidInputError, match="one holds 8 devices"):
        read_network("100Gbit/s", 8)


def test_a_profile_of_ranks_has_their_collectives() -> None:
    curves = {"all_reduce": [(1e6, 1e-3), (1e9, 1.0)]}
    machine = Machine("any", 1, torch.__version__)
    profile = Profile(machine, {"elementwise": [(1e6, 1e-3)]}, {}, {"forward": 0.0}, ranks=4, collectives=curves)
    add = Work("aten.add", "elementwise", 0, 500_000, 500_000, 1, "fp32", phase="backward")
    reduce = Work("DDP bucket", "all_reduce", 0, 1 << 28, 0, 0, "fp32", phase="backward")
    step = step_of(add, reduce)
    alone, of_four = (time_here(step, profile, samples=8, devices=devices) for devices in (1, 4))
    assert isinstance(alone, StepTime)
    assert isinstance(of_four, StepTime)
    assert alone.waiting_seconds == 0.0
    assert of_four.seconds - alone.seconds == pytest.approx(of_four.waiting_seconds) == pytest.approx(0.268, rel=0.02)
    assert of_four.bound_by == "ranks"
    of_two = time_here(step, profile, samples=8, devices=2)
    assert isinstance(of_two, NoTime)
    assert "no collectives of 2 ranks" in of_two.reason


def test_what_is_reduced_hides_behind_the_rest_of_the_backward() -> None:
    update = Work("aten._foreach_add_", "optimizer", 0, 1 << 20, 1 << 20, 1, "fp32", phase="optimizer")
    sent = Work("DDP bucket", "all_reduce", 0, 1 << 26, 0, 0, "fp32", phase="backward")
    rest = [product(8192, phase="backward")] * 20
    early, late = timed(sent, *rest, update, devices=8), timed(*rest, sent, update, devices=8)
    assert early.waiting_seconds == pytest.approx(0.0, abs=1e-9)
    assert late.waiting_seconds == pytest.approx(collective_seconds("all_reduce", 1 << 26, 8, A100, None))
    assert timed(*rest, sent, update).waiting_seconds == 0.0


def test_the_costliest_operators_come_first_and_by_place() -> None:
    time = timed(product(1024), product(4096), product(2048))
    assert [entry.module for entry in time.costliest] == ["layer1", "layer2", "layer0"]
    assert time.to_dict()["samples_per_second"] == pytest.approx(8 / time.seconds)


def test_constants_survive_being_written() -> None:
    constants = fitted_constants()
    again = type(constants).from_dict(constants.to_dict())
    assert again.host_seconds == pytest.approx(constants.host_seconds)
    assert (again.efficiency, again.intervals) == (constants.efficiency, constants.intervals)
    assert again.efficiency_of(product(64)) == constants.efficiency_of(product(64))
