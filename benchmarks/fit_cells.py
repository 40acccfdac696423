"""The cells of benchmarks/fit.py: four models, three byte budgets, and the truth about each.

`mlp`, `conv`, `transformer` and `lstm` return workloads, so that `benchmarks/fit_cells.py:mlp` is a target.

The truth of a cell is the largest size whose first five training steps succeed in three fresh processes out of three,
found by bisection with one process per size. Model and optimizer are built first; then the soft RLIMIT_DATA is set to
what the process holds plus the budget; then the steps run, each making its own batch. The finders get the same set-up.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from batchwright import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MIB = 2**20
CLASSES = 10
FEATURES = 64
PIXELS = 32
VOCABULARY = 1024
TOKENS = 48
SEED = 0


class Transformer(nn.Module):
    """Two pre-norm blocks between an embedding and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        logits: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return logits


class Recurrent(nn.Module):
    """Two LSTM layers between an embedding and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        logits: torch.Tensor = self.head(self.lstm(self.embed(ids))[0])
        return logits


def build_mlp(width: int = 8192) -> nn.Module:
    # Few large tensors: what a step costs here is mostly the first touch of its memory.
    layers: list[nn.Module] = []
    for before, after in ((FEATURES, width), (width, FEATURES)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def build_conv(channels: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in ((3, channels, 1), (channels, channels, 2), (channels, 2 * channels, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, CLASSES))


def rows_of_features(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, FEATURES), torch.randint(0, CLASSES, (n,))


def pictures(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, PIXELS, PIXELS), torch.randint(0, CLASSES, (n,))


def tokens(n: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (n, TOKENS))


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def predict_tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def mlp() -> Workload:
    return Workload(model=build_mlp, batch=rows_of_features, loss=classify, optimizer=adam, name="mlp")


def conv() -> Workload:
    return Workload(model=build_conv, batch=pictures, loss=classify, optimizer=adam, name="conv")


def transformer() -> Workload:
    return Workload(model=Transformer, batch=tokens, loss=predict_tokens, optimizer=adam, name="transformer")


def lstm() -> Workload:
    return Workload(model=Recurrent, batch=tokens, loss=predict_tokens, optimizer=adam, name="lstm")


WORKLOADS: dict[str, Callable[[], Workload]] = {"mlp": mlp, "conv": conv, "transformer": transformer, "lstm": lstm}


class Live:
    """A workload's model and optimizer, built, and its bare training step."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(SEED)
        built = workload.model if isinstance(workload.model, nn.Module) else workload.model()
        assert workload.batch is not None
        assert workload.loss is not None
        assert workload.optimizer is not None
        self.batch = workload.batch
        self.loss = workload.loss
        self.model = built.train()
        self.optimizer: torch.optim.Optimizer = workload.optimizer(self.model.parameters())

    def step(self, n: int) -> None:
        """Make a batch of n samples and train on it once."""
        self.loss(self.model, self.batch(n)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def num_bytes(self) -> int:
        """What parameters and buffers take."""
        held = (*self.model.parameters(), *self.model.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def data_bytes() -> int:
    """Return the size of this process's private writable memory, which is what RLIMIT_DATA limits."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def limit_data(limit_bytes: int) -> None:
    """Let the process hold so much and no more; the hard limit stays, so that it can be undone."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@dataclass(frozen=True)
class Cell:
    """One model under one budget, counted on top of what is held once the model is built.

    `near` is where the bisection starts, the truth of an earlier run; it shortens the way and changes nothing.
    """

    model: str
    budget_mib: int
    near: int

    @property
    def name(self) -> str:
        """The model and its budget, as the command takes it."""
        return f"{self.model}:{self.budget_mib}"


CELLS = (
    Cell("mlp", 200, 1321),
    Cell("mlp", 400, 2918),
    Cell("mlp", 800, 6110),
    Cell("conv", 200, 535),
    Cell("conv", 400, 1130),
    Cell("conv", 800, 2300),
    Cell("transformer", 200, 262),
    Cell("transformer", 400, 545),
    Cell("transformer", 800, 1105),
    Cell("lstm", 200, 240),
    Cell("lstm", 400, 500),
    Cell("lstm", 800, 1020),
)


@dataclass(frozen=True)
class Truth:
    """The largest size that fits every time it is asked, and how sharp that is."""

    size: int
    again: int
    """How many processes were asked about it; all said that it fits."""
    next_fitted: int
    """How many of as many said that the next size fits."""
    ever: int
    """The largest size that fitted at least once: small blocks make five steps differ by half a MiB between runs."""
    processes: int


def find_truth(fits: Callable[[Sequence[int]], Sequence[bool]], *, near: int, again: int = 3) -> Truth:
    """Bisect with `fits`, which runs one fresh process per size it is given, and ask the top again until it is sure."""
    verdicts: defaultdict[int, list[bool]] = defaultdict(list)

    def ask(*sizes: int) -> bool:
        for size, verdict in zip(sizes, fits(sizes), strict=True):
            verdicts[size].append(verdict)
        return verdicts[sizes[0]][-1]

    def ask_again(size: int) -> bool:
        missing = again - len(verdicts[size])
        if missing > 0:
            ask(*[size] * missing)
        return all(verdicts[size])

    low, high, stride = near, near + 1, 1
    if ask(low, high):
        while verdicts[high][-1]:
            low, high, stride = high, high + 4 * stride, 4 * stride
            ask(high)
    else:
        while low > 0 and not verdicts[low][-1]:
            low, high, stride = max(0, low - 4 * stride), low, 4 * stride
            ask(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    size, stride = low, 1
    while size > 0 and not ask_again(size):
        size, stride = max(0, size - stride), 2 * stride
    # The strides down may have passed over sizes that are as sure.
    while ask_again(size + 1):
        size += 1
    return Truth(
        size=size,
        again=again,
        next_fitted=sum(verdicts[size + 1]),
        ever=max((n for n, told in verdicts.items() if any(told)), default=0),
        processes=sum(map(len, verdicts.values())),
    )
