"""A small tagger over tokens, some of which do not count: what the tests of accumulation train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH, WIDTH, TAGS = 5, 4, 3
IGNORED = -100
Batch = tuple[torch.Tensor, torch.Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 8)
        self.outer = nn.Linear(8, TAGS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return result


def make_tagger(dtype: torch.dtype = torch.float64) -> Tagger:
    torch.manual_seed(0)
    return Tagger().to(dtype)


def make_batches(sizes: Sequence[int], dtype: torch.dtype = torch.float64, *, empty: Sequence[int] = ()) -> list[Batch]:
    """Make batches of these sizes; the sample at hand decides how many of its tokens count. Those in `empty` have none."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for index, size in enumerate(sizes):
        x = torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        tags = torch.randint(0, TAGS, (size, LENGTH), generator=generator)
        shares = torch.rand(size, 1, generator=generator)
        tags[torch.rand(size, LENGTH, generator=generator) < shares] = IGNORED
        tags[:, 0] = 0
        if index in empty:
            tags[:] = IGNORED
        batches.append((x, tags))
    return batches


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the tokens that count; not a number where none does."""
    x, tags = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), tags.flatten(), ignore_index=IGNORED)


def sample_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over samples."""
    result: torch.Tensor = model(batch[0]).square().mean()
    return result


def count_tokens(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())


class Watched(torch.optim.SGD):
    """SGD that remembers the gradient of each step."""

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.seen: list[list[torch.Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        held = [weight.grad for group in self.param_groups for weight in group["params"]]
        self.seen.append([gradient.clone() for gradient in held if gradient is not None])
        return super().step(closure)
