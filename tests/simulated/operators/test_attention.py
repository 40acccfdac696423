"""Attention on the simulated card: which kernel each card chooses, and what of it shows in memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from batchwright.catalogue.cards import find_card
from batchwright.simulated.card import SimulatedCard
from batchwright.simulated.operators.cuda_kernels import EFFICIENT, FLASH, MATH, Attention, choose_attention
from batchwright.trace.run import trace_workload
from tests.device.workloads import make_linear

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from batchwright.trace.storages import Block

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 128, 64


def asked(dtype: torch.dtype = BF16, head_dim: int = 64, value_head_dim: int | None = None, **more: Any) -> Attention:
    heads = {"query_heads": 12, "key_heads": 12}
    return Attention(dtype, head_dim, value_head_dim or head_dim, **{**heads, **more})


class TestTheChoice:
    @pytest.mark.parametrize(
        ("card", "dtype", "kernel"),
        [
            ("a100-40gb", BF16, FLASH),
            ("a100-40gb", FP16, FLASH),
            ("a100-40gb", FP32, EFFICIENT),
            ("a100-40gb", torch.float64, MATH),
            ("h100-80gb", BF16, FLASH),
            ("rtx-4090", BF16, FLASH),
            ("b200", BF16, FLASH),
            ("mi300x", BF16, FLASH),
            ("v100-16gb", BF16, MATH),
            ("v100-16gb", FP16, EFFICIENT),
            ("v100-16gb", FP32, EFFICIENT),
            ("t4", BF16, MATH),
            ("t4", FP16, EFFICIENT),
            ("p100", FP32, EFFICIENT),
        ],
    )
    def test_by_card_and_number_format(self, card: str, dtype: torch.dtype, kernel: str) -> None:
        assert choose_attention(find_card(card), asked(dtype)) == kernel

    @pytest.mark.parametrize(
        ("more", "kernel"),
        [
            ({"has_mask": True}, EFFICIENT),
            ({"has_mask": True, "mask_needs_grad": True}, MATH),
            ({"head_dim": 256}, FLASH),
            ({"head_dim": 264}, EFFICIENT),
            ({"head_dim": 60}, FLASH),
            ({"head_dim": 64, "value_head_dim": 32}, EFFICIENT),
            ({"is_dense": False}, MATH),
            ({"key_heads": 4, "enable_gqa": True}, FLASH),
            ({"key_heads": 4, "enable_gqa": True, "has_mask": True}, MATH),
            ({"key_heads": 5, "enable_gqa": True}, MATH),
            ({"key_heads": 4}, MATH),
        ],
    )
    def test_on_an_a100_in_bfloat16(self, more: dict[str, Any], kernel: str) -> None:
        assert choose_attention(find_card("a100-40gb"), asked(**more)) == kernel

    @pytest.mark.parametrize(
        ("card", "dtype", "head_dim"), [("a100-40gb", BF16, 60), ("a100-40gb", FP32, 62), ("v100-16gb", FP16, 60)]
    )
    def test_no_efficient_kernel_for_an_odd_head(self, card: str, dtype: torch.dtype, head_dim: int) -> None:
        assert choose_attention(find_card(card), asked(dtype, head_dim, has_mask=True)) == MATH

    def test_what_the_user_switched_off_is_not_chosen(self) -> None:
        card = find_card("a100-40gb")
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            assert choose_attention(card, asked()) == EFFICIENT
        with sdpa_kernel(SDPBackend.MATH):
            assert choose_attention(card, asked()) == MATH
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            assert choose_attention(card, asked()) == FLASH
            assert choose_attention(card, asked(has_mask=True)) == MATH
        assert choose_attention(card, asked()) == FLASH


def traced(
    card: str = "a100-40gb",
    *,
    dtype: torch.dtype = BF16,
    head_dim: int = HEAD_DIM,
    key_heads: int = HEADS,
    mask: Callable[[], torch.Tensor | None] = lambda: None,
    backends: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> list[Block]:
    """The blocks of a step that is little more than one attention."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        number: torch.Tensor = model(batch).mean()

        def heads(count: int) -> torch.Tensor:
            return (torch.ones(BATCH, count, LENGTH, head_dim, device="cuda") * number).to(dtype)

        with backends():
            query, key, value = heads(HEADS), heads(key_heads), heads(key_heads)
            found = scaled_dot_product_attention(query, key, value, mask(), **options)
        assert found.shape == (BATCH, HEADS, LENGTH, head_dim)
        assert found.dtype is dtype
        return found.float().mean()

    simulated = SimulatedCard(find_card(card), is_roomy=True)
    changes = trace_workload(make_linear(loss=loss), 1, steps=1, card=simulated).log.changes
    return [block for block, change in changes if change > 0]


def maps(blocks: list[Block]) -> list[Block]:
    """Blocks with a number for every head, query and key."""
    return [b for b in blocks if b.num_bytes >= BATCH * HEADS * LENGTH * LENGTH * 2 and b.shape[-2:] == (LENGTH,) * 2]


def kernels(blocks: list[Block]) -> set[str]:
    found = {b.operator.removeprefix("aten._scaled_dot_product_") for b in blocks if "scaled_dot" in b.operator}
    return {name.removesuffix("_backward") for name in found}


def square_mask(**options: Any) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(LENGTH, LENGTH, device="cuda", **options)


class TestWhatShows:
    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
    def test_on_an_a100_in_bfloat16_no_map_does(self, options: dict[str, Any]) -> None:
        blocks = traced(**options)
        assert kernels(blocks) == {"flash_attention"}
        assert maps(blocks) == []

    def test_on_a_v100_in_bfloat16_maps_do_in_forward_and_in_backward(self) -> None:
        blocks = traced("v100-16gb")
        assert kernels(blocks) == set()
        assert {b.phase for b in maps(blocks)} == {"forward", "backward"}

    @pytest.mark.parametrize(("card", "dtype"), [("v100-16gb", FP16), ("a100-40gb", FP32), ("t4", FP16)])
    def test_where_flash_cannot_run_the_efficient_kernel_keeps_none_either(self, card: str, dtype: torch.dtype) -> None:
        blocks = traced(card, dtype=dtype)
        assert kernels(blocks) == {"efficient_attention"}
        assert maps(blocks) == []

    def test_a_mask_of_truths_becomes_one_to_be_added_of_its_own_size(self) -> None:
        blocks = traced(mask=square_mask(dtype=torch.bool))
        assert kernels(blocks) == {"efficient_attention"}
        assert maps(blocks) == [], "expanded over batch and heads without a copy"
        added = [b for b in blocks if b.operator == "aten.zeros_like"]
        assert [(b.shape, b.num_bytes) for b in added] == [((LENGTH, LENGTH), LENGTH * LENGTH * 2)]

    def test_a_mask_that_is_learnt_makes_maps(self) -> None:
        blocks = traced(mask=square_mask(dtype=BF16, requires_grad=True))
        assert kernels(blocks) == set()
        assert maps(blocks)

    def test_a_mask_whose_rows_are_not_aligned_is_copied(self) -> None:
        def odd() -> torch.Tensor:
            return torch.zeros(LENGTH, LENGTH, dtype=BF16, device="cuda")

        def copies(blocks: list[Block]) -> list[tuple[int, ...]]:
            return [b.shape for b in blocks if b.operator == "aten.constant_pad_nd"]

        assert copies(traced(mask=odd)) == []
        length = 100

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            one = (torch.ones(1, 1, length, 64, device="cuda") * model(batch).mean()).to(BF16)
            mask = torch.zeros(length, length, dtype=BF16, device="cuda")
            return scaled_dot_product_attention(one, one, one, mask).float().mean()

        card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
        log = trace_workload(make_linear(loss=loss), 1, steps=1, card=card).log
        assert copies([b for b, change in log.changes if change > 0]) == [(length, 112)]

    @pytest.mark.parametrize(("head_dim", "padded"), [(64, []), (60, [64] * 3)])
    def test_an_odd_head_is_padded_to_a_multiple_of_eight_for_flash(self, head_dim: int, padded: list[int]) -> None:
        blocks = traced(head_dim=head_dim)
        assert kernels(blocks) == {"flash_attention"}
        forward = [b for b in blocks if b.phase == "forward" and b.operator == "aten.constant_pad_nd"]
        assert [b.shape[-1] for b in forward] == padded

    def test_grouped_heads_keep_their_few_keys(self) -> None:
        blocks = traced(key_heads=2, enable_gqa=True)
        assert kernels(blocks) == {"flash_attention"}
        assert maps(blocks) == []
        apart = BATCH * LENGTH * HEADS * HEAD_DIM * 2

        def held(blocks: list[Block]) -> int:
            return [b.num_bytes for b in blocks if b.part == "workspaces" and "flash" in b.operator].count(apart)

        more = held(blocks) - held(traced())
        assert more == 2, "gradients of keys and values, a head of queries each, until they are summed"

    def test_three_dimensions_take_the_plain_path(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            one = (torch.ones(HEADS, LENGTH, HEAD_DIM, device="cuda") * model(batch).mean()).to(BF16)
            return scaled_dot_product_attention(one, one, one).float().mean()

        card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
        log = trace_workload(make_linear(loss=loss), 1, steps=1, card=card).log
        assert kernels([b for b, _ in log.changes]) == set()

    def test_multi_head_attention_of_torch_in_training_keeps_no_map(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = model(batch, batch, batch, need_weights=False)[0].float().mean()
            return found

        workload = make_linear(
            model=lambda: nn.MultiheadAttention(64, 4, batch_first=True, dtype=BF16),
            batch=lambda n: torch.randn(n, LENGTH, 64, dtype=BF16),
            loss=loss,
        )
        card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
        blocks = [b for b, change in trace_workload(workload, 2, steps=1, card=card).log.changes if change > 0]
        assert kernels(blocks) == {"flash_attention"}
        assert maps(blocks) == []


class TestWhatTheUserAllows:
    def test_only_the_plain_path(self) -> None:
        assert maps(traced(backends=lambda: sdpa_kernel(SDPBackend.MATH)))

    def test_only_the_efficient_kernel(self) -> None:
        assert kernels(traced(backends=lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION))) == {"efficient_attention"}

    def test_only_flash_where_it_cannot_run_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="No available kernel"):
            traced(dtype=FP32, backends=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))

    def test_only_cudnn_keeps_no_map(self) -> None:
        assert maps(traced(backends=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))) == []

    def test_the_setting_is_as_it_was(self) -> None:
        before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
        traced(backends=lambda: sdpa_kernel(SDPBackend.MATH))
        assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before
