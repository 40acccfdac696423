"""The large part of benchmarks/memory_cpu.py: how long a prediction takes, and how much memory.

    python benchmarks/memory_large.py 8B    predict one of the billions in this process; prints JSON

Billions are predicted each in a process of its own, whose whole CPU time and peak resident memory count, imports too.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from memory_cases import Case
from memory_measure import measure, predict, print_head, print_row

from batchwright import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# Typed only in part, so taken as untyped.
hf: Any = import_module("transformers")

# The shapes of Qwen3-4B and of Llama-3-8B, as Llama models.
BILLIONS: dict[str, dict[str, Any]] = {
    "4B": {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936},
    "8B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256},
}
SEQ_LEN = 4096


def cases_at_8_gib() -> list[Case]:
    bert = hf.BertConfig(architectures=["BertForMaskedLM"])
    return [
        Case("GPT-2 small, 1024 tokens", Workload.from_transformers(hf.GPT2Config(), seq_len=1024), 2),
        Case("BERT base, 512 tokens", Workload.from_transformers(bert, seq_len=512), 9),
    ]


def compare_at_8_gib() -> None:
    cases = cases_at_8_gib()
    predict(cases[0])
    print_head()
    for case in cases:
        print_row(measure(case))


def billions(size: str) -> Case:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": SEQ_LEN}
    config = hf.LlamaConfig(**heads, **BILLIONS[size])
    workload = Workload.from_transformers(config, seq_len=SEQ_LEN, model=in_bf16(config))
    return Case(f"{size} bf16, {SEQ_LEN} tokens, AdamW", workload, 1)


def in_bf16(config: Any) -> Callable[[], nn.Module]:
    return lambda: hf.LlamaForCausalLM(config).to(torch.bfloat16).train()


def predict_billions() -> None:
    print("| model | parameters | predicted GiB | CPU s, whole process | peak resident GB |")
    print("|---|---:|---:|---:|---:|")
    for size in BILLIONS:
        told = subprocess.run([sys.executable, __file__, size], check=True, capture_output=True, text=True).stdout
        found = json.loads(told.splitlines()[-1])
        cells = [
            found["name"],
            f"{found['parameters'] / 1e9:.2f}B",
            f"{found['bytes'] / 2**30:.2f}",
            f"{found['seconds']:.1f}",
            f"{found['resident'] / 1e9:.2f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
    print()


def main() -> None:
    case = billions(sys.argv[1])
    num_bytes, _ = predict(case)
    used = resource.getrusage(resource.RUSAGE_SELF)
    with torch.device("meta"):
        build: Any = case.workload.model
        parameters = sum(p.numel() for p in build().parameters())
    found = {
        "name": case.name,
        "parameters": parameters,
        "bytes": num_bytes,
        "seconds": used.ru_utime + used.ru_stime,
        "resident": used.ru_maxrss * 1024,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
