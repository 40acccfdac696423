"""Public training scripts, unmodified: does `estimate` and `fit` on a card answer at once, and is nothing left behind?

    python benchmarks/scripts.py --repositories FOLDER [--only NAME ...]

FOLDER holds a clone of each project named below, at any commit; the commit that ran is printed. Scripts are copied to a
temporary folder and get data made up in their own format there; nothing of theirs is part of batchwright. What they
import (torchvision, timm, datasets, evaluate, gymnasium, tyro) is installed by the one who runs this.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

CARD = "rtx-4090-24gb"


@dataclass(frozen=True)
class PublicScript:
    """A script of a public project, the command typed, and the data it needs."""

    name: str
    project: str
    folder: str
    command: str
    prepare: Callable[[Path], None] = lambda _: None
    limit: int = 4096


def write_idx_digits(folder: Path) -> None:
    """MNIST in its own format, of noise."""
    rng = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 8192), ("t10k", 256)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def write_characters(folder: Path) -> None:
    """nanoGPT's binary tokens."""
    place = folder / "data" / "shakespeare_char"
    rng = np.random.default_rng(0)
    for part, count in (("train", 200_000), ("val", 20_000)):
        rng.integers(0, 65, count, dtype=np.uint16).tofile(place / f"{part}.bin")


def write_words(folder: Path) -> None:
    """A corpus of made-up words for word_language_model."""
    place = folder / "data" / "wikitext-2"
    place.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 60_000), ("valid", 6_000), ("test", 6_000)):
        words = rng.integers(0, 2_000, count)
        lines = [" ".join(f"w{word}" for word in words[at : at + 30]) for at in range(0, count, 30)]
        (place / f"{part}.txt").write_text("\n".join(lines))


def write_cifar(folder: Path) -> None:
    """CIFAR-10 in its own format; torchvision checks sums, which are therefore left to the reader of pickles."""
    place = folder / "data" / "cifar-10-batches-py"
    place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        entry = {
            "data": rng.integers(0, 256, (1000, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, 1000).tolist(),
        }
        (place / name).write_bytes(pickle.dumps(entry))
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(number) for number in range(10)]}))
    # No download, and no sums of files that are made up: said to the library, not to the script.
    (folder / "sitecustomize.py").write_text(
        "import torchvision.datasets.cifar as c\nc.CIFAR10._check_integrity = lambda self: True\n"
        "c.check_integrity = lambda *a: True\n"
    )


def write_pictures(folder: Path) -> None:
    """Pictures in a folder for each class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("a", "b"):
            place = folder / "pictures" / part / kind
            place.mkdir(parents=True)
            for number in range(32):
                Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(place / f"{number}.png")


def write_masks(folder: Path) -> None:
    """Pictures and their masks, for a segmentation."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for kind in ("imgs", "masks"):
        (folder / "data" / kind).mkdir(parents=True, exist_ok=True)
    for number in range(64):
        picture = rng.integers(0, 256, (96, 128, 3), dtype=np.uint8)
        Image.fromarray(picture).save(folder / "data" / "imgs" / f"{number}.png")
        mask = (rng.random((96, 128)) > 0.5).astype(np.uint8) * 255
        Image.fromarray(mask).save(folder / "data" / "masks" / f"{number}.png")


def write_tokenizer(folder: Path) -> None:
    """A text, a table, and a tokenizer of words, so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(500)]
    sentences = [" ".join(rng.choice(words, 40)) for _ in range(3000)]
    (folder / "text.txt").write_text("\n".join(sentences))
    rows = [f"{sentence},{index % 2}" for index, sentence in enumerate(sentences[:800])]
    (folder / "table.csv").write_text("\n".join(["sentence,label", *rows]))
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", "</s>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    build: Any = PreTrainedTokenizerFast
    fast = build(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder / "tokenizer")
    from transformers import BertConfig, GPT2Config

    GPT2Config(n_layer=4, vocab_size=len(vocabulary)).save_pretrained(folder / "gpt2")
    BertConfig(num_hidden_layers=2, vocab_size=len(vocabulary)).save_pretrained(folder / "bert")
    from transformers import BertForSequenceClassification

    classifier: Any = BertForSequenceClassification
    classifier(
        BertConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=2, vocab_size=len(vocabulary))
    ).save_pretrained(folder / "small")
    fast.save_pretrained(folder / "small")


ACCURACY = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int32")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
"""


def write_classification(folder: Path) -> None:
    """The same, and the metric that the script would fetch."""
    write_tokenizer(folder)
    (folder / "accuracy").mkdir(exist_ok=True)
    (folder / "accuracy" / "accuracy.py").write_text(ACCURACY)


_HF = "examples/pytorch"
SCRIPTS = (
    PublicScript(
        "nanoGPT", "karpathy/nanoGPT", ".",
        "train.py --dataset=shakespeare_char --compile=False --gradient_accumulation_steps=1"
        " --batch_size={micro_batch}",
        write_characters,
    ),
    PublicScript("makemore", "karpathy/makemore", ".", "makemore.py --batch-size {micro_batch} --device cuda"),
    PublicScript("minGPT adder", "karpathy/minGPT", ".", "projects/adder/adder.py --trainer.batch_size={micro_batch}"),
    PublicScript(
        "mnist", "pytorch/examples", "mnist", "main.py --batch-size {micro_batch}",
        lambda folder: write_idx_digits(folder.parent / "data"),
    ),
    PublicScript(
        "vae", "pytorch/examples", "vae", "main.py --batch-size {micro_batch}",
        lambda folder: write_idx_digits(folder.parent / "data"),
    ),
    PublicScript(
        "dcgan", "pytorch/examples", "dcgan",
        "main.py --dataset fake --accel --outf out --workers 0 --batchSize {micro_batch}", limit=1024,
    ),
    PublicScript(
        "imagenet", "pytorch/examples", "imagenet", "main.py --dummy -a resnet50 -j 0 -b {micro_batch}", limit=512,
    ),
    PublicScript(
        "word_language_model", "pytorch/examples", "word_language_model", "main.py --accel --batch_size {micro_batch}",
        write_words, limit=512,
    ),
    PublicScript(
        "mnist_rnn", "pytorch/examples", "mnist_rnn", "main.py --accel --batch-size {micro_batch}",
        lambda folder: write_idx_digits(folder.parent / "data"),
    ),
    PublicScript(
        "siamese_network", "pytorch/examples", "siamese_network", "main.py --batch-size {micro_batch}",
        lambda folder: write_idx_digits(folder.parent / "data"),
    ),
    PublicScript("pytorch-cifar", "kuangliu/pytorch-cifar", ".", "main.py", write_cifar),
    PublicScript(
        "Pytorch-UNet", "milesial/Pytorch-UNet", ".", "train.py --batch-size {micro_batch} --scale 1.0", write_masks,
        limit=32,
    ),
    PublicScript(
        "timm", "huggingface/pytorch-image-models", ".",
        "train.py --data-dir pictures --model resnet18 --num-classes 2 -j 1 -b {micro_batch}", write_pictures, limit=32,
    ),
    PublicScript("cleanrl ppo", "vwxyzjn/cleanrl", ".", "cleanrl/ppo.py --num-envs {micro_batch}", limit=64),
    PublicScript(
        "run_clm", "huggingface/transformers", f"{_HF}/language-modeling",
        "run_clm.py --model_type gpt2 --config_name gpt2 --tokenizer_name tokenizer --train_file text.txt --do_train"
        " --block_size 128 --output_dir out --report_to none --per_device_train_batch_size {micro_batch}",
        write_tokenizer, limit=256,
    ),
    PublicScript(
        "run_glue", "huggingface/transformers", f"{_HF}/text-classification",
        "run_glue.py --model_name_or_path small --train_file table.csv --validation_file table.csv --do_train"
        " --output_dir out --report_to none --per_device_train_batch_size {micro_batch}",
        write_classification, limit=256,
    ),
    PublicScript(
        "run_glue_no_trainer", "huggingface/transformers", f"{_HF}/text-classification",
        "run_glue_no_trainer.py --model_name_or_path small --train_file table.csv --validation_file table.csv"
        " --per_device_train_batch_size {micro_batch}",
        write_classification, limit=256,
    ),
)  # fmt: skip


def list_files(folder: Path) -> dict[str, str]:
    """Every file below a folder, with what it holds."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def ask(words: list[str], folder: Path) -> tuple[dict[str, Any], float, str]:
    """Type a command; return its JSON, the seconds it took, and what it said if it failed."""
    start = time.monotonic()
    paths = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "batchwright", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - start
    try:
        return json.loads(done.stdout), seconds, ""
    except json.JSONDecodeError:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return {}, seconds, " / ".join(lines[-4:])


def run(script: PublicScript, repositories: Path) -> str:
    """Ask both questions of one script, and return a row."""
    owner, _, name = script.project.partition("/")
    source = next((place for place in (repositories / name, repositories / owner / name) if place.exists()), None)
    if source is None:
        return f"| {script.name} | {script.project} | not fetched | | | | |"
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, name)
        shutil.copytree(source, place, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        folder = place / script.folder
        script.prepare(folder)
        before = list_files(place)
        words = script.command.split()
        typed = [word.replace("{micro_batch}", "8") for word in words]
        estimate, first, failed = ask(["estimate", "--json", "--on", CARD, "--", "python", *typed], folder)
        fit, second, missing = ask(
            ["fit", "--json", "--on", CARD, "--limit", str(script.limit), "--", "python", *words], folder
        )
        changed = [file for file, mark in list_files(place).items() if before.get(file) != mark]
    peak = f"{estimate['peak_bytes']['device'] / 2**20:,.0f} MiB" if estimate else f"no: {failed}"
    answer = f"{fit['micro_batch']:,} ({len(fit['trials'])} probes)" if fit else f"no: {missing}"
    left = ", ".join(changed) or "none"
    return f"| {script.name} | {script.project} | {peak} | {first:.0f} | {answer} | {second:.0f} | {left} |"


def main() -> None:
    """Run all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    print(
        f"| script | project | peak at 8 on {CARD} | s | largest | s | files changed |\n|---|---|---|---:|---|---:|---|"
    )
    for script in SCRIPTS:
        if not options.only or script.name in options.only:
            print(run(script, options.repositories), flush=True)


if __name__ == "__main__":
    main()
