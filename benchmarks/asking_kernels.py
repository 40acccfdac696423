"""What asking kernels for their scratch costs an estimate, in CPU time.

    python benchmarks/asking_kernels.py

A transformer under bf16 autocast is estimated twice in a process of its own: the first estimate asks the matrix
products and the attention of every new shape, the second finds the answers remembered. Beside it runs the same with
asking switched off, which leaves oneDNN's scratch out. Both run in turn; printed are the medians of the ratios.
An fp32 estimate of another model comes first, so that imports and the start of the trace are in neither.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from unittest.mock import patch

import torch
from torch import nn

import batchwright as bw
from batchwright.trace import cpu_kernels as kernels

ROUNDS = 3
# (width, layers, sequence, micro-batch)
SIZES = {"4 layers, 512 wide": (512, 4, 512, 8)}


class Language(nn.Module):
    """Embedding, encoder layers, a head over the vocabulary."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50_257, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 50_257, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens to logits."""
        logits: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return logits


def workload(width: int, layers: int, length: int) -> bw.Workload:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return bw.Workload(
        model=lambda: Language(width, layers),
        batch=lambda n: torch.randint(0, 50_257, (n, length)),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params),
    )


def estimate_twice(name: str, is_asking: bool) -> dict[str, float]:
    """CPU seconds of the first and the second estimate, and the peak."""
    if not is_asking:
        # No mock: it would keep what it was called with, and no tensor of the trace would ever be freed.
        patch.object(kernels, "can_be_asked", new=lambda func, args: False).start()
    width, layers, length, micro_batch = SIZES[name]
    small = nn.Linear(8, 1)
    bw.estimate(
        bw.Workload(model=small, batch=lambda n: torch.ones(n, 8), loss=lambda model, x: model(x).mean()), micro_batch=1
    )
    seconds = []
    for _ in range(2):
        start = time.process_time()
        peak = bw.estimate(workload(width, layers, length), micro_batch=micro_batch).peak
        seconds.append(time.process_time() - start)
    return {"first": seconds[0], "second": seconds[1], "peak": peak}


def in_a_process(name: str, is_asking: bool) -> dict[str, float]:
    command = [sys.executable, __file__, name, str(int(is_asking))]
    answer: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer


def main() -> None:
    has_units = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, bf16 products by oneDNN: {has_units}")
    columns = ("first, with/without", "second, with/without", "peak, with/without")
    print(f"{'':<20}", *(f"{column:>21}" for column in columns), f"  {ROUNDS} rounds")
    for name in SIZES:
        pairs = []
        for i in range(ROUNDS):
            order = (True, False) if i % 2 else (False, True)
            ran = {is_asking: in_a_process(name, is_asking) for is_asking in order}
            pairs.append((ran[True], ran[False]))
        first, second, peak = (
            statistics.median(asked[key] / off[key] for asked, off in pairs) for key in ("first", "second", "peak")
        )
        print(f"{name:<20} {first:>21.2f} {second:>21.2f} {peak:>21.4f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(estimate_twice(sys.argv[1], sys.argv[2] == "1")))
    else:
        main()
