"""`estimate(on=...)`: three peaks of a card that is not there, does it fit, and which cards take a step."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.catalogue.cards import Card, context_of, find_card
from batchwright.errors import CannotTraceError, InvalidInputError, NothingFitsError
from batchwright.memory import estimate as every_card
from batchwright.memory import on_card
from batchwright.memory.estimate import estimate_every_card
from batchwright.memory.estimate_result import PARTS, EveryCard
from tests.device.workloads import make_linear, make_mlp, mean_square

CARD = "a100-40gb"
MIB = 2**20


def room(mib: int, card: str = CARD) -> int:
    """Bytes of a card that leave so much for PyTorch."""
    return context_of(find_card(card)).typical_bytes + mib * MIB


def make_wide(**changes: Any) -> bw.Workload:
    """1 MiB of weights, and 2 KiB per sample for input and output each: the answer is soon found."""
    return make_linear(
        **{"model": lambda: nn.Linear(512, 512, bias=False), "batch": lambda n: torch.randn(n, 512), **changes}
    )


class TestTheAnswer:
    def test_the_three_peaks_are_ordered_and_within_their_bounds(self) -> None:
        found = bw.estimate(make_mlp(), micro_batch=64, on=CARD)
        peak, upper = found.peak_bytes, found.upper_bytes
        assert peak.allocated is not None
        assert peak.reserved is not None
        assert peak.device is not None
        assert upper.allocated is not None
        assert upper.reserved is not None
        assert upper.device is not None
        assert 0 < peak.allocated <= peak.reserved <= peak.device
        assert (peak.allocated, peak.reserved, peak.device) <= (upper.allocated, upper.reserved, upper.device)
        assert peak.device - peak.reserved == context_of(find_card(CARD)).typical_bytes

    def test_the_parts_sum_to_what_the_device_shows(self) -> None:
        found = bw.estimate(make_mlp(), micro_batch=64, on=CARD)
        assert tuple(found.parts) == PARTS
        assert all(num_bytes is not None and num_bytes >= 0 for num_bytes in found.parts.values())
        assert sum(num_bytes or 0 for num_bytes in found.parts.values()) == found.peak_bytes.device

    def test_it_says_where_and_whether_it_fits(self) -> None:
        found = bw.estimate(make_mlp(), micro_batch=64, on="NVIDIA A100-SXM4-40GB")
        assert (found.on, found.fits, found.source) == (CARD, True, "predicted")
        assert (found.limit_bytes, found.max_micro_batch) == (find_card(CARD).total_bytes, None)

    def test_as_data_it_has_the_keys_of_any_estimate(self) -> None:
        on_card = json.loads(json.dumps(bw.estimate(make_linear(), on=CARD).to_dict()))
        on_host = bw.estimate(make_linear()).to_dict()
        assert list(on_card) == list(on_host)
        assert (on_card["fits"], on_host["fits"]) == (True, None)

    def test_it_shows_itself(self) -> None:
        html = bw.estimate(make_mlp(), on=CARD)._repr_html_()
        assert "context" in html

    def test_a_live_model_is_not_touched(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1)).eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = torch.get_rng_state()
        bw.estimate(make_linear(model=model), micro_batch=4, on=CARD, what_if=True)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert {(p.device.type, p.grad, p.requires_grad) for p in model.parameters()} == {("cpu", None, True)}
        assert not any(module.training for module in model.modules())
        assert torch.equal(torch.get_rng_state(), state)
        assert model(torch.ones(1, 8)).shape == (1, 1)

    def test_accumulation_and_clipping_cost_on_a_card_too(self) -> None:
        # Gradients live through the second forward only where there is one.
        plain = bw.estimate(make_wide(), micro_batch=4096, on=CARD).peak
        assert bw.estimate(make_wide(), micro_batch=4096, on=CARD, accumulation=2, clip_norm=1.0).peak > plain

    def test_inference_has_no_gradients(self) -> None:
        found = bw.estimate(make_mlp(optimizer=None), micro_batch=4, on=CARD)
        assert (found.parts["gradients"], found.parts["optimizer"]) == (0, 0)


class TestTheLargest:
    def test_it_fits_and_the_next_does_not(self) -> None:
        found = bw.estimate(make_wide(), on=CARD, memory=room(64), find_max=True)
        assert found.max_micro_batch == found.micro_batch > 1
        assert (found.fits, found.limit_bytes) == (True, room(64))
        for more, fits in ((0, True), (1, False)):
            other = bw.estimate(make_wide(), micro_batch=found.micro_batch + more, on=CARD, memory=room(64))
            assert other.fits is fits

    def test_it_is_no_more_than_the_data(self) -> None:
        data = [torch.ones(512) for _ in range(7)]
        assert bw.estimate(make_wide(batch=None, data=data), on=CARD, find_max=True).max_micro_batch == 7

    def test_where_nothing_fits_the_parts_are_told(self) -> None:
        with pytest.raises(NothingFitsError, match="micro-batch 1 does not fit on NVIDIA A100 40GB with 540 MiB") as no:
            bw.estimate(make_mlp(), on=CARD, memory="540MiB", find_max=True)
        assert "workspaces 16.2 MiB" in str(no.value)
        assert "context 530 MiB" in str(no.value)

    def test_less_memory_than_the_context_takes_is_no_room_at_all(self) -> None:
        with pytest.raises(NothingFitsError):
            bw.estimate(make_linear(), on=CARD, memory="100MiB", find_max=True)

    def test_where_it_does_not_fit_and_no_largest_was_asked_for_it_says_no(self) -> None:
        found = bw.estimate(make_mlp(), on=CARD, memory="540MiB")
        assert (found.fits, found.max_micro_batch, found.limit_bytes) == (False, None, 540 * MIB)


class TestTheAllocatorsSettings:
    def test_they_change_what_is_reserved_not_what_is_allocated(self) -> None:
        def grown(allocator: str | None) -> bw.Estimate:
            # Each layer a little wider than the one before, so that nothing freed is of use to it.
            def build() -> nn.Module:
                widths = [512 + 64 * n for n in range(8)]
                return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])

            return bw.estimate(make_wide(model=build), micro_batch=8192, on=CARD, allocator=allocator)

        plain, expandable = grown(None), grown("expandable_segments:True")
        assert plain.peak_bytes.reserved is not None
        assert expandable.peak_bytes.reserved is not None
        assert expandable.peak_bytes.reserved < plain.peak_bytes.reserved
        assert expandable.peak <= plain.peak

    def test_beyond_a_fraction_of_the_card_it_does_not_fit(self) -> None:
        told: dict[str, Any] = {"micro_batch": 2**17, "on": CARD, "memory": "4GiB"}
        assert bw.estimate(make_wide(), **told).fits is True
        assert bw.estimate(make_wide(), **told, allocator="per_process_memory_fraction:0.25").fits is False

    def test_one_that_pytorch_does_not_know_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="'wings' is no option of PyTorch's CUDA allocator"):
            bw.estimate(make_linear(), on=CARD, allocator="wings:True")

    def test_they_need_a_card(self) -> None:
        with pytest.raises(InvalidInputError, match="they need a card"):
            bw.estimate(make_linear(), allocator="expandable_segments:True")


class TestNames:
    @pytest.mark.parametrize(
        ("on", "said"),
        [
            ("a100-50gb", "no device and no card is called 'a100-50gb'; this machine has: cpu"),
            ("a100-50gb", "a100-80gb, a100-40gb"),
            ("a100", "a100-40gb or a100-80gb"),
            ("cuda", "cuda is a device of this machine, and an estimate runs nothing on it"),
            ("cuda:1", "a card by name; or bw.fit, which runs the step for real"),
            ("mps", "mps is a device of this machine"),
        ],
    )
    def test_what_is_no_card_is_explained(self, on: str, said: str) -> None:
        with pytest.raises(InvalidInputError) as wrong:
            bw.estimate(make_linear(), on=on)
        assert said in str(wrong.value)


class TestWhatIf:
    def test_each_change_is_traced_on_the_card(self) -> None:
        layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
        workload = make_wide(model=lambda: nn.Sequential(*layers), optimizer=lambda p: torch.optim.AdamW(p))
        found = bw.estimate(workload, micro_batch=4096, on=CARD, what_if=True)
        savings = {saving.change: saving.peak_bytes for saving in found.savings}
        for change in ("bf16 autocast", "activation checkpointing", "8-bit optimizer", "ZeRO-3 over 8 devices"):
            peak = savings[change]
            assert peak is not None
            assert 0 < peak < found.peak, change

    def test_a_step_that_names_cuda_is_changed_too(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return mean_square(model, batch) + torch.zeros(1, device="cuda").sum()

        found = bw.estimate(make_wide(loss=loss), micro_batch=4096, on=CARD, what_if=True)
        assert {s.change for s in found.savings if s.peak_bytes is not None} >= {"bf16 autocast", "8-bit optimizer"}


@pytest.fixture(scope="module")
def found() -> EveryCard:
    """What three cards say to 900 samples of 2 MiB."""

    def three() -> tuple[Card, ...]:
        return tuple(find_card(name) for name in ("h100-80gb", "t4-16gb", "rtx-3070-8gb"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(every_card, "all_cards", three)
        return estimate_every_card(make_wide(batch=lambda n: torch.randn(n, 2**10, 512)), micro_batch=900)


class TestEveryCard:
    def test_the_smallest_that_takes_the_step_comes_first(self, found: EveryCard) -> None:
        assert [(row.card, row.fits) for row in found.rows] == [
            ("t4-16gb", True),
            ("h100-80gb", True),
            ("rtx-3070-8gb", False),
        ]
        assert found.fits

    def test_each_row_agrees_with_an_estimate_for_that_card(self, found: EveryCard) -> None:
        for row in found.rows:
            largest = row.max_micro_batch
            assert largest is not None
            assert (largest >= 900) is row.fits
            assert row.total_bytes == find_card(row.card).total_bytes
            workload = make_wide(batch=lambda n: torch.randn(n, 2**10, 512))
            one = bw.estimate(workload, micro_batch=900, on=row.card)
            assert (one.fits, one.peak_bytes.device) == (row.fits, row.device_bytes)
            assert bw.estimate(workload, micro_batch=largest, on=row.card).fits

    def test_as_data_and_as_a_table(self, found: EveryCard) -> None:
        data = json.loads(json.dumps(found.to_dict()))
        assert (data["schema"], data["source"], data["micro_batch"]) == (1, "predicted", 900)
        assert set(data["rows"][0]) == {"card", "total_bytes", "fits", "device_bytes", "max_micro_batch", "time"}
        assert "h100-80gb" in found._repr_html_()

    def test_where_not_even_one_runs_there_is_no_largest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(every_card, "all_cards", lambda: (find_card("rtx-3070-8gb"),))
        # By its weights, which are never made; batches are.
        found = estimate_every_card(make_wide(model=lambda: nn.Linear(512, 2**23, bias=False)))
        assert [(row.fits, row.max_micro_batch) for row in found.rows] == [(False, None)]
        assert not found.fits


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor, as it is imported
def test_a_model_compiled_with_graphs_is_refused() -> None:
    workload = bw.Workload(
        model=lambda: torch.compile(nn.Linear(4, 4), mode="reduce-overhead"),  # type: ignore[arg-type, return-value]
        batch=lambda n: torch.randn(n, 4),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda params: torch.optim.SGD(params),
    )
    with pytest.raises(CannotTraceError, match="compiled with CUDA graphs"):
        bw.estimate(workload, on=CARD)


@pytest.mark.parametrize(
    ("accelerator", "product", "expected"),
    [
        ("cpu", "", ("cpu", "")),
        ("cuda", "NVIDIA A100-SXM4-40GB", ("a100-40gb", "")),
        ("cuda", "NVIDIA Nothing 9000", ("cpu", "predicted for the CPU: the catalogue does not have this machine's")),
        ("mps", "", ("cpu", "predicted for the CPU: the catalogue does not have this machine's")),
    ],
)
def test_without_a_name_the_card_of_the_machine_is_simulated(
    accelerator: str, product: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_card, "default_device", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: product)
    place, note = on_card.default_place()
    assert (place, note[: len(expected[1])]) == expected


@pytest.mark.parametrize("on", ["cpu", "a100-40gb"])
def test_data_that_ends_the_search_is_named_and_the_budget_is_not_blamed(on: str) -> None:
    workload = bw.Workload(
        model=lambda: torch.nn.Linear(8, 1),
        data=torch.utils.data.TensorDataset(torch.ones(64, 8)),
        loss=lambda model, batch: model(batch[0]).pow(2).mean(),
        optimizer=torch.optim.SGD,
    )
    by_data = bw.estimate(workload, on=on, memory="30GiB", find_max=True)
    assert (by_data.max_micro_batch, by_data.max_limited_by) == (64, "data")
    assert "the data has no more samples, and 30 GiB would hold more" in str(by_data)
    assert "the largest within" not in str(by_data)
    if on == "cpu":
        by_memory = bw.estimate(workload, on=on, memory=3 << 10)
        assert by_memory.max_limited_by == "memory"
        assert "the largest within 3 KiB" in str(by_memory)


def test_the_largest_on_a_cpu_needs_a_budget() -> None:
    with pytest.raises(InvalidInputError, match=r'try: memory="16GiB"'):
        bw.estimate(make_linear(), on="cpu", find_max=True)


class TestTheContext:
    def test_ones_own_is_taken_everywhere_and_the_answer_says_which(self) -> None:
        usual, own = (bw.estimate(make_mlp(), micro_batch=64, on=CARD, context=size) for size in (None, "1.25GiB"))
        assert (own.peak_bytes.device or 0) - (own.peak_bytes.reserved or 0) == 5 * 2**28
        assert own.upper_bytes.device == (own.upper_bytes.reserved or 0) + 5 * 2**28  # measured: no span
        assert (own.context or "").startswith("context: 1.25 GiB, as given")
        assert "public reports" in (usual.context or "")

    def test_it_leaves_less_to_a_search(self) -> None:
        options: dict[str, Any] = {"on": CARD, "memory": room(64), "limit": 2**20}
        usual, own = bw.fit(make_wide(), **options), bw.fit(make_wide(), context="540MiB", **options)
        assert usual.micro_batch is not None
        assert own.micro_batch is not None
        assert own.micro_batch < usual.micro_batch

    def test_kernels_loaded_all_at_once_take_what_their_reports_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lazy = context_of(find_card("rtx-3090-24gb"))
        monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
        eager = context_of(find_card("rtx-3090-24gb"))
        assert lazy.high_bytes < eager.low_bytes <= 1486 * 2**20 <= eager.high_bytes

    def test_what_cannot_be_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="leaves nothing"):
            bw.estimate(make_mlp(), on=CARD, context="80GiB")
        with pytest.raises(InvalidInputError, match="need a card"):
            bw.estimate(make_mlp(), on="cpu", context="1GiB")
        with pytest.raises(InvalidInputError, match="are for a simulated card"):
            bw.fit(make_mlp(), on="cpu", context="1GiB")
