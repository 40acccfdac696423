"""bitsandbytes' own layers on a simulated card: packed weights by their layout, with LoRA of peft over them."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from bitsandbytes.nn import modules as bitsandbytes
from torch import nn

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.simulated.card import SimulatedCard
from batchwright.trace.run import trace_workload

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
    from batchwright.simulated.operators.quantized_layers import quantized_parts

    training = bitsandbytes.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=True)
    assert quantized_parts(training) == []
    assert quantized_parts(nn.Linear(WIDTH, WIDTH)) == []


def rises(build: Any, make: Any, *, card: str = "a100-40gb", needs_input_grad: bool = False) -> tuple[int, int, int]:
    """Return by how much a layer's forward and backward rise over what was live, and the bytes that it holds itself."""
    found: list[tuple[int, int, int]] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if needs_input_grad:
            x.requires_grad_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = model[0](x)  # type: ignore[index]
        forward = torch.cuda.max_memory_allocated() - before
        given = torch.empty_like(out)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if out.requires_grad:
            leaves = [x] if needs_input_grad else [model[0].bias]  # type: ignore[index]
            torch.autograd.grad(out, leaves, given)
        backward = torch.cuda.max_memory_allocated() - before
        held = sum(t.numel() * t.element_size() for t in model[0].state_dict().values())  # type: ignore[index]
        found.append((forward, backward, held))
        value: torch.Tensor = model[1](out.new_zeros(1, 1, dtype=torch.float32)).sum()  # type: ignore[index]
        return value

    workload = bw.Workload(
        model=lambda: nn.Sequential(build(), nn.Linear(1, 1)),
        batch=make,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace_workload(workload, 8, card=SimulatedCard(find_card(card)))
    return found[0]


def linear(
    *,
    bias: bool = False,
    blocksize: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    computed: torch.dtype = torch.bfloat16,
    width: int = WIDTH,
) -> Any:
    def build() -> nn.Module:
        layer: Any = bitsandbytes.Linear4bit(width, WIDTH, bias=bias, compute_dtype=computed)  # type: ignore[no-untyped-call]
        layer.to(dtype)
        layer.weight.blocksize = blocksize
        made: nn.Module = layer
        return made

    return build


def rows_of(number: int) -> Any:
    return lambda n: torch.randn(n, number // n, WIDTH, dtype=torch.bfloat16)


WHOLE = WIDTH * WIDTH * 2


def test_backward_makes_no_weight_where_the_input_needs_no_gradient() -> None:
    _, backward, _ = rises(linear(bias=True), rows_of(64))
    assert backward < WHOLE // 8
    _, backward, _ = rises(linear(bias=True), rows_of(64), needs_input_grad=True)
    assert backward > WHOLE


class FirstRows(nn.Module):
    """A layer that is given the first rows only."""

    def __init__(self, layer: nn.Module, rows: int) -> None:
        super().__init__()
        self.layer, self.rows = layer, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x[: self.rows])
        return out


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "card", "is_whole"),
    [
        (4, WIDTH, torch.bfloat16, "a100-40gb", False),
        (5, WIDTH, torch.bfloat16, "a100-40gb", True),
        (4, WIDTH - 32, torch.bfloat16, "a100-40gb", True),  # no whole number of blocks
        (4, WIDTH, torch.float32, "a100-40gb", False),
        (4, WIDTH, torch.float32, "mi300x-192gb", True),
        (2, WIDTH, torch.float32, "mi300x-192gb", False),
    ],
)
def test_few_rows_are_multiplied_without_the_whole_weight(
    rows: int, width: int, dtype: torch.dtype, card: str, is_whole: bool
) -> None:
    forward, _, _ = rises(
        lambda: FirstRows(linear(width=width, dtype=dtype, computed=dtype)(), rows),
        lambda n: torch.randn(n, width, dtype=dtype),
        card=card,
    )
    assert (forward >= width * WIDTH * dtype.itemsize) == is_whole


def test_backward_holds_the_weight_in_both_types_where_they_differ() -> None:
    _, same, _ = rises(linear(), rows_of(64), needs_input_grad=True)
    _, other, _ = rises(linear(dtype=torch.float32), rows_of(64), needs_input_grad=True)
    assert WHOLE < same < 1.2 * WHOLE
    assert 3 * WHOLE <= other < 3.2 * WHOLE


@pytest.mark.parametrize("blocksize", [32, 64, 256])
def test_blocks_are_as_large_as_the_weight_says(blocksize: int) -> None:
    _, _, held = rises(linear(blocksize=blocksize), rows_of(64))
    blocks = WIDTH * WIDTH // blocksize
    assert held == WIDTH * WIDTH // 2 + blocks + blocks // 256 * 4 + 16 * 4 + 256 * 4


TOKENS, ROWS = 8 * 512, 2000


def tokens(n: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (n, 512))


def embedding(kind: str, width: int = 256, dtype: torch.dtype | None = None) -> Any:
    return lambda: getattr(bitsandbytes, kind)(ROWS, width, dtype=dtype)


@pytest.mark.parametrize("kind", ["Embedding4bit", "EmbeddingNF4", "EmbeddingFP4"])
def test_an_embedding_in_4_bits_unpacks_the_rows_that_are_asked_for(kind: str) -> None:
    forward, _, held = rises(embedding(kind), tokens)
    assert held == ROWS * 256 // 2 + ROWS * 4 * 4 + 16 * 4
    assert forward == TOKENS * (256 // 2 + 4 * 4 + 256 * 4)


def test_an_embedding_whose_rows_are_no_whole_blocks_is_unpacked_entirely() -> None:
    forward, _, held = rises(embedding("Embedding4bit", width=96), tokens)
    assert held == ROWS * 96 // 2 + ROWS * 96 // 64 * 4 + 16 * 4
    assert forward == pytest.approx((ROWS + TOKENS) * 96 * 4, abs=2**10)


@pytest.mark.parametrize(("dtype", "bytes_after"), [(torch.float32, 0), (torch.float16, 2)])
def test_an_embedding_in_8_bits_is_scaled_in_float32(dtype: torch.dtype, bytes_after: int) -> None:
    forward, _, held = rises(embedding("Embedding8bit", dtype=dtype), tokens)
    assert held == ROWS * 256 + ROWS * 4
    assert forward == pytest.approx(TOKENS * (256 * (1 + 4 + bytes_after) + 4), rel=0.01)
