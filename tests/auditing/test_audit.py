"""Each cause is planted in turn in a small trainer, and the audit has to name it; a right trainer raises no alarm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from batchwright.accumulate.accumulator import Accumulator
from batchwright.auditing.audit import audit_workload
from batchwright.errors import InvalidInputError
from batchwright.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

Batch = tuple[torch.Tensor, torch.Tensor]
ACCUMULATION = 4


class Tagger(nn.Module):
    """A class for every token, and a balance loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        logits: torch.Tensor = self.head(self.layers(features))
        return logits


def samples(n: int) -> Batch:
    """Samples of different lengths: labels beyond a length are ignored."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (n, 9), generator=generator)
    lengths = torch.arange(n) % 9 + 1
    labels[torch.arange(9)[None] >= lengths[:, None]] = -100
    return torch.randn(n, 9, 6, generator=generator), labels


def token_mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def num_tokens(batch: Batch) -> int:
    return int((batch[1] != -100).sum())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def right(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    total = sum(map(num_tokens, micro_batches))
    for batch in micro_batches:
        (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def mean_of_means(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    for batch in micro_batches:
        (token_mean(model, batch) / len(micro_batches)).backward()
    optimizer.step()


def count_ignored(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    for batch in micro_batches:
        token_mean(model, batch).backward()
    optimizer.step()


def tail_scale(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    total = sum(map(num_tokens, micro_batches))
    for batch in micro_batches:
        scale = len(micro_batches) / ACCUMULATION
        (token_mean(model, batch) * (num_tokens(batch) / total) * scale).backward()
    optimizer.step()


def tail_dropped(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    total = sum(map(num_tokens, micro_batches))
    for index, batch in enumerate(micro_batches):
        (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
        if (index + 1) % ACCUMULATION == 0:
            optimizer.step()


def auxiliary_multiplied(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    total = sum(map(num_tokens, micro_batches))
    for batch in micro_batches:
        (token_mean(model, batch) * (num_tokens(batch) / total) + penalty(model)).backward()
    optimizer.step()


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.1 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def narrow_buffer(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    total = sum(map(num_tokens, micro_batches))
    buffers = [torch.zeros_like(parameter, dtype=torch.bfloat16) for parameter in model.parameters()]
    for batch in micro_batches:
        (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
        for parameter, buffer in zip(model.parameters(), buffers, strict=True):
            assert parameter.grad is not None
            buffer += parameter.grad.to(torch.bfloat16)
            parameter.grad = None
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = buffer.to(parameter.dtype)
    optimizer.step()


def zeroed_within(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
    total = sum(map(num_tokens, micro_batches))
    for batch in micro_batches:
        optimizer.zero_grad()
        (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
    optimizer.step()


def workload(**changes: Any) -> Workload:
    return replace(Workload(model=Tagger, batch=samples, loss=token_mean, optimizer=sgd, window=right), **changes)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("dropout", ["off", "replayed"])
def test_a_right_trainer_raises_no_alarm(dtype: str, dropout: str) -> None:
    found = audit_workload(workload(units=num_tokens), dtype=dtype, dropout=dropout)
    assert found.exact
    assert found.cause is None
    assert [split.name for split in found.splits] == ["2x4", "2x1"]
    assert "the loop clips; it was judged before its clipping" in found.notes


@pytest.mark.parametrize(
    ("window", "cause", "ratio"),
    [
        (mean_of_means, "mean of means", None),
        (count_ignored, "count ignored", None),
        (tail_scale, "tail scale", 0.25),
        (tail_dropped, "tail dropped", None),
        (narrow_buffer, "low-precision buffer", 1.0),
        (zeroed_within, "gradients dropped", None),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_planted_defect_is_named(window: Any, cause: str, ratio: float | None, dtype: str) -> None:
    found = audit_workload(workload(window=window), dtype=dtype)
    assert (found.exact, found.cause) == (False, cause)
    assert found.remedy
    if ratio is not None:
        assert found.ratio == pytest.approx(ratio, rel=0.3)


def test_a_count_that_is_ignored_shows_as_a_factor() -> None:
    even = workload(window=count_ignored, batch=lambda n: (torch.randn(n, 9, 6), torch.zeros(n, 9).long()))
    assert audit_workload(even, splits="4x2").ratio == pytest.approx(2.0)
    assert audit_workload(even, splits="1x8").ratio == pytest.approx(8.0)


def test_an_auxiliary_loss_that_is_multiplied_is_named() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return token_mean(model, batch) + penalty(model)

    found = audit_workload(workload(window=auxiliary_multiplied, loss=loss))
    assert (found.exact, found.cause) == (False, "auxiliary loss multiplied")


def test_batch_normalization_is_named_and_running_statistics_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = model(batch).square()
        return squares.mean()

    found = audit_workload(Workload(model=model, batch=lambda n: torch.randn(n, 4), loss=loss, optimizer=sgd))
    assert (found.exact, found.cause) == (False, "BatchNorm")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_whose_samples_look_at_each_other_is_named() -> None:
    def contrastive(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        embedded = F.normalize(model(batch), dim=1)
        return F.cross_entropy(embedded @ embedded.T / 0.1, torch.arange(len(batch)))

    found = audit_workload(
        Workload(model=lambda: nn.Linear(6, 4), batch=lambda n: torch.randn(n, 6), loss=contrastive, optimizer=sgd)
    )
    assert (found.exact, found.cause) == (False, "not additive")
    assert "CachedLoss" in (found.remedy or "")


def plain(loss: Any, **changes: Any) -> Workload:
    """A small net, without a window of its own."""
    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        "batch": lambda n: torch.randn(n, 6),
        "loss": loss,
        "optimizer": sgd,
    }
    return Workload(**{**parts, **changes})


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "reduced",
    [torch.max, torch.min, lambda losses: losses.logsumexp(0), lambda losses: losses.mean().sqrt()],
    ids=["max", "min", "logsumexp", "root"],
)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_loss_that_is_no_mean_is_not_called_a_mean_of_means(reduced: Any, micro_batch: int) -> None:
    found = audit_workload(
        plain(lambda model, batch: reduced((model(batch) - 1).square().squeeze(1))), micro_batch=micro_batch
    )
    assert (found.exact, found.cause) == (False, "not a mean")
    assert "neither a mean nor a sum" in found.explanation


def test_a_model_with_fewer_weights_than_micro_batches_has_no_cause_by_shares() -> None:
    tiny = plain(lambda model, batch: model(batch).square().max(), model=lambda: nn.Linear(6, 1))
    found = audit_workload(tiny, micro_batch=1, accumulation=16)
    assert (found.exact, found.cause) == (False, "unknown")


def test_a_loss_that_freezes_weights_now_and_then_is_named() -> None:
    calls: list[int] = []

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        model[0].requires_grad_(len(calls) % 2 == 0)
        return square(model, batch)

    found = audit_workload(plain(loss))
    assert (found.exact, found.cause) == (False, "frozen by the loss")
    assert found.explanation.endswith(": 0")


@pytest.mark.parametrize("trains", [True, False])
def test_a_loss_that_sets_what_trains_is_compared_as_it_leaves_it(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].requires_grad_(not trains)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        model[0].requires_grad_(trains)
        return square(model, batch)

    everything = plain(loss, model=model, optimizer=lambda model: sgd(model.parameters()))
    assert audit_workload(everything).exact
    assert all(weight.requires_grad is not trains for weight in model[0].parameters())


def test_a_window_that_freezes_on_its_way_is_not_compared_with_what_it_left() -> None:
    def window(model: Any, optimizer: Any, micro_batches: Sequence[torch.Tensor]) -> None:
        for batch in micro_batches:
            (square(model, batch) / len(micro_batches)).backward()
            model[0].requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()

    found = audit_workload(plain(square, window=window))
    assert (found.exact, found.cause) == (False, "part detached")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda loss: loss[None].expand(3), r"scalar tensor; received one of shape \(3,\)"),
        (lambda loss: None, "received NoneType"),
        (lambda loss: loss.item(), r"received float; return the tensor itself"),
        (lambda loss: {"loss": loss}, r"received dict; it has a \['loss'\]"),
        (lambda loss: (loss, loss), "received tuple; if its first entry is the loss"),
        (lambda loss: loss.detach(), "does not require a gradient"),
        (lambda loss: loss.long(), "does not require a gradient"),
        (lambda loss: loss * 1j, "received a complex number"),
        (lambda loss: loss.to_sparse(), "received a tensor of layout"),
        (lambda loss: loss * float("nan"), "the loss is nan"),
        (lambda loss: loss.new_ones((), requires_grad=True) * 2, "the step trained nothing"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_answered(returned: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        audit_workload(plain(lambda model, batch: returned(square(model, batch))))


def test_a_loss_that_fails_on_micro_batches_alone_is_answered() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        return square(model, batch) if len(batch) > 2 else model(batch)

    with pytest.raises(InvalidInputError, match=r"received one of shape \(2, 1\)"):
        audit_workload(plain(loss))


@pytest.mark.parametrize(("options", "split"), [({"micro_batch": 1}, "1x4"), ({"splits": "3+1"}, r"3\+1")])
def test_single_samples_for_batch_normalization_name_the_split(options: dict[str, Any], split: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with pytest.raises(InvalidInputError, match=f"^the split {split} has micro-batches that are too small for batch"):
        audit_workload(plain(square, model=model), **options)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_lazy_and_scripted_models_are_compared(dtype: str) -> None:
    lazy = plain(square, model=lambda: nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)))
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    scripted = plain(square, model=lambda: torch.jit.script(layers))
    assert audit_workload(lazy, dtype=dtype).exact
    assert audit_workload(scripted, dtype=dtype).exact


@pytest.mark.parametrize(
    ("synchronised", "cause"), [("last", None), ("all", "missing no_sync"), ("none", "synchronisation lost")]
)
def test_synchronisations_are_counted(synchronised: str, cause: str | None) -> None:
    def window(model: Any, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        total = sum(map(num_tokens, micro_batches))
        for index, batch in enumerate(micro_batches):
            if hasattr(model, "require_backward_grad_sync"):
                is_last = index == len(micro_batches) - 1
                model.require_backward_grad_sync = synchronised == "all" or (synchronised == "last" and is_last)
            (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
        optimizer.step()

    found = audit_workload(workload(window=window, wrap=DistributedDataParallel))
    assert found.cause == cause
    assert found.exact == (cause != "synchronisation lost")


def test_plain_accumulation_is_judged_where_no_window_is_handed_in() -> None:
    found = audit_workload(workload(window=None))
    assert (found.exact, found.cause) == (False, "mean of means")
    assert "no window=" in found.what
    even = audit_workload(workload(window=None, batch=lambda n: (torch.randn(n, 9, 6), torch.zeros(n, 9).long())))
    assert even.exact


def test_the_data_of_a_workload_is_split_again() -> None:
    features, labels = samples(16)
    data = [(features[i], labels[i]) for i in range(16)]
    found = audit_workload(workload(batch=None, data=data), splits=["4x2", "1x8", "3+3+2", (1, 7)])
    assert found.exact
    assert [split.name for split in found.splits] == ["4x2", "1x8", "3+3+2", "1+7"]


def test_json_carries_what_was_promised() -> None:
    told = audit_workload(workload(window=count_ignored)).to_dict()
    promised = {"schema", "exact", "ratio", "relative_error", "worst_module", "cause", "remedy", "splits"}
    assert promised <= set(told)
    assert told["worst_module"] in {"layers.0", "head"}


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"dtype": "fp16"}, "dtype is fp32 or fp64"),
        ({}, {"dropout": "on"}, "dropout is"),
        ({"optimizer": None}, {}, "an audit compares gradients"),
        ({}, {"splits": "2y4"}, "a split is"),
        ({}, {"micro_batch": 0}, "micro_batch must be"),
    ],
)
def test_wrong_input_is_answered(changes: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        audit_workload(workload(**changes), **options)


def test_a_bug_in_the_window_surfaces() -> None:
    def broken(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        audit_workload(workload(window=broken))


def test_random_numbers_are_where_they_were() -> None:
    before = torch.random.get_rng_state()
    audit_workload(workload(window=mean_of_means))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_right_loop_of_another_style_raises_no_alarm() -> None:
    def by_accumulator(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        accumulator = Accumulator(model, optimizer, len(micro_batches), clip_norm=1e-3)
        for batch in accumulator.micro_batches(micro_batches, weight=num_tokens):
            accumulator.backward(token_mean(model, batch))

    def clipped_by_another_name(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        total = sum(map(num_tokens, micro_batches))
        for batch in micro_batches:
            (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
        clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    def without_synchronising(model: Any, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        total = sum(map(num_tokens, micro_batches))
        for batch in micro_batches[:-1]:
            with model.no_sync():
                (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
        (token_mean(model, micro_batches[-1]) * (num_tokens(micro_batches[-1]) / total)).backward()
        optimizer.step()

    def in_a_closure(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        total = sum(map(num_tokens, micro_batches))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            losses = [token_mean(model, batch) * (num_tokens(batch) / total) for batch in micro_batches]
            torch.stack(losses).sum().backward()
            return torch.stack(losses).sum()

        optimizer.step(closure)

    def narrow(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return token_mean(model, batch)

    for window in (by_accumulator, clipped_by_another_name, in_a_closure):
        assert audit_workload(workload(window=window)).exact, window.__name__
    assert audit_workload(workload(window=without_synchronising, wrap=DistributedDataParallel)).cause is None
    cast = audit_workload(workload(loss=narrow))
    assert cast.exact
    assert any("autocast" in note for note in cast.notes)


def test_a_factor_and_a_missing_step_are_named() -> None:
    def doubled(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        total = sum(map(num_tokens, micro_batches))
        for batch in micro_batches:
            (2 * token_mean(model, batch) * (num_tokens(batch) / total)).backward()
        optimizer.step()

    def never(model: nn.Module, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        for batch in micro_batches:
            token_mean(model, batch).backward()

    found = audit_workload(workload(window=doubled))
    assert found.cause == "constant factor"
    assert found.ratio == pytest.approx(2.0)
    assert audit_workload(workload(window=never)).cause == "no step seen"
    alone = audit_workload(workload(), accumulation=1)
    assert any("nothing was accumulated" in note for note in alone.notes)


def test_a_gradient_that_is_lost_shows_whatever_its_name() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.module = nn.Parameter(torch.ones(6)), nn.Linear(6, 5, bias=False)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.module(features * self.weight)
            return logits

    def forgets(model: Any, optimizer: Any, micro_batches: Sequence[Batch]) -> None:
        total = sum(map(num_tokens, micro_batches))
        for batch in micro_batches:
            (token_mean(model, batch) * (num_tokens(batch) / total)).backward()
        model.weight.grad = None
        optimizer.step()

    assert not audit_workload(workload(model=Nested, window=forgets)).exact


class Queue(nn.Module):
    """Collects what it computed, in a buffer that is replaced by a larger one."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("queue", torch.zeros(0, 5))
        self.num_calls = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the layer computes, and remember it."""
        out: torch.Tensor = self.layer(features)
        self.queue = torch.cat([self.queue, out.detach()])[-8:]
        self.num_calls += 1
        return out


def rows(n: int) -> torch.Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(0))


def square_mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    square: torch.Tensor = model(batch).pow(2).mean()
    return square


def test_a_buffer_that_grows_is_put_back_between_the_runs() -> None:
    model = Queue()
    found = audit_workload(Workload(model=model, batch=rows, loss=square_mean, optimizer=sgd))
    assert found.exact
    assert (model.queue.shape, model.num_calls) == ((0, 5), 0)


def test_a_loss_that_counts_its_calls_is_called_neither_random_nor_given_a_cause() -> None:
    num_calls = 0

    def annealed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return square_mean(model, batch) * num_calls

    found = audit_workload(Workload(model=lambda: nn.Linear(6, 5), batch=rows, loss=annealed, optimizer=sgd))
    assert (found.exact, found.cause, num_calls) == (False, None, 0)
    assert any("differs from call to call with the same random numbers" in note for note in found.notes)
    assert not any("random even without dropout" in note for note in found.notes)
    assert (found.is_random, found.is_stateful, found.to_dict()["random"]) == (False, True, False)
    first, *others = str(found).splitlines()
    assert "cannot be judged, for the loss differs from call to call" in first
    assert any("no cause is named: the loss differs from call to call with the same" in line for line in others)
    assert not any("is random" in line for line in (first, *others))
    assert "fix that first" in (found.remedy or "")


def test_a_replay_of_a_loss_that_counts_its_calls_does_not_call_it_random() -> None:
    num_calls = 0

    def annealed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return square_mean(model, batch) * num_calls

    workload = Workload(model=lambda: nn.Linear(6, 5), batch=rows, loss=annealed, optimizer=sgd)
    replayed = audit_workload(workload, dropout="replayed")
    assert any("the loss differs from call to call: the gradient was not compared" in note for note in replayed.notes)
    assert "is random" not in str(replayed)
