"""Half of a batch by a second backward: any model in a loop of one's own, against gradients made one by one."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from batchwright.errors import InvalidInputError
from batchwright.noise.capture.half_batches import Halves
from batchwright.noise.noise_scale import NoiseScale, NoiseScaleWarning
from tests.noise.regression import seen_by
from tests.oracle.noise_by_hand import flat_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N, T, C = 6, 5, 4
VOCABULARY = 7


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert torch.autograd.backward.__code__.co_filename.endswith("autograd/__init__.py")


@pytest.mark.parametrize("kind", ["matrix_exp", "cayley", "householder", "spectral", "weight", "own"])
def test_weights_that_are_computed_from_weights_are_no_samples(kind: str) -> None:
    """As many rows and columns as samples, so that shapes tell nothing."""

    class Own(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            inverse: torch.Tensor = torch.linalg.inv(weight @ weight.T + torch.eye(N))
            return inverse

    layer, parametrizations = nn.Linear(N, N), nn.utils.parametrizations
    if kind == "spectral":
        parametrizations.spectral_norm(layer).eval()
    elif kind == "weight":
        parametrizations.weight_norm(layer)
    elif kind == "own":
        nn.utils.parametrize.register_parametrization(layer, "weight", Own())
    else:
        parametrizations.orthogonal(layer, orthogonal_map=kind)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(N, 1)).double()
    parameters = list(model.parameters())
    halves = Halves(parameters, [name for name, _ in model.named_parameters()], samples=N)
    hooks = halves.follow_parametrizations(model)
    x = torch.randn(N, N, dtype=torch.float64)
    assert halves.take(model(x).square().sum())
    for hook in hooks:
        hook.remove()
    mine, others = (torch.autograd.grad(model(x[half]).square().sum(), parameters) for half in _both(halves))
    for parameter, one, other in zip(parameters, mine, others, strict=True):
        squares = halves.squares_of(parameter, one + other)
        assert squares is not None
        assert squares.tolist() == pytest.approx([float(one.square().sum()), float(other.square().sum())], rel=1e-9)


def _both(halves: Halves) -> tuple[torch.Tensor, torch.Tensor]:
    return halves.is_mine, ~halves.is_mine


@pytest.mark.filterwarnings("ignore::batchwright.noise.noise_scale.NoiseScaleWarning")
def test_an_orthogonal_model_is_measured_in_a_loop_of_ones_own() -> None:
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(N, N)), nn.Linear(N, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=N)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(N, N)).square().mean().backward()
        optimizer.step()
    assert noise.critical_batch is not None
    assert noise.skipped == {}
    noise.close()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore::batchwright.noise.noise_scale.NoiseScaleWarning", "ignore:.*torch.jit.script")
def test_a_scripted_model_is_cut_in_halves() -> None:
    model: Any = torch.jit.script(nn.Sequential(nn.Linear(C, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=N)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(N, C)).square().mean().backward()
        optimizer.step()
    assert noise.skipped == {}
    assert "RecursiveScriptModule" in noise.notes[0]
    noise.close()


def test_lazy_parameters_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(InvalidInputError, match="the model has lazy parameters"):
        NoiseScale(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=N)


class Agent(nn.Module):
    """Used through its methods, as reinforcement learning does; never called."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(C, 2), nn.Linear(C, 1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.actor(x).pow(2).mean() + (self.critic(x) - 1).pow(2).mean()
        return loss


class Bare(nn.Module):
    """Weights and functions, no layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.shift = nn.Parameter(torch.randn(3, C)), nn.Parameter(torch.zeros(3))
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, C)), nn.Parameter(torch.ones(C))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x * self.scale], 1)
        loss: torch.Tensor = (functional.linear(x, self.w) + self.shift).tanh().pow(2).mean()
        return loss


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(C, C), nn.Parameter(torch.rand(C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        out: torch.Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return out

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self(x) - x).pow(2).mean()
        return loss


class Recurrent(nn.Module):
    def __init__(self, kind: Any, *, time_first: bool = False) -> None:
        super().__init__()
        self.net, self.head, self.time_first = (
            kind(C, C, num_layers=2, batch_first=not time_first),
            nn.Linear(C, 2),
            time_first,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.net(x)
        scores: torch.Tensor = self.head(out[-1] if self.time_first else out[:, -1])
        loss: torch.Tensor = scores
        return loss

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self(x) - 0.3).pow(2).mean()
        return loss


class Attention(nn.Module):
    def __init__(self, *, time_first: bool = False) -> None:
        super().__init__()
        self.net = nn.TransformerEncoderLayer(C, 2, 8, dropout=0.0, batch_first=not time_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self(x) - 0.1 * x).pow(2).mean()
        return loss


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(C, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.PReLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.InstanceNorm2d(4, affine=True),
        )

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.net(x.mT[..., None] * torch.ones(3, dtype=x.dtype)) - 0.2).pow(2).mean()
        return loss


class FlatHead(nn.Module):
    """A tied head behind a flattening, padded tokens, a gain of its own and a penalty on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, C, padding_idx=0)
        self.gain, self.inner = nn.Parameter(torch.rand(C)), nn.Linear(C, C)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 3).long().sum(-1) % VOCABULARY
        hidden = (self.inner(self.tokens(ids)) * self.gain).reshape(-1, C)
        scores = functional.linear(hidden, self.tokens.weight)
        penalty = 0.1 * self.inner.weight.pow(2).sum()
        loss: torch.Tensor = functional.cross_entropy(scores, ids.roll(1, 1).reshape(-1)) + penalty
        return loss


class Normed(nn.Module):
    """Weight norm, and as many features as samples: their dimension must not be taken for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.utils.parametrizations.weight_norm(nn.Linear(C, N))
        self.more = nn.Parameter(torch.randn(N, N))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x) @ self.more.tanh()
        loss: torch.Tensor = out.pow(2).mean() + 0.01 * self.more.pow(2).sum()
        return loss


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Embedding(VOCABULARY, C, sparse=True), nn.Parameter(torch.rand(C))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.table((x.abs() * 3).long().sum(-1) % VOCABULARY) * self.gain).pow(2).mean()
        return loss


class Checkpointed(OwnNorm):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (checkpoint(self, x, use_reentrant=False) - x).pow(2).mean()
        return loss


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "methods": (Agent, 0),
    "bare weights": (Bare, 0),
    "a norm of one's own": (OwnNorm, 0),
    "LSTM": (lambda: Recurrent(nn.LSTM), 0),
    "GRU": (lambda: Recurrent(nn.GRU), 0),
    "LSTM, time first": (lambda: Recurrent(nn.LSTM, time_first=True), 1),
    "attention": (Attention, 0),
    "attention, time first": (lambda: Attention(time_first=True), 1),
    "convolutions and norms": (Images, 0),
    "flat tied head": (FlatHead, 0),
    "weight norm": (Normed, 0),
    "sparse embedding": (Sparse, 0),
    "checkpointing": (Checkpointed, 0),
}


def batch_of(step: int, batch_dim: int, length: int = T) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(N, length, C, generator=generator, dtype=torch.float64)
    return x.transpose(0, 1) if batch_dim else x


def by_hand(model: Any, x: torch.Tensor, batch_dim: int, mine: torch.Tensor) -> list[float]:
    """T and |G|^2 from the gradients of the two halves, each made from its samples alone."""
    gradients, sizes = [], [int(mine.sum()), int((~mine).sum())]
    for chosen in (mine, ~mine):
        gradients.append(flat_gradient(model, model.loss(x.index_select(batch_dim, chosen.nonzero().flatten()))))
    mean = torch.stack([g * n for g, n in zip(gradients, sizes, strict=True)]).sum(0) / N
    trace = sum(n * float((g - mean).square().sum()) for g, n in zip(gradients, sizes, strict=True))
    return [trace, float(mean.square().sum()) - trace / N]


def looked_at(model: Any, batch_dim: int, length: int = T, steps: int = 2) -> tuple[NoiseScale, list[list[float]]]:
    optimizer, twin = torch.optim.SGD(model.parameters(), lr=0.0), copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoiseScaleWarning)
        noise = NoiseScale(model, optimizer=optimizer, micro_batch=N, batch_dim=batch_dim)
        noise._source._examples = None
        noise._source._begin()  # type: ignore[union-attr]
        wanted = []
        for step in range(steps):
            x = batch_of(step, batch_dim, length)
            model.loss(x).backward()
            wanted.append(by_hand(twin, x, batch_dim, noise._source._halves.is_mine))  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    return noise, wanted


@pytest.mark.parametrize("length", [T, N], ids=["", "as many positions as samples"])
@pytest.mark.parametrize("name", CASES)
def test_two_halves_are_those_made_by_themselves(name: str, length: int) -> None:
    build, batch_dim = CASES[name]
    noise, wanted = looked_at(build().double(), batch_dim, length)
    assert noise.skipped == {}
    for found, expected in zip(seen_by(noise), wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
    noise.close()


def test_the_mean_over_halves_is_what_single_examples_give() -> None:
    model = Agent().double()
    noise, _ = looked_at(model, 0, steps=1)
    noise.close()
    x = batch_of(0, 0)
    halves = Halves(list(model.parameters()), [name for name, _ in model.named_parameters()], samples=N)
    traces = []
    for _ in range(300):
        loss = model.loss(x)
        assert halves.take(loss)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        pairs = zip(model.parameters(), gradients, strict=True)
        squares = [(halves.squares_of(weight, gradient), gradient) for weight, gradient in pairs]
        shares = sum(both.sum() * 2 * N for both, _ in squares if both is not None)
        traces.append(float(shares) - N * float(sum(gradient.square().sum() for _, gradient in squares)))
    singles = [flat_gradient(model, model.loss(x[i : i + 1])) for i in range(N)]
    mean = torch.stack(singles).mean(0)
    wanted = sum(float((g - mean).square().sum()) for g in singles) / (N - 1)
    error = torch.tensor(traces).std().item() / len(traces) ** 0.5
    assert abs(sum(traces) / len(traces) - wanted) < 4 * error


class Tied(nn.Module):
    """A loss over pairs: the gradient of one sample depends on all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(C, C)), nn.Parameter(torch.randn(C, C))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x[:, 0] @ self.left).tanh() @ (x[:, 1] @ self.right).tanh().T
        loss: torch.Tensor = functional.cross_entropy(scores, torch.arange(len(x)))
        return loss


class Weighed(nn.Module):
    """A weight that meets the loss when its samples are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_scale = nn.Linear(C, 1), nn.Parameter(torch.zeros(()))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).pow(2).mean() * self.log_scale.exp() - self.log_scale
        return loss


class Reentrant(nn.Module):
    """Weights whose gradients come from a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain, self.outer = nn.Linear(C, C), nn.Parameter(torch.rand(C)), nn.Linear(C, 1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: self.inner(x) * self.gain, x.requires_grad_(), use_reentrant=True)
        loss: torch.Tensor = self.outer(hidden).pow(2).mean()
        return loss


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Reentrant, "use_reentrant=True"),
        (Tied, "tied together"),
        (Weighed, "log_scale: no tensor between it and the loss"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason_and_training_goes_on(build: Any, reason: str) -> None:
    model = build().double()
    twin = copy.deepcopy(model)
    noise = NoiseScale(model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.1)), micro_batch=N)

    def train(each: Any, stepped: Any) -> None:
        for step in range(3):
            each.loss(batch_of(step, 0)).backward()
            stepped.step()
            stepped.zero_grad()

    with pytest.warns(NoiseScaleWarning, match=reason):
        train(model, optimizer)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert noise.critical_batch is None
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    noise.close()


def test_training_is_not_changed_bit_for_bit_and_the_way_is_noted() -> None:
    ends = []
    for is_watched in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(OwnNorm(), nn.Dropout(0.5), nn.Linear(C, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        noise = NoiseScale(model, optimizer=optimizer, micro_batch=N) if is_watched else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoiseScaleWarning)
            for step in range(8):
                model(batch_of(step, 0).float()).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([weight.detach().clone() for weight in model.parameters()])
        if noise is not None:
            assert noise.observations == 8
            assert "a second backward of half of the samples" in noise.notes[0]
            noise.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*ends, strict=True))


def test_a_batch_of_another_size_is_left_out_also_where_no_forward_shows_it() -> None:
    model = Agent().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = NoiseScale(model, optimizer=optimizer, micro_batch=N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoiseScaleWarning)
        for step in range(4):
            model.loss(batch_of(step, 0)[: 4 if step == 3 else N]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert noise.observations == 2
    noise.close()
