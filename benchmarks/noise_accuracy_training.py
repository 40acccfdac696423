"""Trainings on a finite set, whose exact T and |G|^2 are known at every step: does the interval hold them?

The set is 512 samples of the text of Python's own help pages: eight characters, and the letter that follows. The
model is a perceptron of 7,835 weights. T and |G|^2 come from the gradients of all samples at the weights of each step,
and are averaged over windows that do not overlap; the interval is what `NoiseScale` says of the same window.
"""

from __future__ import annotations

import string
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from batchwright.accumulate.accumulator import Accumulator
from batchwright.noise.noise_scale import NoiseScale

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, CONTEXT, HIDDEN = 512, 8, 32
ACCUMULATION, MICRO_BATCH = 4, 16
BATCH = ACCUMULATION * MICRO_BATCH
WINDOW_STEPS = 100
LETTERS = " " + string.ascii_lowercase
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-3),
}
ORDERS = ("with replacement", "by epochs")


@dataclass(frozen=True)
class Window:
    """One window: the truth, and what was said of it."""

    optimizer: str
    order: str
    seed: int
    number: int
    truth: float
    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def make_set() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, one-hot, and the letters that follow."""
    words = " ".join("".join(c if c in LETTERS else " " for c in text.lower()) for _, text in sorted(topics.items()))
    ids = torch.tensor([LETTERS.index(c) for c in " ".join(words.split())])
    generator = torch.Generator().manual_seed(0)
    starts = torch.randperm(len(ids) - CONTEXT, generator=generator)[:SAMPLES]
    contexts = torch.stack([ids[starts + i] for i in range(CONTEXT)], 1)
    return functional.one_hot(contexts, len(LETTERS)).flatten(1).float(), ids[starts + CONTEXT]


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(CONTEXT * len(LETTERS), HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, len(LETTERS))]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def exact(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, *, is_drawn_without: bool) -> tuple[float, float]:
    """Return T and |G|^2 over the set, from the gradients at the two layers' outputs (written out, no hooks)."""
    first: Any = model[0]
    last: Any = model[2]
    one = functional.linear(x, first.weight, first.bias)
    hidden = torch.tanh(one)
    two = functional.linear(hidden, last.weight, last.bias)
    at_one, at_two = torch.autograd.grad(functional.cross_entropy(two, y, reduction="sum"), [one, two])
    total, squares = 0.0, torch.zeros(len(x), dtype=x.dtype)
    for given, arrived in ((x, at_one), (hidden.detach(), at_two)):
        squares += (given.square().sum(1) + 1) * arrived.square().sum(1)
        total += float((arrived.T @ given / len(x)).square().sum() + arrived.mean(0).square().sum())
    trace = float(squares.mean()) - total
    # Drawn without replacement, samples vary as those of the set do around their own mean: divided by D - 1.
    return trace * (len(x) / (len(x) - 1) if is_drawn_without else 1.0), total


def check_exact() -> float:
    """Return how far `exact` is from gradients made sample by sample by torch.func."""
    x, y = make_set()
    model = make_model(0)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def of_one(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = torch.func.functional_call(model, values, (x[None],))
        return functional.cross_entropy(scores, y[None])

    found = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(weights, x, y)
    rows = torch.cat([value.flatten(1) for value in found.values()], 1)
    mean = rows.mean(0)
    by_hand = float((rows - mean).square().sum(1).mean()), float(mean.square().sum())
    return max(abs(a / b - 1) for a, b in zip(exact(model, x, y, is_drawn_without=False), by_hand, strict=True))


def indices(order: str, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        if order == "by epochs":
            yield from torch.randperm(SAMPLES, generator=generator).split(MICRO_BATCH)
        else:
            yield torch.randint(0, SAMPLES, (MICRO_BATCH,), generator=generator)


def trained(optimizer: str, order: str, seed: int, *, num_windows: int) -> list[Window]:
    """Train, and return every window."""
    x, y = make_set()
    model = make_model(seed)
    is_drawn_without = order == "by epochs"
    accumulator = Accumulator(model, OPTIMIZERS[optimizer](model.parameters()), ACCUMULATION)
    noise = NoiseScale(
        accumulator,
        window=WINDOW_STEPS * BATCH,
        population=SAMPLES if is_drawn_without else None,
    )
    loader = ((x[rows], y[rows]) for rows in indices(order, seed))
    micro_batches = accumulator.micro_batches(loader)
    found = []
    for number in range(num_windows):
        traces = signals = 0.0
        for _ in range(WINDOW_STEPS):
            trace, signal = exact(model, x, y, is_drawn_without=is_drawn_without)
            traces, signals = traces + trace, signals + signal
            for _ in range(ACCUMULATION):
                accumulator.backward(loss_of(model, next(micro_batches)))
        said = noise.critical_batch
        assert said is not None
        assert said.observations == WINDOW_STEPS
        found.append(Window(optimizer, order, seed, number, traces / signals, said.value, said.low, said.high))
    return found
