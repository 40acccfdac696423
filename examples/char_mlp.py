"""A character model on text that ships with Python: a workload with data of its own, to measure noise on.

batchwright noise examples/char_mlp.py:workload --effective-batch 64 --steps 200
"""

from __future__ import annotations

import torch
from torch import nn

import batchwright as bw

CONTEXT, WIDTH, HIDDEN = 16, 16, 128


class NextCharacters(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every place in the text: the characters before it, and the one that comes."""

    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        number = {letter: index for index, letter in enumerate(letters)}
        self.num_letters = len(letters)
        self.codes = torch.tensor([number[letter] for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes[index : index + CONTEXT], self.codes[index + CONTEXT]


def topics() -> str:
    """Python's own help on its topics, half a megabyte of English."""
    from pydoc_data.topics import topics as pages

    return "\n".join(pages[name] for name in sorted(pages))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the next character."""
    before, after = batch
    return nn.functional.cross_entropy(model(before), after)


def workload() -> bw.Workload:
    """What the commands are pointed at."""
    data = NextCharacters(topics())
    return bw.Workload(
        model=lambda: nn.Sequential(
            nn.Embedding(data.num_letters, WIDTH),
            nn.Flatten(),
            nn.Linear(CONTEXT * WIDTH, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, data.num_letters),
        ),
        data=data,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    )
