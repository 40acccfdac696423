"""A small GPT on random tokens: a workload to try every command on.

batchwright estimate examples/tiny_gpt.py:workload --micro-batch 8
"""

from __future__ import annotations

import torch
from torch import nn

import batchwright as bw

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 8192, 256, 4, 4, 1024


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what attention and the MLP have to say."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class TinyGPT(nn.Module):
    """Embeddings, four layers, logits over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at every position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens but the first."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def workload() -> bw.Workload:
    """What the commands are pointed at."""
    return bw.Workload(
        model=TinyGPT,
        batch=lambda n, seq_len=256: torch.randint(0, VOCABULARY, (n, seq_len)),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
