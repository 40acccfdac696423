"""Networks in which gradients of one tensor meet, for benchmarks/memory_cpu.py --fan-in: heads, skips, scans, ties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from memory_cases import Case, adamw, sgd
from memory_nets import UNet
from torch import nn

from batchwright import Workload

if TYPE_CHECKING:
    from collections.abc import Callable


class ActorCritic(nn.Module):
    """A trunk of tanh layers with a policy and a value."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 6), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take observations."""
        hidden = self.trunk(x)
        return self.policy(hidden), self.value(hidden).squeeze(1)


def ppo_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, actions, advantage = batch
    logits, value = model(x)
    chance = logits.log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)
    ratio = (chance - chance.detach()).exp()
    policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    out: torch.Tensor = policy + 0.5 * (value - advantage).pow(2).mean() - 0.01 * entropy
    return out


class TwinCritics(nn.Module):
    """Soft actor-critic: an actor whose action both critics judge."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2 * 16))
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(32 + 16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take observations, return what the worse critic says less the entropy."""
        mean, spread = self.actor(x).chunk(2, -1)
        noise = torch.randn_like(mean)
        action = torch.tanh(mean + spread.exp() * noise)
        both = torch.cat([x, action], -1)
        worse = torch.min(self.critics[0](both), self.critics[1](both))
        out: torch.Tensor = (spread.sum(-1, keepdim=True) - worse).mean()
        return out


class ManyHeads(nn.Module):
    """A convolutional trunk with a head for each of several tasks."""

    def __init__(self, heads: int = 4, width: int = 32) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        self.heads = nn.ModuleList(nn.Conv2d(width, 5, 1) for _ in range(heads))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Take pictures."""
        features = torch.tanh(self.trunk(x))
        return [head(features) for head in self.heads]


class Scan(nn.Module):
    """A gated linear recurrence, step by step over views of one tensor."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.inputs, self.gates, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take sequences of [batch, time, width]."""
        values, gates = self.inputs(x), torch.sigmoid(self.gates(x))
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in range(x.shape[1]):
            state = gates[:, step] * state + (1 - gates[:, step]) * values[:, step]
            states.append(state)
        out: torch.Tensor = self.out(torch.stack(states, 1))
        return out


class HandMadeGRU(nn.Module):
    """A GRU in plain operators: the state is used four times in each step."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.inputs, self.state = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take sequences of [batch, time, width]."""
        state = x.new_zeros(x.shape[0], x.shape[2])
        for step in range(x.shape[1]):
            a, b, c = self.inputs(x[:, step]).chunk(3, -1)
            d, e, f = self.state(state).chunk(3, -1)
            keep = torch.sigmoid(a + d)
            state = keep * state + (1 - keep) * torch.tanh(c + torch.sigmoid(b + e) * f)
        return state


class Transducer(nn.Module):
    """RNN-T: every frame is joined with every symbol."""

    def __init__(self, width: int = 128, vocab: int = 64) -> None:
        super().__init__()
        self.encoder, self.predictor = nn.Linear(40, width), nn.Embedding(vocab, width)
        self.joint = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.blank, self.symbol = nn.Linear(width, 1), nn.Linear(width, vocab)

    def forward(self, frames: torch.Tensor, symbols: torch.Tensor) -> torch.Tensor:
        """Take frames of [batch, T, 40] and symbols of [batch, U]."""
        met = self.joint(self.encoder(frames)[:, :, None] + self.predictor(symbols)[:, None])
        blank, symbol = F.logsigmoid(self.blank(met)), self.symbol(met).log_softmax(-1)
        out: torch.Tensor = -(blank.squeeze(-1) + symbol.logsumexp(-1) + symbol[..., 0]).mean()
        return out


class Siamese(nn.Module):
    """One encoder for both sides of a pair; every pair of the batch is compared."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Take two sides, return the symmetric contrastive loss."""
        a, b = F.normalize(self.encoder(left), dim=-1), F.normalize(self.encoder(right), dim=-1)
        alike = a @ b.t() * 20
        target = torch.arange(len(left))
        return F.cross_entropy(alike, target) + F.cross_entropy(alike.t(), target)


class DenseBlocks(nn.Module):
    """DenseNet: each layer reads everything before it."""

    def __init__(self, layers: int = 6, growth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + i * growth), nn.ReLU(), nn.Conv2d(3 + i * growth, growth, 3, padding=1))
            for i in range(layers)
        )
        self.head = nn.Linear(3 + layers * growth, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take pictures."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class Highway(nn.Module):
    """Gated residual layers."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.changes = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take rows."""
        for change, gate in zip(self.changes, self.gates, strict=True):
            open_share = torch.sigmoid(gate(x))
            x = open_share * torch.relu(change(x)) + (1 - open_share) * x
        return x


class TiedLM(nn.Module):
    """The embedding is the head as well, and one block is run several times."""

    def __init__(self, vocab: int = 2000, width: int = 128, turns: int = 3) -> None:
        super().__init__()
        self.embed, self.turns = nn.Embedding(vocab, width), turns
        self.block = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take tokens."""
        x = self.embed(tokens)
        for _ in range(self.turns):
            x = x + self.block(x)
        out: torch.Tensor = x @ self.embed.weight.t()
        return out


class DeeplySupervised(nn.Module):
    """A loss after every layer."""

    def __init__(self, width: int = 192, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.heads = nn.ModuleList(nn.Linear(width, 10) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take rows, return the sum of the losses."""
        total = x.new_zeros(())
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            total = total + head(x).pow(2).mean()
        return total


class SoftExperts(nn.Module):
    """Every expert sees every row; a gate weighs them."""

    def __init__(self, width: int = 128, experts: int = 4) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(width, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take rows."""
        x = torch.tanh(self.first(x))
        weights = self.gate(x).softmax(-1)
        together: torch.Tensor = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return x + together


class SharedKeys(nn.Module):
    """Attention whose keys and values all heads and several layers share."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.heads, self.keys, self.values = heads, nn.Linear(width, width // heads), nn.Linear(width, width // heads)
        self.queries = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take sequences."""
        keys, values = self.keys(x)[:, None], self.values(x)[:, None]
        for query in self.queries:
            q = query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            seen = (q @ keys.transpose(-1, -2) / keys.shape[-1] ** 0.5).softmax(-1) @ values
            x = x + seen.transpose(1, 2).flatten(2)
        return x


class HyperNetwork(nn.Module):
    """A small network makes the weights of another, which are used twice."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.maker = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, width * width))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Take rows of [batch, rows, width] and a context for each."""
        weight = self.maker(context).view(-1, self.width, self.width)
        return torch.bmm(torch.tanh(torch.bmm(x, weight)), weight.transpose(1, 2)) + x


class Variational(nn.Module):
    """An autoencoder whose code is sampled and judged."""

    def __init__(self, width: int = 400) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, width), nn.ReLU())
        self.mean, self.spread = nn.Linear(width, 20), nn.Linear(width, 20)
        self.decoder = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 784))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take pictures as rows, return the loss."""
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        seen = F.binary_cross_entropy_with_logits(self.decoder(code), x)
        out: torch.Tensor = seen - 0.5 * (1 + spread - mean.pow(2) - spread.exp()).mean()
        return out


class Pyramid(nn.Module):
    """A feature pyramid: each level is used by the one below it and by its own head."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if i == 0 else width, width, 3, 2, 1) for i in range(3))
        self.across = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.heads = nn.ModuleList(nn.Conv2d(width, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take pictures, return the sum over levels."""
        levels = []
        for down in self.down:
            x = F.silu(down(x))
            levels.append(x)
        total, above = x.new_zeros(()), None
        for across, head, level in reversed(list(zip(self.across, self.heads, levels, strict=True))):
            here = across(level)
            above = here if above is None else here + F.interpolate(above, scale_factor=2.0)
            total = total + head(above).pow(2).mean()
        return total


class Interactions(nn.Module):
    """A recommender: every pair of features is multiplied."""

    def __init__(self, features: int = 16, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(500, width) for _ in range(features))
        self.out = nn.Linear(features * features + features * width, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Take ids of [batch, features]."""
        rows = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        pairs = torch.bmm(rows, rows.transpose(1, 2))
        out: torch.Tensor = self.out(torch.cat([pairs.flatten(1), rows.flatten(1)], 1))
        return out


class PointCloud(nn.Module):
    """Each point is joined with the largest of all points."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.local, self.joined = nn.Linear(3, width), nn.Linear(2 * width, 8)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Take points of [batch, points, 3]."""
        local = torch.relu(self.local(points))
        whole = local.amax(1, keepdim=True).expand_as(local)
        out: torch.Tensor = self.joined(torch.cat([local, whole], -1))
        return out


class GraphNet(nn.Module):
    """Messages along a ring, with a residual and a norm of its own making."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take nodes of [batch, nodes, width]."""
        for layer in self.layers:
            x = x + torch.relu(layer(torch.cat([x, x.roll(1, 1)], -1)))
            x = (x - x.mean(-1, keepdim=True)) * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return x


class Radiance(nn.Module):
    """A radiance field: the input comes back in the middle, and density and colour share a trunk."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(63, width), nn.Linear(width + 63, width)
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take encoded points."""
        hidden = torch.relu(self.second(torch.cat([torch.relu(self.first(x)), x], -1)))
        weight = F.softplus(self.density(hidden))
        return (weight * torch.sigmoid(self.colour(hidden))).pow(2).mean() + weight.mean()


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    out: torch.Tensor = (model(*batch) if isinstance(batch, tuple) else model(batch)).pow(2).mean()
    return out


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    out: torch.Tensor = model(*batch) if isinstance(batch, tuple) else model(batch)
    return out


def fan_in_cases() -> list[Case]:
    def case(
        name: str,
        model: Callable[[], nn.Module],
        batch: Callable[[int], Any],
        size: int,
        loss: Any = mean_square,
        **more: Any,
    ) -> Case:
        return Case(
            name, Workload(model=model, batch=batch, loss=loss, optimizer=more.pop("optimizer", sgd)), size, **more
        )

    def pictures(n: int) -> torch.Tensor:
        return torch.randn(n, 3, 32, 32)

    def sequences(width: int, length: int = 24) -> Callable[[int], torch.Tensor]:
        return lambda n: torch.randn(n, length, width)

    return [
        case(
            "actor-critic, PPO",
            ActorCritic,
            lambda n: (torch.randn(n, 64), torch.randint(6, (n,)), torch.randn(n)),
            2048,
            ppo_loss,
        ),
        case(
            "actor-critic, AdamW, accumulated",
            ActorCritic,
            lambda n: (torch.randn(n, 64), torch.randint(6, (n,)), torch.randn(n)),
            1024,
            ppo_loss,
            optimizer=adamw(),
            accumulation=2,
            clip_norm=0.5,
        ),
        case("twin critics, SAC", TwinCritics, lambda n: torch.randn(n, 32), 1024, own_loss),
        case("four convolutional heads", ManyHeads, pictures, 16, lambda m, b: sum(out.pow(2).mean() for out in m(b))),
        case("scan over views", Scan, sequences(96), 64),
        case("GRU by hand", HandMadeGRU, sequences(96), 128),
        case("RNN-T joint", Transducer, lambda n: (torch.randn(n, 40, 40), torch.randint(64, (n, 12))), 8, own_loss),
        case("siamese, contrastive", Siamese, lambda n: (torch.randn(n, 128), torch.randn(n, 128)), 512, own_loss),
        case("DenseNet block", DenseBlocks, pictures, 16),
        case("highway", Highway, lambda n: torch.randn(n, 256), 1024),
        case("tied embedding, shared block", TiedLM, lambda n: torch.randint(2000, (n, 32)), 16),
        case("a loss after each layer", DeeplySupervised, lambda n: torch.randn(n, 192), 2048, own_loss),
        case("soft mixture of experts", SoftExperts, lambda n: torch.randn(n, 128), 1024),
        case("attention, shared keys", SharedKeys, sequences(128, 64), 16),
        case("hypernetwork", HyperNetwork, lambda n: (torch.randn(n, 32, 64), torch.randn(n, 16)), 64),
        case("variational autoencoder", Variational, lambda n: torch.rand(n, 784), 512, own_loss),
        case("feature pyramid", Pyramid, lambda n: torch.randn(n, 3, 64, 64), 16, own_loss),
        case("U-Net, transposed", lambda: UNet(16, 2), lambda n: torch.randn(n, 3, 32, 32), 8),
        case("U-Net, upsampled", lambda: UNet(16, 2, upsample=True), lambda n: torch.randn(n, 3, 32, 32), 8),
        case("pairwise interactions, DLRM", Interactions, lambda n: torch.randint(500, (n, 16)), 512),
        case("point cloud, largest of all", PointCloud, lambda n: torch.randn(n, 128, 3), 32),
        case("graph of a ring", GraphNet, sequences(128, 32), 32),
        case("radiance field", Radiance, lambda n: torch.randn(n, 63), 4096, own_loss),
    ]
