"""What each rank of test_frameworks.py does: real accelerate, and a real Trainer, over batches by budget."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.sampler.sentences import LENGTHS, Sentences, Tagger, loader_of, padded, samples_of


def with_accelerate() -> list[list[int]]:
    from accelerate import Accelerator

    import batchwright as bw
    from batchwright.integrations.accelerate import prepare_loader

    accelerator = Accelerator(cpu=True)
    sampler = bw.TokenBatchSampler(LENGTHS, 120)
    model, loader = accelerator.prepare(Tagger()), prepare_loader(accelerator, loader_of(sampler, 2))
    seen = []
    for _ in range(2):
        for batch in loader:
            seen.append(samples_of(batch))
            accelerator.backward(model(**batch)["loss"])
    return seen


def plainly_prepared() -> str:
    """Return what is said where accelerate would shard the batches once more."""
    from accelerate import Accelerator

    import batchwright as bw
    from batchwright.errors import InvalidInputError

    try:
        sampler = bw.TokenBatchSampler(LENGTHS, 120)
        sampler.track(Accelerator(cpu=True).prepare(loader_of(sampler, 0)))
    except InvalidInputError as error:
        return str(error)
    return "nothing"


def with_trainer(folder: str) -> list[list[int]]:
    from transformers import Trainer, TrainingArguments

    import batchwright as bw
    from batchwright.integrations.transformers import use_batch_sampler

    seen: list[list[int]] = []

    class Noting(Tagger):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append(samples_of({"ids": ids}))
            return super().forward(ids, labels)

    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(Noting(), arguments, train_dataset=Sentences(), data_collator=padded)
    use_batch_sampler(trainer, bw.TokenBatchSampler(LENGTHS, 120))
    trainer.train()
    return seen


def main(folder: str) -> None:
    accelerated = with_accelerate()
    rank = int(os.environ.get("RANK", "0"))
    told = {"accelerate": accelerated, "prepared": plainly_prepared(), "trainer": with_trainer(folder)}
    Path(folder, str(rank)).write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
