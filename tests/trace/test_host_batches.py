"""The host is real: batches are made as in training, and what a step reads of them is known while it is traced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.errors import CannotTraceError
from batchwright.simulated.card import SimulatedCard
from batchwright.trace import host_batches
from batchwright.trace.known_values import KnownValues
from batchwright.trace.run import trace_workload
from tests.trace.test_trace import FEW_BYTES, blocks_of, num_bytes, predicted, really

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = torch.arange(1000.0)


def make(**changes: Any) -> bw.Workload:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(8, 5),
        "batch": labelled,
        "loss": lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return bw.Workload(**{**parts, **changes})


def labelled(n: int) -> dict[str, torch.Tensor]:
    rows = torch.arange(n)
    return {"x": torch.randn(n, 8), "y": rows % 5, "lengths": rows + 1, "mask": rows % 2 == 0}


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch).pow(2).mean()
    return out


class FromNumpy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that go through numpy, as those of torchvision do."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(TEXT[index : index + 8].numpy() / np.float32(255))


BATCHES: dict[str, dict[str, Any]] = {
    "that reads what it has drawn": {
        "batch": lambda n: torch.stack([TEXT[i : i + 8] for i in torch.randint(900, (n,))])
    },
    "that asks for an item": {"batch": lambda n: torch.full((n, 8), torch.rand(4).max().item())},
    "of a dataset that goes through numpy": {"batch": None, "data": FromNumpy()},
    "with a collate function that does": {
        "batch": None,
        "data": FromNumpy(),
        "collate": lambda samples: torch.from_numpy(np.stack([sample.numpy() for sample in samples])),
    },
    "that names the card": {
        "batch": lambda n: torch.randn(n, 8, device="cuda" if torch.cuda.is_available() else "cpu")
    },
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("on", ["cpu", "t4-16gb"])
def test_a_batch(name: str, on: str) -> None:
    found = bw.estimate(make(loss=mean_square, **BATCHES[name]), micro_batch=16, on=on)
    plain = bw.estimate(make(loss=mean_square, batch=lambda n: torch.randn(n, 8)), micro_batch=16, on=on)
    assert found.peak_bytes == plain.peak_bytes
    assert found.notes == ()


class Pair:
    """A batch that is an object of the user's own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.parts = {"x": x}

    def to(self, device: torch.device) -> Pair:
        return Pair(self.parts["x"].to(device))


@pytest.mark.parametrize("on", ["cpu", "t4-16gb"])
def test_a_batch_may_be_an_object_that_holds_tensors(on: str) -> None:
    inside = make(batch=lambda n: Pair(torch.randn(n, 8)), loss=lambda model, b: mean_square(model, b.parts["x"]))
    found = bw.estimate(inside, micro_batch=16, on=on)
    plain = bw.estimate(make(loss=mean_square, batch=lambda n: torch.randn(n, 8)), micro_batch=16, on=on)
    assert found.peak_bytes == plain.peak_bytes
    assert found.notes == ()


def test_such_an_object_may_lead_back_to_itself_and_stays_as_it_is() -> None:
    batch = SimpleNamespace(x=torch.randn(4, 8))
    batch.whole = batch
    with FakeTensorMode():
        twin = host_batches.without_memory(batch, KnownValues())
    assert twin.whole is twin
    assert isinstance(twin.x, FakeTensor)
    assert type(batch.x) is torch.Tensor


def test_a_batch_on_a_card_may_ask_for_an_estimate_on_a_card() -> None:
    plain = make(loss=mean_square, batch=lambda n: torch.randn(n, 8))
    expected, inside = bw.estimate(plain, micro_batch=16, on="t4-16gb").peak_bytes, []

    def batch(n: int) -> torch.Tensor:
        inside.append(bw.estimate(plain, micro_batch=16, on="t4-16gb").peak_bytes)
        return torch.randn(n, 8)

    outside = trace_workload(make(loss=mean_square, batch=batch), 16, card=SimulatedCard(find_card("t4-16gb")))
    assert outside.peaks is not None
    assert outside.peaks.allocated == expected.allocated
    assert set(inside) == {expected}


READS: dict[str, Callable[[Any, Any], Any]] = {
    "the largest label": lambda m, b: m(b["x"]).mean() * (b["y"].max().item() + 1),
    "whether any is ignored": lambda m, b: m(b["x"]).mean() if not (b["y"] == -100).any() else 1 / 0,
    "lengths as a list": lambda m, b: sum(m(b["x"][:length]).mean() for length in b["lengths"].tolist()),
    "a mask": lambda m, b: F.cross_entropy(m(b["x"])[b["mask"]], b["y"][b["mask"]]),
    "a mask that is computed": lambda m, b: m(b["x"][b["y"] > 1]).mean(),
    "what a mask selects": lambda m, b: m(b["x"]).masked_select(b["mask"][:, None]).mean(),
    "places": lambda m, b: m(b["x"])[b["mask"].nonzero().squeeze(1)].mean(),
    "what is unique": lambda m, b: m(b["x"]).mean() * len(b["y"].unique()),
    "how often": lambda m, b: m(b["x"]).mean() * b["y"].bincount(minlength=5).sum().item(),
    "repeats": lambda m, b: m(b["x"].repeat_interleave(b["lengths"], 0)).mean(),
    "numpy": lambda m, b: m(b["x"]).mean() * float(b["x"].cpu().numpy().sum()),
    "sums": lambda m, b: m(b["x"]).mean() * b["x"].sum().item(),
    "equality": lambda m, b: m(b["x"]).mean() if torch.equal(b["y"], b["y"].clone()) else 1 / 0,
    "a write": lambda m, b: m(b["x"]).mean() / (b["y"].clone().fill_(2).max().item() - 1),
}


@pytest.mark.parametrize("name", READS)
def test_a_step_may_read_of_its_batch(name: str) -> None:
    workload = make(loss=READS[name])
    rows = 8 * 2 * 8  # positions of a mask are held inside the operator that takes it
    assert predicted(workload, 8) == pytest.approx(really(workload, 8), abs=rows + FEW_BYTES)
    assert trace_workload(workload, 8).notes == ()


@pytest.mark.parametrize("name", ["the largest label", "a mask", "what is unique", "lengths as a list"])
def test_so_it_may_once_the_batch_is_on_a_card(name: str) -> None:
    assert bw.estimate(make(loss=READS[name]), micro_batch=8, on="t4-16gb").fits


@pytest.mark.parametrize("num_padded", [0, 5], ids=["all ones", "padded"])
def test_transformers_leave_out_a_mask_of_ones_as_they_do_in_a_run(num_padded: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=20, **sizes)

    def batch(n: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(20, (n, 64))
        return {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(64) >= num_padded).long().repeat(n, 1)}

    workload = make(
        model=lambda: transformers.LlamaForCausalLM(config), batch=batch, loss=lambda model, batch: model(**batch).loss
    )
    assert predicted(workload, 8) == pytest.approx(really(workload, 8), rel=1e-3)


OUTSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "an embedding": lambda m, y: F.embedding(y, m.weight).mean(),
    "a bag": lambda m, y: F.embedding_bag(y[:, None], m.weight).mean(),
    "rows": lambda m, y: m.weight.index_select(0, y).mean(),
    "gathered": lambda m, y: m.weight.gather(0, y[:, None]).mean(),
    "scattered": lambda m, y: m.weight.scatter_add(0, y[:5, None], m.weight[:, :1]).mean(),
    "labels": lambda m, y: F.cross_entropy(m.weight[:, :1].T.expand(len(y), -1), y),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("on", ["cpu", "t4-16gb"])
def test_a_position_that_lies_outside_is_an_error_as_in_a_run(name: str, on: str) -> None:
    def estimate(position: int) -> object:
        return bw.estimate(make(batch=lambda n: torch.full((n,), position), loss=OUTSIDE[name]), micro_batch=8, on=on)

    # A bag that is summed up by several threads has a message of its own.
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|range|i < index_size"):
        OUTSIDE[name](nn.Linear(8, 5), torch.full((8,), 7))
    with pytest.raises(IndexError, match="7 is out of bounds"):
        estimate(7)
    assert estimate(4)


def test_a_label_that_the_loss_leaves_out_is_no_error() -> None:
    loss = OUTSIDE["labels"]
    assert bw.estimate(make(batch=lambda n: torch.full((n,), -100), loss=loss), micro_batch=8, on="t4-16gb")


def test_what_was_overwritten_by_something_unknown_is_no_longer_known() -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = model(batch["x"]).mean()
        changed = batch["x"].clone()
        changed[0] = model.weight[0]  # type: ignore[index]
        return out * changed.sum().item()

    with pytest.raises(CannotTraceError, match="reads a value out of a tensor"):
        trace_workload(make(loss=loss), 8)


def ctc(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A CTC loss as speech models have it: checked labels, lengths from them."""
    labels, frames = batch["labels"], batch["frames"]
    if labels.max() >= 5:
        raise ValueError("a label is outside of the vocabulary")
    log_probs = model(frames).log_softmax(-1).transpose(0, 1)
    lengths = (labels >= 0).sum(-1)
    targets = labels.masked_select(labels >= 0)
    return F.ctc_loss(log_probs, targets, torch.full((len(frames),), frames.shape[1]), lengths, zero_infinity=True)


def speech(n: int) -> dict[str, torch.Tensor]:
    labels = torch.full((n, 6), -100)
    for row in range(n):
        labels[row, : 1 + row % 4] = 1 + row % 3
    return {"frames": torch.randn(n, 20, 8), "labels": labels}


def test_a_ctc_loss_has_the_table_of_its_longest_target() -> None:
    workload = make(batch=speech, loss=ctc)
    assert predicted(workload, 8) == pytest.approx(really(workload, 8), rel=0.1)
    shapes = {block.shape for block in blocks_of(workload, 8) if block.operator.startswith("aten._ctc_loss.Tensor")}
    assert (8, 20, 2 * 4 + 1) in shapes


def test_tensors_of_a_batch_that_share_a_storage_count_once() -> None:
    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randn(n, 9)
        return rows[:, :-1], rows[:, 1:]

    workload = make(batch=batch, loss=lambda model, pair: model(pair[0]).mean() + model(pair[1]).mean())
    assert num_bytes(blocks_of(workload, 32, steps=1), "inputs") == 32 * 9 * 4


def test_a_slice_of_a_dataset_counts_as_itself() -> None:
    workload = make(batch=lambda n: torch.zeros(10_000, 8)[5 : 5 + n], loss=mean_square)
    assert num_bytes(blocks_of(workload, 32, steps=1), "inputs") == 32 * 8 * 4


def test_a_batch_too_large_to_be_made_in_passing_is_made_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_batches, "LARGEST_REAL_BYTES", 2**12)
    sizes: list[int] = []

    def batch(n: int) -> torch.Tensor:
        made = torch.randn(n, 8)
        if type(made) is torch.Tensor:
            sizes.append(n)
        return made

    trace_workload(make(batch=batch, loss=mean_square), 4096)
    assert max(sizes) == 2
    assert max(map(len, sizes_of_real_batches())) == 4096


def sizes_of_real_batches() -> list[Any]:
    """One that reads values is made for real all the same."""
    seen: list[Any] = []

    def batch(n: int) -> torch.Tensor:
        seen.append([i.item() for i in torch.randint(900, (n,))])
        return torch.randn(n, 8)

    trace_workload(make(batch=batch, loss=mean_square), 4096)
    return seen


def test_random_numbers_come_again_as_if_no_batch_had_been_made() -> None:
    before = torch.get_rng_state()
    bw.estimate(make(), micro_batch=8)
    assert torch.equal(torch.get_rng_state(), before)


class Sharp(torch.optim.SGD):
    """An optimizer that looks at the loss once more, from a little further up."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("this optimizer requires a closure")
        weights = [p for group in self.param_groups for p in group["params"]]
        kept = [p.detach().clone() for p in weights]
        with torch.no_grad():
            torch._foreach_add_(weights, [p.grad for p in weights], alpha=0.05)
        closure()
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)
        return super().step()


def test_an_optimizer_that_computes_the_loss_again_is_traced_as_it_runs() -> None:
    workload = make(optimizer=lambda params: Sharp(params, lr=0.1), model=lambda: nn.Linear(8, 512))
    assert predicted(workload, 64) == pytest.approx(really(workload, 64), abs=FEW_BYTES)


def test_one_that_decides_by_values_how_often_is_refused_and_runs_for_real() -> None:
    workload = make(optimizer=lambda params: torch.optim.LBFGS(params, max_iter=2))
    with pytest.raises(CannotTraceError, match="computes the loss inside its step"):
        bw.estimate(workload, micro_batch=4)
    assert really(workload, 4) > 0


def test_what_is_moved_into_a_part_is_known_there_if_the_whole_is() -> None:
    values = KnownValues()
    with FakeTensorMode():
        whole, other = torch.empty(7), torch.empty(7)
    values.learn(whole, lambda: torch.ones(7))
    for fake in (whole, other):
        values.learn_batch(fake[2:6], torch.tensor([80.0, 80.0, 40.0, 40.0]))
    known = values.real(whole)
    assert known is not None
    assert known.tolist() == [1, 1, 80, 80, 40, 40, 1]
    assert values.real(other) is None
