"""How long does it take to predict a step on a card that is not there? CPU seconds of `bw.estimate(on=...)`.

    python benchmarks/simulated_speed.py            GPT-2 small to Llama-3-8B on one card, 70B with FSDP2 over 64
    python benchmarks/simulated_speed.py --only 8b

Each model runs in a process of its own, imports of torch and transformers left out. An estimate traces the step at two
sizes, to say what a further sample costs, and once more on the card as it is where it does not fit. The bars: 20 CPU
seconds for a model on one card, 120 for the 70B. The exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

import batchwright as bw

# name: (layers, width, heads, key heads, mlp), card, devices, bar in CPU seconds
LLAMAS: dict[str, tuple[tuple[int, int, int, int, int], str, int, float]] = {
    "llama-3.2-1b": ((16, 2048, 32, 8, 8192), "a100-80gb", 1, 20.0),
    "llama-3.2-3b": ((28, 3072, 24, 8, 8192), "a100-80gb", 1, 20.0),
    "llama-3-8b": ((32, 4096, 32, 8, 14336), "h200-141gb", 1, 20.0),
    "llama-3-8b, does not fit": ((32, 4096, 32, 8, 14336), "a100-40gb", 1, 20.0),
    "llama-3-70b over 64": ((80, 8192, 64, 8, 28672), "h200-141gb", 64, 120.0),
    "llama-3-70b over 64, near the limit": ((80, 8192, 64, 8, 28672), "a100-80gb", 64, 120.0),
}
GPTS = {"gpt2-small": (12, 768, 12), "gpt2-xl": (48, 1600, 25)}


def build_gpt(name: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = GPTS[name]
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads))  # type: ignore[no-untyped-call]


def build_llama(name: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, key_heads, mlp = LLAMAS[name][0]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=mlp,
        vocab_size=128256,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.to(torch.bfloat16)


def shard(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def measure(name: str) -> dict[str, Any]:
    is_gpt = name in GPTS
    card, devices = ("a100-40gb", 1) if is_gpt else LLAMAS[name][1:3]
    workload = bw.Workload(
        model=lambda: build_gpt(name) if is_gpt else build_llama(name),
        batch=lambda n, seq_len: {key: torch.randint(0, 1000, (n, seq_len)) for key in ("input_ids", "labels")},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        wrap=shard if devices > 1 else None,
        name=name,
    )
    __import__("transformers.models.gpt2" if is_gpt else "transformers.models.llama.modeling_llama")
    start = time.process_time()
    found = bw.estimate(workload, micro_batch=1, shape={"seq_len": 1024 if is_gpt else 2048}, on=card, devices=devices)
    seconds = time.process_time() - start
    return {"card": card, "seconds": seconds, "device_bytes": found.peak_bytes.device, "fits": found.fits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return 0
    kept = True
    print("| model | card | CPU seconds | bar | device, GiB | fits |")
    print("|---|---|---:|---:|---:|---|")
    for name in (*GPTS, *LLAMAS):
        if options.only not in name:
            continue
        bar = 20.0 if name in GPTS else LLAMAS[name][3]
        run = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
        told = json.loads(run.stdout.splitlines()[-1])
        kept &= told["seconds"] <= bar
        print(
            f"| {name} | {told['card']} | {told['seconds']:.1f} | {bar:.0f} | {told['device_bytes'] / 2**30:.1f} "
            f"| {'yes' if told['fits'] else 'no'} |",
            flush=True,
        )
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
