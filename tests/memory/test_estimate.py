"""`estimate`: what grows, the largest micro-batch for a budget, and what each change would save."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchwright as bw
from batchwright.device.step import StepSettings
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.memory.breakdown import SHARDS, EightBitAdam, break_down, part_of
from batchwright.memory.estimate_result import PARTS
from batchwright.trace.run import trace_workload
from tests.device.workloads import make_linear, make_mlp, make_transformer, mean_square

if TYPE_CHECKING:
    from batchwright.trace.storages import Log

STEADY = ("weights", "gradients", "optimizer")


def make_bigram(**changes: Any) -> bw.Workload:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 1000, bias=False))

    return make_transformer(**{"model": build, **changes})


def traced_peak(workload: bw.Workload, micro_batch: int, **settings: Any) -> int:
    return break_down(trace_workload(workload, micro_batch, StepSettings(**settings)).log).peak_bytes


class TestTheAnswer:
    def test_the_parts_sum_to_the_peak_and_the_peak_is_within_the_upper_bound(self) -> None:
        found = bw.estimate(make_mlp(), micro_batch=64)
        assert sum(num_bytes or 0 for num_bytes in found.parts.values()) == found.peak
        assert found.upper_bytes.allocated is not None
        assert found.peak <= found.upper_bytes.allocated <= 1.02 * found.peak

    def test_it_is_the_peak_of_the_trace_at_that_size(self) -> None:
        found = bw.estimate(make_mlp(), micro_batch=64, accumulation=2, clip_norm=1.0)
        assert found.peak == traced_peak(make_mlp(), 64, accumulation=2, clip_norm=1.0)

    def test_what_a_host_has_not_is_none_and_what_is_not_there_is_zero(self) -> None:
        found = bw.estimate(make_mlp(optimizer=None), micro_batch=4)
        assert tuple(found.parts) == PARTS
        assert (found.parts["slack"], found.parts["context"]) == (None, None)
        assert (found.parts["gradients"], found.parts["optimizer"]) == (0, 0)
        assert (found.peak_bytes.reserved, found.peak_bytes.device) == (None, None)

    def test_the_largest_owners_come_first_and_are_at_most_ten(self) -> None:
        largest = bw.estimate(make_transformer(), micro_batch=4).largest
        assert len(largest) == 10
        assert [o.num_bytes for o in largest] == sorted((o.num_bytes for o in largest), reverse=True)

    def test_the_phases_come_in_their_order_and_hold_the_peak(self) -> None:
        found = bw.estimate(make_mlp(evaluate=lambda model, batch: model(batch)), micro_batch=4)
        assert [p.phase for p in found.phases] == ["build", "batch", "forward", "backward", "optimizer", "evaluate"]
        assert max(p.peak_bytes for p in found.phases) == found.peak

    def test_a_shape_goes_to_the_batch(self) -> None:
        found = bw.estimate(make_bigram(), micro_batch=8, shape={"seq_len": 100})
        assert found.parts["inputs"] == 8 * 100 * 8

    def test_as_data_it_is_json_with_the_keys_agreed(self) -> None:
        data = json.loads(json.dumps(bw.estimate(make_mlp(), micro_batch=4).to_dict()))
        assert data["schema"] == 1
        assert data["source"] == "predicted"
        assert data["peak_bytes"] == {"allocated": data["peak_bytes"]["allocated"], "reserved": None, "device": None}

    def test_it_shows_itself_in_a_notebook(self) -> None:
        html = bw.estimate(make_mlp(), micro_batch=4)._repr_html_()
        assert "<table" in html
        assert "activations" in html or "weights" in html

    def test_progress_is_told(self) -> None:
        told: list[str] = []
        bw.estimate(make_linear(), micro_batch=4, progress=told.append)
        assert told == ["tracing micro-batch 4", "tracing micro-batch 8"]

    def test_a_mistake_in_the_step_is_not_logged_by_torch_as_well(self, capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(RuntimeError, match="same reduction dim"):
            bw.estimate(make_mlp(batch=lambda n: torch.randn(n, 255)), micro_batch=4)
        assert capfd.readouterr().err == ""
        assert not logging.getLogger("torch._subclasses.fake_tensor").disabled

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"on": "moon"}, "no device and no card is called 'moon'; this machine has: cpu"),
            ({"micro_batch": 0}, "micro-batch must be a whole number"),
            ({"accumulation": 0}, "accumulation must be a whole number"),
            ({"memory": "lots"}, "such as 24GiB, 24GB or 24g; received 'lots'."),
            ({"routing": "even"}, "routing must be one of balanced, worst"),
            ({"shape": {"depth": 3}}, "cannot be called with depth; besides the number of samples it takes seq_len."),
        ],
    )
    def test_what_cannot_be_asked_is_refused(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidInputError) as refused:
            bw.estimate(make_bigram(), **options)
        assert said in str(refused.value)


class TestWhatGrows:
    def test_weights_gradients_and_state_are_fixed_and_activations_grow_in_proportion(self) -> None:
        small, large = (bw.estimate(make_mlp(), micro_batch=n) for n in (2048, 4096))
        assert [small.grows_with_batch[part] for part in STEADY] == [0, 0, 0]
        for part in ("activations", "temporaries", "inputs"):
            growth, before, after = small.grows_with_batch[part], small.parts[part], large.parts[part]
            assert growth is not None
            assert before is not None
            assert after is not None
            assert growth > 0
            assert after - before == 2048 * growth
            assert before == pytest.approx(2048 * growth, abs=64), "in proportion: twice the samples, twice the bytes"

    def test_nothing_grows_where_the_peak_is_the_optimizer_step(self) -> None:
        # At two samples the peak of this model moves to backward, where there are no gradients yet.
        found = bw.estimate(make_transformer(), micro_batch=1)
        assert found.peak_at is not None
        assert found.peak_at.phase == "optimizer"
        assert {growth for growth in found.grows_with_batch.values() if growth is not None} == {0}

    def test_growth_adds_up_to_that_of_the_peak(self) -> None:
        found = bw.estimate(make_mlp(), micro_batch=4096)
        growth = sum(n or 0 for n in found.grows_with_batch.values())
        assert traced_peak(make_mlp(), 8192) - found.peak == pytest.approx(4096 * growth, abs=4096)

    def test_a_convolution_that_takes_another_path_with_one_image_has_fixed_weights(self) -> None:
        def build() -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

        found = bw.estimate(make_linear(model=build, batch=lambda n: torch.randn(n, 3, 16, 16)), micro_batch=1)
        assert (found.grows_with_batch["weights"], found.grows_with_batch["optimizer"]) == (0, 0)
        assert (found.grows_with_batch["inputs"] or 0) > 0

    @pytest.mark.parametrize(("num_samples", "grows"), [(6, True), (4, True), (1, False)])
    def test_a_dataset_is_never_asked_for_more_than_it_has(self, num_samples: int, grows: bool) -> None:
        workload = make_mlp(batch=None, data=[torch.zeros(256)] * num_samples)
        found = bw.estimate(workload, micro_batch=min(4, num_samples))
        assert (found.grows_with_batch["weights"] == 0) is grows
        assert (found.grows_with_batch["weights"] is None) is not grows


class TestMax:
    @pytest.mark.parametrize("memory", [9_000_000, 9_600_000, "12MiB"])
    def test_the_answer_fits_and_one_more_does_not(self, memory: str | int) -> None:
        found = bw.estimate(make_mlp(), memory=memory)
        limit = found.limit_bytes
        assert limit is not None
        assert found.max_micro_batch == found.micro_batch
        assert found.peak == traced_peak(make_mlp(), found.micro_batch) <= limit
        assert traced_peak(make_mlp(), found.micro_batch + 1) > limit

    @pytest.mark.slow
    def test_it_agrees_with_tracing_every_size(self) -> None:
        peaks = {n: traced_peak(make_linear(), n) for n in range(1, 41)}
        for limit in (500, 777, 1500, 2000):
            fitting = [n for n, peak in peaks.items() if peak <= limit]
            assert bw.estimate(make_linear(), memory=limit).max_micro_batch == max(fitting) < 40

    def test_a_dataset_bounds_it(self) -> None:
        workload = make_linear(batch=None, data=[torch.zeros(8)] * 5)
        assert bw.estimate(workload, memory="1GiB").max_micro_batch == 5

    def test_without_a_budget_there_is_no_largest(self) -> None:
        found = bw.estimate(make_linear(), micro_batch=4)
        assert (found.max_micro_batch, found.limit_bytes) == (None, None)

    def test_where_nothing_fits_the_error_has_the_numbers_and_the_parts(self) -> None:
        with pytest.raises(NothingFitsError) as refused:
            bw.estimate(make_mlp(), memory="4MiB")
        first, needed, remedy = str(refused.value).splitlines()
        assert first == "micro-batch 1 does not fit into 4 MiB."
        assert needed.startswith(
            "  needed 8.14 MiB: optimizer 3.07 MiB, temporaries 2 MiB, weights 1.54 MiB, gradients"
        )
        assert "what_if=True" in remedy


class Block(nn.Module):
    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.layers, x, use_reentrant=False) if self.is_checkpointed else self.layers(x)
        return out


def make_stack(*, is_checkpointed: bool = False) -> bw.Workload:
    def build() -> nn.Module:
        return nn.Sequential(*(Block(is_checkpointed=is_checkpointed) for _ in range(6)))

    return make_linear(model=build, batch=lambda n: torch.randn(n, 64), optimizer=lambda p: torch.optim.AdamW(p))


def what_if(workload: bw.Workload, micro_batch: int, **options: Any) -> dict[str, int | None]:
    found = bw.estimate(workload, micro_batch=micro_batch, what_if=True, **options)
    return {"plain": found.peak, **{saving.change: saving.peak_bytes for saving in found.savings}}


@pytest.mark.slow
def test_no_change_of_a_transformer_at_a_large_batch_costs_more() -> None:
    peaks = what_if(make_transformer(), 64)
    assert set(peaks) == {
        "plain",
        "bf16 autocast",
        "activation checkpointing",
        "8-bit optimizer",
        "half the sequence",
        "loss in 8 chunks",
        *(f"ZeRO-{stage} over 8 devices" for stage in (1, 2, 3)),
    }
    plain = peaks.pop("plain")
    assert plain is not None
    for change, peak in peaks.items():
        assert peak is not None, change
        assert peak < plain, change


class TestWhatIf:
    @pytest.mark.slow
    def test_checkpointing_is_the_trace_of_a_model_checkpointed_by_hand(self) -> None:
        by_hand = traced_peak(make_stack(is_checkpointed=True), 512)
        assert what_if(make_stack(), 512)["activation checkpointing"] == pytest.approx(by_hand, rel=0.01)
        assert by_hand < traced_peak(make_stack(), 512) / 1.5

    def test_half_the_sequence_is_the_trace_at_half_the_length(self) -> None:
        peaks = what_if(make_bigram(), 8, shape={"seq_len": 64})
        assert peaks["half the sequence"] == traced_peak(make_bigram(), 8, shape={"seq_len": 32})

    def test_autocast_is_the_trace_of_a_loss_under_autocast(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return mean_square(model, batch)

        assert what_if(make_mlp(), 512)["bf16 autocast"] == traced_peak(make_mlp(loss=loss), 512)

    def test_changes_are_traced_as_the_plain_step_was(self) -> None:
        peaks = what_if(make_mlp(), 512, accumulation=3)
        assert peaks["8-bit optimizer"] == traced_peak(make_mlp(optimizer=EightBitAdam), 512, accumulation=3)

    def test_zero_leaves_an_eighth_of_what_it_shards(self) -> None:
        log, peaks = trace_workload(make_mlp(), 64).log, what_if(make_mlp(), 64)
        for stage, parts in ((1, STEADY[2:]), (2, STEADY[1:]), (3, STEADY)):
            assert peaks[f"ZeRO-{stage} over 8 devices"] == pytest.approx(shard(log, parts), abs=1)

    def test_eight_bit_state_is_two_bytes_a_parameter_and_a_scale_per_block(self) -> None:
        blocks = {b for b, _ in trace_workload(make_mlp(optimizer=EightBitAdam), 4, steps=1).log.changes}
        state = sum(b.num_bytes for b in blocks if part_of(b) == "optimizer")
        sizes = [p.numel() for p in make_mlp().model().parameters()]
        expected = sum(2 * n + 2 * 4 * -(-n // 256) if n >= 4096 else 2 * 4 * n for n in sizes)
        assert state == expected

    def test_a_change_that_cannot_be_made_says_why_and_the_others_are_answered(self) -> None:
        savings = bw.estimate(make_mlp(), micro_batch=64, what_if=True).savings
        reasons = {saving.change: saving.note for saving in savings if saving.peak_bytes is None}
        assert reasons == {
            "activation checkpointing": "the model has no list of layers of one kind to checkpoint",
            "half the sequence": "batch takes no length (such as seq_len=1024) that could be halved",
            "loss in 8 chunks": "no softmax loss was seen in the step",
        }

    def test_a_live_module_is_not_rewired(self) -> None:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        kinds = [type(module) for module in model.modules()]
        savings = {s.change: s for s in bw.estimate(make_linear(model=model), what_if=True).savings}
        assert "a live module is not rewired" in savings["activation checkpointing"].note
        assert [type(module) for module in model.modules()] == kinds

    def test_inference_has_nothing_to_checkpoint_and_no_optimizer(self) -> None:
        savings = {s.change: s for s in bw.estimate(make_bigram(optimizer=None), what_if=True).savings}
        assert savings["8-bit optimizer"].note == "there is no optimizer"
        assert savings["activation checkpointing"].note == "there is no backward to recompute activations for"

    @pytest.mark.slow
    def test_a_model_of_transformers_is_checkpointed_by_its_own_switch(self) -> None:
        from tests.test_ready_made import gpt2

        workload = bw.Workload.from_transformers(gpt2(n_layer=2), seq_len=64)

        def build() -> nn.Module:
            model: nn.Module = workload.model()
            model.gradient_checkpointing_enable()  # type: ignore[operator]
            return model.train()

        by_hand = bw.Workload(build, loss=workload.loss, batch=workload.batch, optimizer=workload.optimizer)
        assert what_if(workload, 4)["activation checkpointing"] == traced_peak(by_hand, 4)

    def test_a_chunked_loss_saves_seven_eighths_of_the_logits_where_they_are_the_peak(self) -> None:
        workload = make_bigram(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        peaks = what_if(workload, 256)
        plain, chunked = peaks["plain"], peaks["loss in 8 chunks"]
        assert plain is not None
        assert chunked is not None
        logits = 256 * 32 * 1000 * 4
        assert plain - chunked == pytest.approx(7 / 8 * 3 * logits, rel=0.01), "the logits and two gradients of them"


def shard(log: Log, parts: tuple[str, ...]) -> float:
    """The slow way: every moment of the run with the sharded parts at an eighth."""
    now, highest = 0.0, 0.0
    for block, change in log.changes:
        now += change / SHARDS if part_of(block) in parts else change
        highest = max(highest, now)
    return highest


@pytest.mark.parametrize("given", ["train.py:workload", ["train.py"], None])
def test_what_is_no_workload_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="estimate takes a Workload; received"):
        bw.estimate(given, micro_batch=1)
