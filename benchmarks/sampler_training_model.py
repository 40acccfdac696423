"""The text and the model of benchmarks/sampler_training.py: docstrings of Python's own library, by character."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    Texts = Sequence[torch.Tensor]

LONGEST, WIDTH, BLOCKS, HEADS = 512, 48, 2, 4
VOCABULARY, PADDING = 98, -100


def docstrings() -> list[torch.Tensor]:
    """Return the docstrings of the standard library as characters, in an order of no meaning."""
    library = Path(sysconfig.get_path("stdlib"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    texts: set[str] = set()
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "idlelib" in path.parts:
            continue
        nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds))
        texts.update(ast.get_docstring(node) or "" for node in nodes)
    found = [encode(text) for text in sorted(texts) if len(text) > 7]
    return [found[index] for index in np.random.default_rng(0).permutation(len(found))]


def encode(text: str) -> torch.Tensor:
    """Return the characters of a text after a sign that it begins: printable ones, new line, and one for the others."""
    codes = [ord(sign) - 31 if " " <= sign <= "~" else 96 if sign == "\n" else 97 for sign in text]
    return torch.tensor([0, *codes][:LONGEST])


class Block(nn.Module):
    """Attention to what came before, then two layers; samples are padded at the end, so no mask is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next stream."""
        heads = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.layers(self.norms[1](x))
        return x + added


class Transformer(nn.Module):
    """Characters to scores of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        places = self.places(torch.arange(characters.shape[1]))
        scores: torch.Tensor = self.head(self.blocks(self.characters(characters) + places))
        return scores


def collate(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=PADDING)
    return {"inputs": inputs, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], reduction: str = "mean") -> torch.Tensor:
    scores = model(batch["inputs"]).flatten(0, 1)
    return cross_entropy(scores, batch["labels"].flatten(), ignore_index=PADDING, reduction=reduction)


def real_tokens(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] != PADDING).sum())


@torch.no_grad()
def evaluate(model: nn.Module, texts: Texts) -> float:
    """Return the loss per token of texts."""
    in_order = sorted(texts, key=len)
    batches = [collate(in_order[at : at + 32]) for at in range(0, len(in_order), 32)]
    return sum(float(loss_of(model, batch, "sum")) for batch in batches) / sum(map(real_tokens, batches))
