"""Two gloo ranks under one torchrun, and Lightning in this process: no hang, no duplicate, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sampler.sentences import LENGTHS, Sentences, Tagger, loader_of, padded, samples_of
from tests.torchrun import told_by_ranks

WORKER = Path(__file__).with_name("frameworks_worker.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return told_by_ranks(WORKER, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_two_ranks_see_every_sample_once_per_epoch_in_as_many_steps(told: Any, framework: str) -> None:
    first, second = (rank[framework] for rank in told)
    assert len(first) == len(second)
    half = len(first) // 2
    for epoch in (slice(half), slice(half, None)):
        assert sorted(sample for batch in first[epoch] + second[epoch] for sample in batch) == list(range(len(LENGTHS)))
    assert first[:half] != first[half:]


def test_a_trainer_sees_all_of_every_epoch_and_resumes_as_if_unbroken(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    import batchwright as bw
    from batchwright.integrations.transformers import use_batch_sampler

    def run(folder: str, **more: Any) -> list[list[int]]:
        seen: list[list[int]] = []

        class Noting(Tagger):
            def forward(self, ids: Any, labels: Any) -> dict[str, Any]:
                seen.append(samples_of({"ids": ids}))
                return super().forward(ids, labels)

        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            num_train_epochs=3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_steps=40,
        )
        trainer = Trainer(Noting(), arguments, train_dataset=Sentences(), data_collator=padded)
        use_batch_sampler(trainer, bw.TokenBatchSampler(LENGTHS, 120, waste=0.2))
        trainer.train(**more)
        return seen

    unbroken = run("one")
    epochs = [unbroken[index * len(unbroken) // 3 : (index + 1) * len(unbroken) // 3] for index in range(3)]
    assert all(sorted(s for batch in epoch for s in batch) == list(range(len(LENGTHS))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    resumed = run("two", resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-40"))
    assert resumed == unbroken[40:]


@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_accelerate_goes_on_from_a_state(is_loaded_first: bool) -> None:
    from accelerate import Accelerator

    import batchwright as bw
    from batchwright.integrations.accelerate import prepare_loader

    whole, sampler = (bw.TokenBatchSampler(LENGTHS, 120, waste=0.2) for _ in range(2))
    whole.set_epoch(1)
    batches = [sorted(batch) for batch in whole]
    whole.set_epoch(1)
    for _, _ in zip(range(5), whole.track(loader_of(whole)), strict=False):
        pass
    state = whole.state_dict()
    if is_loaded_first:
        sampler.load_state_dict(state)
    loader = prepare_loader(Accelerator(cpu=True), loader_of(sampler))
    if not is_loaded_first:
        sampler.load_state_dict(state)
    assert [sorted(samples_of(batch)) for batch in loader] == batches[state["segments"][0][1] :]
    for _ in sampler.track(loader):
        pass
    assert sampler.state_dict()["epoch"] == 2


@pytest.mark.slow
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
        max_epochs=4,
        accelerator="cpu",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    sampler = bw.TokenBatchSampler(LENGTHS, 120, waste=0.2)
    trainer.fit(Module(), loader_of(sampler))
    number = len(LENGTHS)
    epochs = [seen[index * number : (index + 1) * number] for index in range(4)]
    assert all(sorted(epoch) == list(range(number)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
