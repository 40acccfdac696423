"""`CachedLoss` against plain autograd on the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.boundary import zero_backward
from batchwright.accumulate.cached_loss import CachedLoss
from batchwright.accumulate.weights import BatchNormWarning
from batchwright.errors import InvalidInputError
from tests.oracle.live_bytes import LiveBytes


class TwoTowers(nn.Module):
    """Queries and documents have encoders of their own; the temperature is learnt."""

    def __init__(self, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5))
        self.document = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 5))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.query(batch["query"]), self.document(batch["document"])


def make_batch(samples: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    query = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return {"query": query, "document": torch.randn(samples, 7, generator=generator, dtype=dtype)}


def info_nce(query: torch.Tensor, document: torch.Tensor, temperature: Any = 1.0) -> torch.Tensor:
    scores = normalize(query, dim=1) @ normalize(document, dim=1).T * temperature
    right = torch.arange(len(query))
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


def loss_of_whole(model: TwoTowers, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    query, document = model(batch)
    return info_nce(query, document, model.temperature.exp())


def encode(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return model(batch)


def cached_for(model: TwoTowers, micro_batch: int) -> CachedLoss:
    return CachedLoss(encode, lambda q, d: info_nce(q, d, model.temperature.exp()), micro_batch=micro_batch)


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def relative_error(found: nn.Module, right: nn.Module) -> float:
    difference = (gradient(found) - gradient(right)).norm() / gradient(right).norm()
    return float(difference)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8, 20])
def test_gradient_equals_that_of_the_whole_batch(dtype: torch.dtype, bound: float, micro_batch: int) -> None:
    batch = make_batch(8, dtype)
    whole, mine = TwoTowers(dtype=dtype), TwoTowers(dtype=dtype)
    right = loss_of_whole(whole, batch)
    right.backward()
    loss = cached_for(mine, micro_batch)(mine, batch)
    loss.backward()
    torch.testing.assert_close(loss.detach(), right.detach())
    assert mine.temperature.grad is not None
    assert relative_error(mine, whole) <= bound
    # The proof that it is not empty: plain accumulation sees other negatives.
    plain = TwoTowers(dtype=dtype)
    for start in range(0, 8, 2):
        part = {name: rows[start : start + 2] for name, rows in batch.items()}
        (loss_of_whole(plain, part) / 4).backward()
    assert relative_error(plain, whole) > 0.1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_dropout_draws_the_same_masks_again(dtype: torch.dtype, bound: float) -> None:
    batch = make_batch(7, dtype)
    whole, mine = TwoTowers(dropout=0.5, dtype=dtype), TwoTowers(dropout=0.5, dtype=dtype)
    torch.manual_seed(3)
    pieces = [{name: rows[start : start + 3] for name, rows in batch.items()} for start in (0, 3, 6)]
    queries, documents = zip(*(whole(piece) for piece in pieces), strict=True)
    info_nce(torch.cat(queries), torch.cat(documents), whole.temperature.exp()).backward()
    after = torch.rand(1)
    torch.manual_seed(3)
    loss = cached_for(mine, 3)(mine, batch)
    loss.backward()
    assert relative_error(mine, whole) <= bound
    assert torch.equal(torch.rand(1), after)


def test_scale_from_above_is_honoured() -> None:
    batch = make_batch(6)
    whole, mine = TwoTowers(), TwoTowers()
    (3.0 * loss_of_whole(whole, batch) + whole.temperature**2).backward()
    (3.0 * cached_for(mine, 4)(mine, batch) + mine.temperature**2).backward()
    assert relative_error(mine, whole) <= 1e-12


def test_inside_an_accumulator_two_batches_make_a_step() -> None:
    whole, mine = TwoTowers(), TwoTowers()
    batches = [make_batch(6), make_batch(9)]
    right = torch.stack([loss_of_whole(whole, b) * len(b["query"]) for b in batches]).sum() / 15
    right.backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    cached = cached_for(mine, 4)
    accumulator = Accumulator(mine, torch.optim.SGD(mine.parameters(), lr=0.1), accumulation=2)
    steps = [accumulator.backward(cached(mine, batch)) for batch in accumulator.micro_batches(batches)]
    assert steps[0] is None
    assert steps[1] is not None
    assert steps[1].loss == pytest.approx(right.item())
    for found, expected in zip(mine.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_is_replayed_and_leaves_no_weights_without_a_graph(backward_inside: bool) -> None:
    model, batch = TwoTowers(dtype=torch.float32), make_batch(6, torch.float32)
    dtypes = []

    def seen(model: Any, piece: Any) -> Any:
        rows = model(piece)
        dtypes.append((rows[0].dtype, rows[0].requires_grad))
        return rows

    cached = CachedLoss(seen, lambda q, d: info_nce(q, d, model.temperature.exp()), micro_batch=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cached(model, batch)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    assert dtypes == [(torch.bfloat16, False)] * 2 + [(torch.bfloat16, True)] * 2
    exact = TwoTowers(dtype=torch.float32)
    loss_of_whole(exact, batch).backward()
    # Not equal to the whole batch under autocast either: that one adds up the micro-batches' gradients in 16 bits.
    assert 1e-4 < relative_error(model, exact) < 0.05


def test_a_dict_of_embeddings_with_labels_among_them() -> None:
    labels = torch.tensor([0, 1, 0, 1, 1])
    whole, mine = TwoTowers(), TwoTowers()
    batch = make_batch(5)

    def supervised(rows: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        alike = (label[:, None] == label[None, :]).double()
        return (rows @ rows.T - alike).square().mean()

    supervised(whole.query(batch["query"]), labels).backward()
    cached = CachedLoss(
        lambda model, b: {"label": b["label"], "rows": model.query(b["query"])}, supervised, micro_batch=2
    )
    cached(mine, {**batch, "label": labels}).backward()
    assert relative_error(mine, whole) <= 1e-12
    assert mine.temperature.grad is None


def test_a_batch_of_another_form_is_cut_by_split() -> None:
    whole, mine = TwoTowers(), TwoTowers()
    rows = torch.randn(6, 5, dtype=torch.float64)  # samples along dimension 1

    def loss(embeddings: torch.Tensor) -> torch.Tensor:
        return (embeddings @ embeddings.T).square().mean()

    loss(whole.query(rows.T)).backward()
    cached = CachedLoss(
        lambda model, b: model.query(b.T),
        loss,
        micro_batch=2,
        split=lambda b, sizes: torch.split(b, sizes, dim=1),
        samples=lambda b: b.shape[1],
    )
    cached(mine, rows).backward()
    assert relative_error(mine, whole) <= 1e-12


def test_peak_grows_with_the_micro_batch_not_with_the_batch() -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 4))

    def peak(samples: int, micro_batch: int) -> int:
        cached = CachedLoss(
            lambda model, b: model(b), lambda rows: (rows.T @ rows).square().mean(), micro_batch=micro_batch
        )
        batch = torch.randn(samples, 32)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes() as counter:
            cached(model, batch).backward()
        return int(counter.peak - batch.nbytes)

    small, more_samples, larger = peak(128, 32), peak(512, 32), peak(512, 512)
    assert more_samples < 1.2 * small
    assert larger > 4 * more_samples


def test_without_gradients_it_is_just_the_loss() -> None:
    model, batch = TwoTowers(), make_batch(6)
    with torch.no_grad():
        found = cached_for(model, 4)(model, batch)
        torch.testing.assert_close(found, loss_of_whole(model, batch))
    assert not found.requires_grad


def test_zero_backward_adds_zeros() -> None:
    model = TwoTowers()
    zero_backward(cached_for(model, 4)(model, make_batch(6)))
    assert gradient(model).abs().sum() == 0


def test_batch_norm_is_explained() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    cached = CachedLoss(lambda model, b: model(b), lambda rows: rows.square().mean(), micro_batch=2)
    with pytest.warns(BatchNormWarning, match="^1: batch normalization"):
        cached(model, torch.randn(4, 3))
    cached(model, torch.randn(2, 3))
    cached(model.eval(), torch.randn(4, 3))


@pytest.mark.parametrize(
    ("encode_rows", "loss", "message"),
    [
        (lambda m, b: m(b), lambda rows: rows.sum(1), r"scalar over the whole batch; received \(5,\)"),
        (lambda m, b: m(b), lambda rows: 1.0, "scalar over the whole batch; received 1.0"),
        (lambda m, b: m(b).mean(0), lambda rows: rows.sum(), r"given 2 samples and returned a tensor of shape \(4,\)"),
        (lambda m, b: (m(b), m(b)[1:]), lambda a, b: a.sum(), r"given 2 samples and returned .* shape \(1, 4\)"),
        (lambda m, b: (m(b), "text"), lambda a, b: a.sum(), "received 'text' in it"),
        (lambda m, b: (), lambda: 0.0, "returned no tensor"),
        (lambda m, b: m(b), lambda rows: rows.detach().sum(), "the loss has no gradient"),
    ],
)
def test_what_cannot_work_is_refused_before_any_gradient(encode_rows: Any, loss: Any, message: str) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(InvalidInputError, match=message):
        CachedLoss(encode_rows, loss, micro_batch=2)(model, torch.randn(5, 3))
    assert model.weight.grad is None


def test_sizes_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="micro_batch"):
        CachedLoss(encode, info_nce, micro_batch=0)
    with pytest.raises(InvalidInputError, match="nothing tells how many samples"):
        CachedLoss(encode, info_nce, micro_batch=2)(TwoTowers(), object())
    model = TwoTowers()
    loss = cached_for(model, 2)(model, make_batch(4))
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidInputError, match="called twice"):
        loss.backward()


RANKS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tests.accumulate.test_cached_loss import TwoTowers, cached_for, info_nce, loss_of_whole, make_batch
from batchwright.accumulate.accumulator import Accumulator
from batchwright.accumulate.cached_loss import CachedLoss

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
batches = [[make_batch(6), make_batch(9)], [make_batch(7), make_batch(5)]]

whole = TwoTowers()
flat = [batch for of_rank in batches for batch in of_rank]
(sum(loss_of_whole(whole, b) * len(b["query"]) for b in flat) / 27).backward()
right = {name: p.grad for name, p in whole.named_parameters()}

def worst(model, grads):
    return max(float((grads[n] - right[n]).norm() / right[n].norm()) for n in right)

count = 0
def hook(state, bucket):
    global count
    count += 1
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

mine = TwoTowers()
ddp = DistributedDataParallel(mine)
ddp.register_comm_hook(None, hook)
cached = cached_for(mine, 4)
for _ in range(2):
    grads = {}
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *a: grads.update({n: p.grad.clone() for n, p in mine.named_parameters()}))
    accumulator = Accumulator(ddp, optimizer, accumulation=2)
    for batch in accumulator.micro_batches(batches[rank]):
        accumulator.backward(cached(ddp, batch))
    assert worst(mine, grads) <= 1e-12, worst(mine, grads)
    assert ddp.require_backward_grad_sync
assert count == 2, count  # one bucket: one synchronisation per window

sharded = TwoTowers()
fixed = sharded.temperature.detach()
del sharded.temperature
for part in (sharded.query, sharded.document, sharded):
    fully_shard(part)
cached = CachedLoss(lambda m, b: m(b), lambda q, d: info_nce(q, d, fixed.exp()), micro_batch=4)
del right["temperature"]
for batch, weight in zip(batches[rank], [len(b["query"]) for b in batches[rank]]):
    sharded.set_requires_gradient_sync(batch is batches[rank][-1])
    # ranks must run as many micro-batches as the others under FSDP2
    cached.micro_batch = -(-len(batch["query"]) // 2)
    (cached(sharded, batch) * (2 * weight / 27)).backward()
grads = {n: p.grad.full_tensor() for n, p in sharded.named_parameters()}
assert worst(sharded, grads) <= 1e-12, worst(sharded, grads)
print("equal", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_synchronise_once_and_agree_with_the_whole(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2
