"""The host probe on real models: verdicts, peaks, and what is left behind."""

from __future__ import annotations

import gc
import json
import os
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from batchwright.device.host import HostDevice, _cgroups
from batchwright.device.outcome import is_out_of_memory
from batchwright.device.step import DEFAULT_STEPS, StepSettings
from batchwright.errors import InvalidInputError
from tests.device.workloads import make_linear, make_mlp, make_transformer, mean_square

if TYPE_CHECKING:
    from pathlib import Path


def peak_of(workload: Any, micro_batch: int, *, steps: int = DEFAULT_STEPS, **settings: Any) -> int:
    outcome = HostDevice().probe(workload, micro_batch, StepSettings(**settings), steps=steps)
    assert outcome.verdict == "fits", outcome.traceback
    assert outcome.peak_bytes is not None
    assert outcome.peak_bytes.allocated is not None
    return outcome.peak_bytes.allocated


class TestVerdicts:
    def test_fits(self) -> None:
        outcome = HostDevice().probe(make_transformer(), 2, StepSettings({"seq_len": 9}, accumulation=2))
        assert outcome.fits
        assert outcome.shape == {"seq_len": 9}
        assert outcome.step_seconds is not None
        assert 0 < outcome.step_seconds < outcome.seconds
        assert outcome.samples_per_second == pytest.approx(4 / outcome.step_seconds)
        assert json.loads(json.dumps(outcome.to_dict()))["outcome"] == "fits"

    @pytest.mark.parametrize("make", [make_mlp, pytest.param(make_transformer, marks=pytest.mark.slow)])
    def test_the_limit_is_exact(self, make: Any) -> None:
        needed = peak_of(make(), 16)
        assert HostDevice(limit_bytes=needed).probe(make(), 16).fits
        short = HostDevice(limit_bytes=needed - 1).probe(make(), 16)
        assert (short.verdict, short.rule) == ("out_of_memory", "counted-limit")
        assert short.samples_per_second is None
        assert short.exception is None

    def test_the_machine_itself_runs_out(self) -> None:
        outcome = HostDevice().probe(make_linear(batch=lambda n: torch.empty(n, 2**50)), 4)
        assert (outcome.verdict, outcome.rule) == ("out_of_memory", "cpu-allocator")
        assert "can't allocate memory" in (outcome.error or "")

    def test_users_mistake_is_failed_with_its_traceback(self) -> None:
        outcome = HostDevice().probe(make_linear(batch=lambda n: torch.randn(n, 9)), 4)
        assert outcome.verdict == "failed"
        assert outcome.rule is None
        assert "RuntimeError: mat1 and mat2 shapes" in (outcome.error or "")
        assert "in mean_square" in (outcome.traceback or "")
        assert isinstance(outcome.exception, RuntimeError)
        assert not is_out_of_memory(outcome.exception)

    def test_batch_norm_of_one_is_failed(self) -> None:
        workload = make_linear(model=lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
        outcome = HostDevice().probe(workload, 1)
        assert outcome.verdict == "failed"
        assert "more than 1 value per channel" in (outcome.error or "")

    def test_wrong_workload_is_raised_not_an_outcome(self) -> None:
        with pytest.raises(InvalidInputError, match="ignores its size"):
            HostDevice().probe(make_linear(batch=lambda n: torch.ones(3, 8)), 4)

    def test_interrupt_passes_through(self) -> None:
        def interrupt(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            HostDevice().probe(make_linear(loss=interrupt), 4)


class TestPeaks:
    def test_second_step_is_what_counts_with_adam(self) -> None:
        # Weights, gradients, two moments: the first step alone never holds its activations beside the moments.
        assert peak_of(make_mlp(), 512, steps=2) > peak_of(make_mlp(), 512, steps=1)
        assert peak_of(make_mlp(), 512, steps=3) == peak_of(make_mlp(), 512, steps=2)

    def test_inference_needs_less_than_training(self) -> None:
        assert peak_of(make_mlp(optimizer=None), 64) < peak_of(make_mlp(), 64) / 3

    def test_accumulation_costs_the_gradients_in_forward(self) -> None:
        # A large batch: the peak is in a forward and backward, which now runs beside gradients that are kept.
        twice = peak_of(make_mlp(), 1024, accumulation=2)
        assert twice > peak_of(make_mlp(), 1024)
        assert peak_of(make_mlp(), 1024, accumulation=4) == twice

    def test_generation_that_needs_more_decides_the_peak(self) -> None:
        def hoard(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return torch.cat([model(batch)] * 10_000)

        assert peak_of(make_mlp(generate=hoard), 8) > 10_000 * 8 * 16 * 4 > peak_of(make_mlp(), 8) / 4
        assert peak_of(make_mlp(generate=hoard), 8) > peak_of(make_mlp(), 8)

    def test_weights_of_a_live_model_count(self) -> None:
        build = make_mlp().model
        assert callable(build)
        live = build()
        assert isinstance(live, nn.Module)
        assert peak_of(make_mlp(model=live), 64) == pytest.approx(peak_of(make_mlp(), 64), rel=1e-3)

    def test_scaler_and_clipping_run(self) -> None:
        workload = make_mlp(scaler=lambda: torch.amp.GradScaler("cpu"))
        assert peak_of(workload, 8, clip_norm=1.0) >= peak_of(make_mlp(), 8)

    def test_several_optimizers(self) -> None:
        def two(params: Any) -> Any:
            held = list(params)
            return torch.optim.AdamW(held[:2]), torch.optim.SGD(held[2:])

        assert peak_of(make_mlp(optimizer=two), 8) < peak_of(make_mlp(), 8)


class TestNothingIsLeft:
    @pytest.mark.parametrize("failure", ["none", "memory", "mistake"])
    def test_the_model_is_gone_after_the_probe(self, failure: str) -> None:
        built: list[weakref.ref[nn.Module]] = []

        def build() -> nn.Module:
            model = nn.Linear(8, 1)
            built.append(weakref.ref(model))
            return model

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            if failure == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
            if failure == "mistake":
                raise LookupError("mine")
            return mean_square(model, batch)

        gc.collect()
        outcome = HostDevice().probe(make_linear(model=build, loss=loss), 4)

        assert outcome.verdict == {"none": "fits", "memory": "out_of_memory", "mistake": "failed"}[failure]
        assert built[0]() is None


class TestMemoryOfTheMachine:
    def test_free(self) -> None:
        free = HostDevice().free_bytes
        if free is None:
            pytest.skip("this system does not say how much memory it has")
        assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def test_no_more_is_free_than_the_limit(self) -> None:
        assert HostDevice(limit_bytes=1000).free_bytes == 1000

    def test_limits_of_cgroups_of_both_versions(self, tmp_path: Path) -> None:
        root, own = tmp_path / "cgroup", tmp_path / "self"
        group = root / "user" / "job"
        group.mkdir(parents=True)
        (group / "memory.max").write_text("max\n")
        (group / "memory.current").write_text("500\n")
        (root / "user" / "memory.max").write_text("4000\n")
        (root / "user" / "memory.current").write_text("900\n")
        own.write_text("0::/user/job\n")
        assert _cgroups(root, own) == [(4000, 900)]

        old = root / "memory" / "job"
        old.mkdir(parents=True)
        (old / "memory.limit_in_bytes").write_text("3000\n")
        (old / "memory.usage_in_bytes").write_text("100\n")
        (root / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
        own.write_text("5:cpu:/job\n3:memory:/job\n")
        assert _cgroups(root, own) == [(3000, 100)]
        assert _cgroups(root, tmp_path / "absent") == []
