"""A small GPT that learns characters, on text that ships with Python: the workload of `make demo`.

batchwright tune examples/char_gpt.py:workload --memory 64MiB --steps 120 --noise-batch 32 --branches 16,32,128
"""

from __future__ import annotations

import torch
from torch import nn

import batchwright as bw

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Every stretch of CONTEXT characters, and the character after it."""

    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        number = {letter: index for index, letter in enumerate(letters)}
        self.num_letters = len(letters)
        self.codes = torch.tensor([number[letter] for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.codes[index : index + CONTEXT + 1]


class Layer(nn.Module):
    """Attention to what came before, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what attention and the feed-forward part have to say."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class CharGPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, num_letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(num_letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_letters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the logits at every place."""
        places = self.places(torch.arange(codes.size(1), device=codes.device))
        logits: torch.Tensor = self.head(self.norm(self.layers(self.letters(codes) + places)))
        return logits


def topics() -> str:
    """Python's own help on its topics, half a megabyte of English."""
    from pydoc_data.topics import topics as pages

    return "\n".join(pages[name] for name in sorted(pages))


def loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next character, the mean over all of them."""
    logits: torch.Tensor = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def workload() -> bw.Workload:
    """What the commands are pointed at."""
    data = Windows(topics())
    return bw.Workload(
        model=lambda: CharGPT(data.num_letters),
        data=data,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=8e-3),
    )
