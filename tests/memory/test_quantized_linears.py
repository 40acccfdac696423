"""bitsandbytes' own layers on a simulated card: packed weights by their layout, with LoRA of peft over them."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from bitsandbytes.nn import modules as bitsandbytes
from torch import nn

import batchwright as bw

WIDTH, LAYERS = 1024, 4
WEIGHTS = LAYERS * WIDTH * WIDTH
BLOCKS = WEIGHTS // 64


def four_bits(*, double: bool) -> Any:
    return lambda: bitsandbytes.Linear4bit(  # type: ignore[no-untyped-call]
        WIDTH, WIDTH, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4"
    )


def eight_bits() -> nn.Module:
    layer: nn.Module = bitsandbytes.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    return layer


def adapted(layer: Any, rank: int = 8) -> Any:
    def build() -> nn.Module:
        model = nn.Sequential(*(layer() for _ in range(LAYERS))).to(torch.bfloat16)
        names = [str(number) for number in range(LAYERS)]
        whole: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=names))
        return whole

    return build


def estimate(build: Any, micro_batch: int = 16) -> bw.Estimate:
    workload = bw.Workload(
        model=build,
        batch=lambda n: torch.randn(n, WIDTH, dtype=torch.bfloat16),
        loss=lambda model, x: model(x).float().square().mean(),
        optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-3),
    )
    return bw.estimate(workload, micro_batch=micro_batch, on="a100-40gb")


@pytest.mark.parametrize(
    ("layer", "packed"),
    [
        (four_bits(double=False), WEIGHTS // 2 + BLOCKS * 4),
        (four_bits(double=True), WEIGHTS // 2 + BLOCKS + BLOCKS // 256 * 4),
        (eight_bits, WEIGHTS + LAYERS * WIDTH * 4),
    ],
)
def test_weights_take_what_their_layout_says(layer: Any, packed: int) -> None:
    found = estimate(adapted(layer))
    adapters = LAYERS * 2 * 8 * WIDTH
    assert found.parts["weights"] is not None
    # Adapters are in float32 over packed layers, as peft has them, or in the model's type.
    extra = found.parts["weights"] - packed
    assert 2 * adapters <= extra <= 4 * adapters + 16 * 2**10


def test_a_whole_weight_is_made_for_every_product_and_dropped() -> None:
    found = estimate(adapted(four_bits(double=True)), micro_batch=1)
    one = WIDTH * WIDTH * 2
    temporaries = found.peak - sum(
        found.parts[part] or 0 for part in ("weights", "optimizer", "gradients", "workspaces")
    )
    assert one <= temporaries < 2 * one


def test_eight_bits_keep_their_input_and_four_bits_do_not() -> None:
    def per_sample(layer: Any) -> float:
        small, large = (estimate(adapted(layer), micro_batch=n).peak for n in (2**14, 2**15))
        return (large - small) / 2**14

    assert per_sample(eight_bits) - per_sample(four_bits(double=True)) > WIDTH * 2


def test_a_live_model_is_not_touched() -> None:
    model = adapted(four_bits(double=True))()
    before = [type(part) for part in model.modules()]
    estimate(model)
    assert [type(part) for part in model.modules()] == before


def test_layers_that_train_in_16_bits_are_traced_as_they_are() -> None:
    from batchwright.memory.quantized_linears import quantized_parts

    training = bitsandbytes.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=True)
    assert quantized_parts(training) == []
    assert quantized_parts(nn.Linear(WIDTH, WIDTH)) == []
