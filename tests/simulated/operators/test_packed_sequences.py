"""Packed batches on the CPU and on the simulated card: as large as their known lengths say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.errors import CannotTraceError
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import trace_workload
from tests.trace.test_trace import FEW_BYTES, predicted, really

LENGTH, INPUT, HIDDEN = 10, 16, 32
UNEVEN = [10, 7, 7, 3, 3, 2, 1, 1]


class Net(nn.Module):
    """Packs its input, runs over it and pads what comes out; keeps every shape and length on the way."""

    def __init__(self, lengths: Any, *, batch_first: bool, total_length: int) -> None:
        super().__init__()
        self.net = nn.GRU(INPUT, HIDDEN, batch_first=batch_first)
        self.lengths, self.batch_first, self.total_length = lengths, batch_first, total_length
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.lengths() if callable(self.lengths) else self.lengths
        x = x if self.batch_first else x.transpose(0, 1).contiguous()
        packed = pack_padded_sequence(x, given, batch_first=self.batch_first)
        out = self.net(packed)[0]
        padded, lengths = pad_packed_sequence(out, batch_first=self.batch_first, total_length=self.total_length)
        self.seen += [packed.data.shape, packed.batch_sizes.tolist(), padded.shape, padded.stride(), lengths.tolist()]
        return padded


def step(lengths: Any, *, batch_first: bool, device: str, total_length: int = 12) -> list[Any]:
    """Return what one step saw: for real on the CPU, or traced on a card."""
    seen: list[Any] = []
    known = UNEVEN if callable(lengths) else lengths

    def make_batch(n: int) -> torch.Tensor:
        return torch.randn(n, known[0], INPUT)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Net)
        value: torch.Tensor = model(x).sum()
        seen.extend(model.seen[-5:])
        return value

    if device == "cpu":
        net = Net(lengths, batch_first=batch_first, total_length=total_length)
        loss(net, make_batch(len(known))).backward()
        return seen[-5:]
    workload = bw.Workload(
        model=lambda: Net(lengths, batch_first=batch_first, total_length=total_length),
        batch=make_batch,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace_workload(workload, len(known), card=SimulatedCard(find_card("a100-40gb")))
    return seen[-5:]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "lengths", [[LENGTH] * 8, UNEVEN, lambda: torch.tensor(UNEVEN, device="cpu")], ids=["even", "uneven", "tensor"]
)
def test_a_packed_batch_is_on_a_card_what_it_really_is(lengths: Any, batch_first: bool) -> None:
    traced = step(lengths, batch_first=batch_first, device="cuda")
    assert traced == step(lengths, batch_first=batch_first, device="cpu")


def test_packing_holds_the_runs_and_the_whole_at_once() -> None:
    packed_bytes = 2**14 * 4 * 40 * 4
    peaks: list[int] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        data = pack_padded_sequence(x, [40, 40, 40, 40], batch_first=True).data
        peaks.extend([torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before])
        value: torch.Tensor = model(data[:, :8]).mean()
        return value

    workload = bw.Workload(
        model=lambda: nn.Linear(8, 8),
        batch=lambda n: torch.randn(n, 40, 2**14),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace_workload(workload, 4, card=SimulatedCard(find_card("a100-40gb")))
    assert peaks[:2] == [2 * packed_bytes, packed_bytes]


@pytest.mark.parametrize("lengths", [[600, 600], [2] * 600], ids=["long", "many"])
def test_lengths_stay_known_however_long_or_many(lengths: list[int]) -> None:
    traced = step(lengths, batch_first=True, device="cuda", total_length=600)
    assert traced[2] == (len(lengths), 600, HIDDEN)


def test_lengths_that_come_with_the_data_are_known() -> None:
    workload = bw.Workload(
        model=lambda: nn.Linear(INPUT, 1),
        batch=lambda n: (torch.randn(n, LENGTH, INPUT), torch.randint(1, LENGTH, (n,)).sort(descending=True).values),
        loss=lambda model, batch: model(pack_padded_sequence(batch[0], batch[1].cpu(), batch_first=True).data).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    traced = trace_workload(workload, 8, card=SimulatedCard(find_card("a100-40gb")))
    assert traced.peaks is not None


def test_lengths_that_are_computed_from_weights_are_refused_by_name() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        lengths = model(x).argmax(1).flatten() + 1
        value: torch.Tensor = model(pack_padded_sequence(x, lengths.cpu(), batch_first=True).data).mean()
        return value

    workload = bw.Workload(
        model=lambda: nn.Linear(INPUT, 1),
        batch=lambda n: torch.randn(n, LENGTH, INPUT),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    with pytest.raises(CannotTraceError, match=r"_pack_padded_sequence.*depends on values"):
        trace_workload(workload, 8, card=SimulatedCard(find_card("a100-40gb")))


@pytest.mark.parametrize(("lengths", "told"), [([3, 5], "decreasing"), ([5, 0], "positive"), ([5], "1 lengths")])
def test_lengths_that_torch_refuses_are_refused(lengths: list[int], told: str) -> None:
    workload = bw.Workload(
        model=lambda: nn.Linear(INPUT, 1),
        batch=lambda n: torch.randn(n, LENGTH, INPUT),
        loss=lambda model, x: model(pack_padded_sequence(x, lengths, batch_first=True).data).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    with pytest.raises(RuntimeError, match=told):
        trace_workload(workload, 2, card=SimulatedCard(find_card("a100-40gb")))


class PackedNet(nn.Module):
    """A recurrent net over what its batch says is no padding."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net = kind(INPUT, HIDDEN, batch_first=True)

    def forward(self, batch: Any) -> torch.Tensor:
        if not isinstance(batch, PackedSequence):
            batch = pack_padded_sequence(batch[0], batch[1], batch_first=True, enforce_sorted=False)
        padded: torch.Tensor = pad_packed_sequence(self.net(batch)[0], batch_first=True)[0]
        return padded


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("is_packed_before", [False, True], ids=["in the step", "in the batch"])
def test_on_the_cpu_the_peak_of_a_packed_batch_is_the_real_one(kind: Any, is_packed_before: bool) -> None:
    def batch(n: int) -> Any:
        padded, lengths = torch.randn(n, LENGTH, INPUT), 1 + torch.arange(n) * 7 % LENGTH
        if is_packed_before:
            return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        return padded, lengths

    workload = bw.Workload(
        model=lambda: PackedNet(kind),
        batch=batch,
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    step_sizes = LENGTH * torch.int64.itemsize
    assert predicted(workload, 16) == pytest.approx(really(workload, 16), abs=step_sizes + FEW_BYTES)
    assert trace_workload(workload, 16).notes == ()


def test_lengths_need_not_be_sorted() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, [3, 10, 7, 1], batch_first=True, enforce_sorted=False)
        total: torch.Tensor = pad_packed_sequence(model(packed)[0], batch_first=True)[0].sum()
        return total

    workload = bw.Workload(
        model=lambda: nn.LSTM(INPUT, HIDDEN, batch_first=True),
        batch=lambda n: torch.randn(n, LENGTH, INPUT),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    assert bw.estimate(workload, micro_batch=4, on="a100-40gb").peak
