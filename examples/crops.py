"""A model that answers a question about an image cut into crops: inference only, and more crops cost more memory.

batchwright fit examples/crops.py:workload --memory 256MiB --limit 64 --shape max_crops=2,4,6,8,10,12,13
"""

from __future__ import annotations

import torch
from torch import nn

import batchwright as bw

PATCHES, PIXELS, WIDTH, HEADS, LAYERS = 64, 3 * 14 * 14, 128, 4, 2
VOCABULARY, PROMPT, ANSWER = 1024, 8, 4


class Layer(nn.Module):
    """Attention over everything seen so far, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        """Return the new positions; `seen` keeps keys and values, so that the image is read once."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if seen:
            k, v = torch.cat([seen[0], k], dim=2), torch.cat([seen[1], v], dim=2)
        seen[:] = [k, v]
        heard = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])
        x = x + self.out(heard.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class Reader(nn.Module):
    """Patches of all crops, then the words of a question, through the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Linear(PIXELS, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def look(self, crops: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
        """Return image and question as positions to read."""
        return torch.cat([self.patches(crops.flatten(1, 2)), self.words(question)], dim=1)

    def forward(self, x: torch.Tensor, seen: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return the logits of the word after the last position."""
        for layer, kept in zip(self.layers, seen, strict=True):
            x = layer(x, kept)
        logits: torch.Tensor = self.head(x[:, -1])
        return logits


Batch = tuple[torch.Tensor, torch.Tensor]


def batch(n: int, max_crops: int = 2) -> Batch:
    """Make n images of `max_crops` crops, with a question for every image."""
    return torch.randn(n, max_crops, PATCHES, PIXELS), torch.randint(0, VOCABULARY, (n, PROMPT))


def loss(model: Reader, inputs: Batch) -> torch.Tensor:
    """One forward: how likely is the first word of an answer."""
    logits = model(model.look(*inputs), [[] for _ in range(LAYERS)])
    return nn.functional.cross_entropy(logits, inputs[1][:, 0])


def generate(model: Reader, inputs: Batch) -> torch.Tensor:
    """Write an answer word by word; keys and values of the whole image stay in memory meanwhile."""
    seen: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    x, words = model.look(*inputs), []
    for _ in range(ANSWER):
        words.append(model(x, seen).argmax(-1, keepdim=True))
        x = model.words(words[-1])
    return torch.cat(words, dim=1)


def workload() -> bw.Workload:
    """No optimizer: forward and generation run under no_grad."""
    return bw.Workload(model=Reader, batch=batch, loss=loss, generate=generate)
