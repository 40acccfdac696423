"""Two memory rules of thumb that are passed on everywhere, next to the trace of the model they speak of.

    python benchmarks/rules_of_thumb.py

GPT-2 small in fp32 with AdamW at length 1024, and an 8-billion-parameter model (Llama 3's shape) in bf16 at length
4096. About two minutes, half a gigabyte of RAM; nothing is allocated for real.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

import batchwright as bw

GB = 1e9


def main() -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    print("GB of 10^9 bytes, at the peak of the second step")
    print(f"{'':<34} {'weights':>8} {'optimizer':>10} {'activations':>12} {'temporaries':>12} {'peak':>7}")
    for dropout in (0.1, 0.0):
        gpt2 = bw.Workload.from_transformers(transformers.GPT2Config(attn_pdrop=dropout), seq_len=1024)
        for micro_batch in (4, 8, 16):
            show(f"GPT-2 fp32, dropout {dropout}, {micro_batch} x 1024", gpt2, micro_batch)
    for attention in ("sdpa", "eager"):
        for micro_batch in (1, 4):
            show(f"8B bf16 {attention}, {micro_batch} x 4096", eight_billion(attention), micro_batch)


def eight_billion(attention: str) -> bw.Workload:
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    config._attn_implementation = attention

    def build() -> torch.nn.Module:
        model: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        in_bf16: torch.nn.Module = model.to(torch.bfloat16)
        return in_bf16

    return bw.Workload.from_transformers(config, seq_len=4096, model=build)


def show(name: str, workload: bw.Workload, micro_batch: int) -> None:
    found = bw.estimate(workload, micro_batch=micro_batch)
    parts = [(found.parts[part] or 0) / GB for part in ("weights", "optimizer", "activations", "temporaries")]
    print(
        f"{name:<34} {parts[0]:>8.2f} {parts[1]:>10.2f} {parts[2]:>12.1f} {parts[3]:>12.1f} {found.peak / GB:>7.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
