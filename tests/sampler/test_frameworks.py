"""Two gloo ranks under one torchrun, and Lightning in this process: no hang, no duplicate, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sampler.sentences import LENGTHS, Tagger, loader_of, samples_of
from tests.torchrun import told_by_ranks

WORKER = Path(__file__).with_name("frameworks_worker.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return told_by_ranks(WORKER, tmp_path_factory)


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_two_ranks_see_every_sample_once_per_epoch_in_as_many_steps(told: Any, framework: str) -> None:
    first, second = (rank[framework] for rank in told)
    assert len(first) == len(second)
    seen = [sample for batch in first + second for sample in batch]
    assert sorted(seen) == sorted([*range(len(LENGTHS))] * 2)


def test_a_loader_that_accelerate_would_shard_once_more_is_refused(told: Any) -> None:
    assert all("accelerate shards this sampler's batches once more" in rank["prepared"] for rank in told)


@pytest.mark.filterwarnings("ignore")  # Lightning's own, of torch's pytree and of loaders without workers
def test_lightning_takes_the_loader_as_it_is(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch

    import batchwright as bw

    seen: list[int] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tagger = Tagger()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            seen.extend(samples_of(batch))
            loss: torch.Tensor = self.tagger(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    sampler = bw.TokenBatchSampler(LENGTHS, 120)
    trainer.fit(Module(), loader_of(sampler))
    assert sorted(seen) == sorted([*range(len(LENGTHS))] * 2)
