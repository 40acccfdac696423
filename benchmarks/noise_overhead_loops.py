"""The models and loops that benchmarks/noise_overhead.py times: each call of a loop trains on one micro-batch."""

from __future__ import annotations

import importlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from batchwright.accumulate.accumulator import Accumulator
from batchwright.noise.noise_scale import NoiseScale

if TYPE_CHECKING:
    from collections.abc import Callable

    Loop = Callable[[], None]

ACCUMULATION = 4
SAMPLES, LENGTH = 8, 128
WIDTH, HEADS, LAYERS, VOCAB = 128, 4, 4, 1024
ROWS, FEATURES, HIDDEN, CLASSES = 128, 256, 768, 256


class Block(nn.Module):
    """A transformer block of layers that every peer knows: nn.MultiheadAttention hides its weights from them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend causally, then transform."""
        split = (len(x), -1, HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(split).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        added: torch.Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return added


class Transformer(nn.Module):
    """About 1.05 million weights in 52 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next token."""
        scores: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return scores


def perceptron() -> nn.Sequential:
    """About 0.98 million weights in 6 tensors."""
    layers = [nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers)


def make_batches(kind: type[nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    if kind is Transformer:
        text = [torch.randint(0, VOCAB, (SAMPLES, LENGTH + 1), generator=generator) for _ in range(ACCUMULATION)]
        return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in text]
    return [
        (torch.randn(ROWS, FEATURES, generator=generator), torch.randint(0, CLASSES, (ROWS,), generator=generator))
        for _ in range(ACCUMULATION)
    ]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


class Pair:
    """Two models and optimizers over the same memory, so that one has hooks and the other has none.

    Two models of their own differed by up to 2 % with like loops, by where they lay in memory.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.plain, self.hooked = make(), make()
        pairs = list(zip(self.plain.parameters(), self.hooked.parameters(), strict=True))
        for mine, theirs in pairs:
            theirs.data = mine.data
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-5)
        for mine, _ in pairs:
            mine.grad = torch.zeros_like(mine)
        optimizer.step()  # makes the moments
        optimizer.zero_grad()
        self.of_plain = optimizer
        self.of_hooked = torch.optim.AdamW(self.hooked.parameters(), lr=1e-5)
        for mine, theirs in pairs:
            self.of_hooked.state[theirs] = optimizer.state[mine]
        self.batches = make_batches(type(self.plain))

    def sides(self) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
        """Return the side without hooks, and the one that may have some."""
        return (self.plain, self.of_plain), (self.hooked, self.of_hooked)


def with_accumulator(model: nn.Module, optimizer: Any, batches: list[Any], every: int | None, _: int) -> Loop:
    accumulator = Accumulator(model, optimizer, ACCUMULATION)
    noise = None if every is None else NoiseScale(accumulator, every=every)
    micro_batches = accumulator.micro_batches(itertools.cycle(batches))

    def micro_step() -> None:
        accumulator.backward(loss_of(model, next(micro_batches)))
        assert noise is None or not noise.notes

    return micro_step


def own_loop(model: nn.Module, optimizer: Any, batches: list[Any], every: int | None, accumulation: int) -> Loop:
    samples = len(batches[0][0])
    noise = None if every is None else NoiseScale(model, optimizer=optimizer, micro_batch=samples, every=every)
    numbers = itertools.cycle(range(accumulation))

    def micro_step() -> None:
        number = next(numbers)
        (loss_of(model, batches[number]) / accumulation).backward()
        if number == accumulation - 1:
            optimizer.step()
            optimizer.zero_grad()
        assert noise is None or not noise.notes

    return micro_step


# --- peers: the squared norm of each example's gradient, as a step has it


def with_backpack(model: nn.Module, optimizer: Any, batches: list[Any], every: int | None, _: int) -> Loop:
    backpack, extensions = importlib.import_module("backpack"), importlib.import_module("backpack.extensions")
    criterion: nn.Module = nn.CrossEntropyLoss()
    if every is not None:
        model, criterion = backpack.extend(model), backpack.extend(criterion)
    weights: list[Any] = list(model.parameters())

    def step() -> None:
        loss = criterion(model(batches[0][0]), batches[0][1])
        if every is None:
            loss.backward()
        else:
            with backpack.backpack(extensions.BatchL2Grad()):
                loss.backward()
            torch.stack([weight.batch_l2 for weight in weights]).sum(0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_opacus(model: nn.Module, optimizer: Any, batches: list[Any], every: int | None, _: int) -> Loop:
    if every is not None:
        model = importlib.import_module("opacus").GradSampleModule(model)
    weights: list[Any] = list(model.parameters())

    def step() -> None:
        loss_of(model, batches[0]).backward()
        if every is not None:
            torch.stack([weight.grad_sample.flatten(1).square().sum(1) for weight in weights]).sum(0)
            for weight in weights:
                weight.grad_sample = None
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_opacus_ghost(model: nn.Module, optimizer: Any, batches: list[Any], every: int | None, _: int) -> Loop:
    hooked: Any = model
    if every is not None:
        module = importlib.import_module("opacus.grad_sample.grad_sample_module_fast_gradient_clipping")
        hooked = module.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    weights: list[Any] = list(model.parameters())

    def step() -> None:
        loss_of(hooked, batches[0]).backward()
        if every is not None:
            hooked.get_norm_sample()
            for weight in weights:
                weight._norm_sample = None
        optimizer.step()
        optimizer.zero_grad()

    return step
