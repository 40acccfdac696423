"""Sentences of different lengths, each of which knows its own number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from batchwright.sampler.token_batch_sampler import TokenBatchSampler

LENGTHS = np.random.default_rng(0).integers(2, 30, 200)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((int(LENGTHS[index]),), index)
        return {"ids": ids, "labels": ids % 3}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def column(name: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)

    return {"ids": column("ids", 0), "labels": column("labels", -100)}


def loader_of(sampler: TokenBatchSampler, workers: int = 0) -> DataLoader[dict[str, torch.Tensor]]:
    ahead: dict[str, Any] = {"prefetch_factor": 4} if workers else {}
    return DataLoader(
        Sentences(),
        batch_sampler=sampler,
        collate_fn=padded,
        num_workers=workers,
        **ahead,
    )


def samples_of(batch: dict[str, torch.Tensor]) -> list[int]:
    found: list[int] = batch["ids"][:, 0].tolist()
    return found


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
