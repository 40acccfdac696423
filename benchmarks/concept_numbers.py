"""Recompute the measured numbers of the concept pages: all that name this script.

    python benchmarks/concept_numbers.py

Each table below has the rows of the table in src/batchwright/concepts/en that it stands behind; where a page and
this output differ, the page is wrong. Needs only torch, no accelerator, and about half a minute on two cores.

Promises:
- each table seeds itself, so it prints the same whichever tables ran before it;
- the number of threads is fixed, since it sets the order of sums and with it the last bits;
- what is called an error is the norm of the difference over the norm of the big-batch gradient, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

THREADS = 2
SEEDS = range(5)
MIB = 2**20
DOUBLE = torch.float64

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Table:
    """A table as the page `page` shows it; the first row is the header."""

    page: str
    caption: str
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in self.rows]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join([f"{self.page}: {self.caption}", "", *lines, *(["", self.note] if self.note else [])])


def accumulated_gradient(model: nn.Module, losses: Iterable[Tensor]) -> Tensor:
    """Run backward on each loss in turn, as accumulation does, and return the summed gradient as one vector."""
    model.zero_grad()
    for loss in losses:
        torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative_error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


# batch-size


def noise_by_batch_size() -> Table:
    """Scatter of the mean gradient of B samples, drawn with replacement, relative to B = 1."""
    sizes, draws, samples = (1, 4, 16, 64, 256), 1500, 4096
    torch.manual_seed(0)
    model = nn.Linear(20, 5, dtype=DOUBLE)
    inputs, targets = torch.randn(samples, 20, dtype=DOUBLE), torch.randint(0, 5, (samples,))

    def gradient(chosen: Tensor) -> Tensor:
        return accumulated_gradient(model, [F.cross_entropy(model(inputs[chosen]), targets[chosen])])

    true_gradient = gradient(torch.arange(samples))
    scatter = []
    for size in sizes:
        drawn = torch.stack([gradient(torch.randint(0, samples, (size,))) for _ in range(draws)])
        scatter.append((drawn - true_gradient).square().sum(1).mean().sqrt().item())
    return Table(
        "batch-size",
        f"noise of a mean over B samples, linear classifier, {draws:,} draws per size, relative to B = 1",
        (
            ("B", *map(str, sizes)),
            ("formula", *(f"{1 / math.sqrt(size):#.3g}" for size in sizes)),
            ("measured", *(f"{value / scatter[0]:#.3g}" for value in scatter)),
        ),
    )


# accumulation

SEQUENCE_LENGTHS = (4, 30, 7, 22, 5, 28, 3, 17)
TOKENS_PER_MICRO_BATCH = tuple(sum(SEQUENCE_LENGTHS[i : i + 2]) for i in range(0, 8, 2))


def token_loss_errors(seed: int) -> tuple[float, float]:
    """Return the errors with equal weights and with weights by tokens; 8 sequences, 2 to a micro-batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(50, 16, dtype=DOUBLE), nn.Linear(16, 50, dtype=DOUBLE))
    tokens, labels = torch.randint(0, 50, (8, 30)), torch.randint(0, 50, (8, 30))
    labels[torch.arange(30) >= torch.tensor(SEQUENCE_LENGTHS)[:, None]] = -100

    def loss(part: slice) -> Tensor:
        return F.cross_entropy(model(tokens[part]).flatten(0, 1), labels[part].flatten(), ignore_index=-100)

    full = accumulated_gradient(model, [loss(slice(0, 8))])
    parts = [slice(start, start + 2) for start in range(0, 8, 2)]
    equal = accumulated_gradient(model, (loss(part) / len(parts) for part in parts))
    shares = [count / sum(TOKENS_PER_MICRO_BATCH) for count in TOKENS_PER_MICRO_BATCH]
    by_tokens = accumulated_gradient(model, (loss(part) * s for part, s in zip(parts, shares, strict=True)))
    return relative_error(equal, full), relative_error(by_tokens, full)


def split_error(model: nn.Module, loss: Callable[[slice], Tensor]) -> float:
    """Return the error of 4 micro-batches of 8 against 32 samples at once."""
    full = accumulated_gradient(model, [loss(slice(0, 32))])
    split = accumulated_gradient(model, (loss(slice(start, start + 8)) / 4 for start in range(0, 32, 8)))
    return relative_error(split, full)


def batchnorm_error(seed: int) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 5)).double()
    inputs, targets = torch.randn(32, 20, dtype=DOUBLE), torch.randint(0, 5, (32,))
    return split_error(model, lambda part: F.cross_entropy(model(inputs[part]), targets[part]))


def contrastive_error(seed: int) -> float:
    """InfoNCE at temperature 0.1 between each sample and a noisy second view of it."""
    torch.manual_seed(seed)
    model = nn.Linear(20, 8, dtype=DOUBLE)
    inputs = torch.randn(32, 20, dtype=DOUBLE)
    views = inputs + 0.3 * torch.randn(32, 20, dtype=DOUBLE)

    def loss(part: slice) -> Tensor:
        left, right = F.normalize(model(inputs[part]), dim=-1), F.normalize(model(views[part]), dim=-1)
        return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))

    return split_error(model, loss)


def accumulation_errors() -> Table:
    def lowest_to_highest(errors: Iterable[float]) -> str:
        found = sorted(errors)
        return f"{found[0]:.2f}-{found[-1]:.2f}"

    equal, by_tokens = zip(*map(token_loss_errors, SEEDS), strict=True)
    *first, last = map(str, TOKENS_PER_MICRO_BATCH)
    return Table(
        "accumulation",
        f"relative error of the accumulated gradient, lowest and highest of {len(SEEDS)} seeds",
        (
            ("toy model, 4 micro-batches", "equal weights", "right weights"),
            (
                f"token loss, {', '.join(first)} and {last} tokens",
                lowest_to_highest(equal),
                f"at most {max(by_tokens):.0e}",
            ),
            ("BatchNorm, 32 samples as 4 x 8", lowest_to_highest(map(batchnorm_error, SEEDS)), "none exist"),
            ("contrastive, 32 samples as 4 x 8", lowest_to_highest(map(contrastive_error, SEEDS)), "none exist"),
        ),
    )


def windows(loader: Iterable[Batch], accumulation: int) -> Iterator[list[Batch]]:
    batches = iter(loader)
    while window := list(islice(batches, accumulation)):
        yield window


def gradients_of_the_loop(sizes: list[int], accumulation: int) -> list[Tensor]:
    """Train through the loop of the page on micro-batches of `sizes`; return the gradient at each update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = torch.randn(sum(sizes), 20, dtype=DOUBLE), torch.randint(0, 5, (sum(sizes),))
    gradients = []
    for window in windows(
        zip(inputs.split_with_sizes(sizes), targets.split_with_sizes(sizes), strict=True), accumulation
    ):
        total = sum(len(y) for _, y in window)
        losses = (F.cross_entropy(model(x), y) * len(y) / total for x, y in window)
        gradients.append(accumulated_gradient(model, losses))
        optimizer.step()
    return gradients


def loop_errors() -> Table:
    """The page's loop against one big batch per update; the second window starts from the updated weights."""
    micro_batches = [8, 8, 8, 8, 8, 5]
    in_windows = [micro_batches[:4], micro_batches[4:]]
    accumulated = gradients_of_the_loop(micro_batches, accumulation=4)
    at_once = gradients_of_the_loop([sum(window) for window in in_windows], accumulation=1)
    errors = map(relative_error, accumulated, at_once)
    return Table(
        "accumulation",
        f"the loop against big batches, {sum(micro_batches)} samples",
        (
            ("window", "relative error"),
            *((", ".join(map(str, w)), f"{error:.0e}") for w, error in zip(in_windows, errors, strict=True)),
        ),
    )


# memory

HIDDEN, HEADS = 768, 12


class GPT2Layer(nn.Module):
    """One layer of GPT-2 small without dropout, its attention written out or left to SDPA."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, hidden) to the same shape."""
        batch, length, _ = x.shape
        qkv: Tensor = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, HIDDEN // HEADS)
        mixed = self.attend(*qkv.transpose(1, 3).unbind(2))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        widened = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        narrowed: Tensor = self.down(widened)
        return x + narrowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over (batch, heads, length, head size)."""
        if self.eager:
            # The mask is added, which backward needs nothing for; masked_fill would save it as well.
            mask = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(1)
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
            return scores.softmax(-1) @ v
        # Named, so that a build without the flash kernel fails here instead of measuring the math fallback.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def saved_mib(layer: GPT2Layer, length: int) -> float:
    """Return what forward keeps for backward, the weights left out and each storage counted once."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    # Holding the storages keeps them alive: an address that is freed could come back and be counted as seen.
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(1, length, HIDDEN, dtype=torch.bfloat16, requires_grad=True))
    return sum(storage.nbytes() for storage in saved.values()) / MIB


def activation_bytes() -> Table:
    torch.manual_seed(0)
    lengths = (512, 1024, 2048)
    rows, worst = [], 0.0
    for name, eager in (("eager attention", True), ("SDPA", False)):
        layer = GPT2Layer(eager=eager).bfloat16()
        measured = [saved_mib(layer, length) for length in lengths]
        # Korthikanti et al. 2022 without the dropout terms; SDPA does not store the attention matrix.
        formula = [(32 * s * HIDDEN + (2 * HEADS * s**2 if eager else 0)) / MIB for s in lengths]
        worst = max(worst, *(abs(m / f - 1) for m, f in zip(measured, formula, strict=True)))
        rows.append((name, *(f"{mib:.1f}" for mib in measured)))
    return Table(
        "memory",
        "bytes saved for backward in MiB, one GPT-2 layer, bf16, no dropout, one sample",
        (("length s", *map(str, lengths)), *rows),
        f"largest difference from 32 x s x b x h + 2 x a x s^2 x b (first term only for SDPA): {100 * worst:.2f} %",
    )


# critical-batch


def estimator_variants() -> Table:
    """The noise scale of linear regression from m micro-batch gradients per step, by five recipes.

    Gradients are x (x.d + e) with x and e standard normal and |d| = 1. Their mean is d, so |G|^2 = 1, and
    E |g|^2 = (n + 2) + n for n inputs, so tr(Sigma) = 2n + 1.
    """
    inputs, batch, steps, chunk = 50, 32, 20_000, 500
    micro_batch_counts = (2, 8, 32)
    torch.manual_seed(0)
    direction = F.normalize(torch.randn(inputs, dtype=DOUBLE), dim=0)
    # All m see the same samples, so that the columns differ by m alone.
    squares: dict[int, list[Tensor]] = {m: [] for m in micro_batch_counts}
    signals = []
    for _ in range(steps // chunk):
        x = torch.randn(chunk, batch, inputs, dtype=DOUBLE)
        gradients = x * (x @ direction + torch.randn(chunk, batch, dtype=DOUBLE))[..., None]
        signals.append(gradients.mean(1).square().sum(-1))
        for m in micro_batch_counts:
            squares[m].append(gradients.view(chunk, m, batch // m, inputs).mean(2).square().sum(-1).mean(1))
    p = torch.cat(signals)
    columns = []
    for m in micro_batch_counts:
        q = torch.cat(squares[m])
        trace = batch / m * m / (m - 1) * (q - p)
        signal = p - trace / batch
        columns.append(
            (
                f"m = {m}",
                f"{trace.mean() / signal.mean():.1f}",
                f"{trace.clamp(min=0).mean() / signal.clamp(min=0).mean():.1f}",
                f"{(trace / signal).median():.1f}",
                f"{trace.mean() / p.mean():.1f}",
                f"{(q - p).mean() / p.mean():.1f}",
            )
        )
    names = (
        "variant",
        "right: ratio of the averages",
        "negatives clipped at each step",
        "median of per-step ratios",
        "noise left in the signal",
        "naive, no correction",
    )
    return Table(
        "critical-batch",
        f"linear regression with {inputs} inputs, true value {2 * inputs + 1}, B = {batch}, {steps:,} steps",
        tuple(zip(names, *columns, strict=True)),
    )


def main() -> None:
    torch.set_num_threads(THREADS)
    for table in (noise_by_batch_size, accumulation_errors, loop_errors, activation_bytes, estimator_variants):
        print(table(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
