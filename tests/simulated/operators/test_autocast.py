"""`torch.autocast("cuda")` on the simulated card: CUDA's own lists, its cache of weights, and nothing left behind."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from batchwright.catalogue.cards import find_card
from batchwright.simulated.card import SimulatedCard
from batchwright.simulated.operators import autocast
from batchwright.trace.run import trace_workload
from tests.device.workloads import make_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchwright.trace.storages import Block

WIDTH, SAMPLES = 256, 64
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WEIGHT = (WIDTH, WIDTH)

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
THE_LISTS_READ = pytest.mark.skipif(
    not torch.__version__.startswith("2.13") or not HEADER.exists(), reason="the lists are those of torch 2.13"
)


def changes_in(loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], **fields: Any) -> list[tuple[Block, int]]:
    """The log of one step of a Linear without bias."""
    fields = {"model": lambda: nn.Linear(WIDTH, WIDTH, bias=False), "batch": lambda n: torch.randn(n, WIDTH), **fields}
    card = SimulatedCard(find_card("a100-40gb"), is_roomy=True)
    return trace_workload(make_linear(loss=loss, **fields), SAMPLES, steps=1, card=card).log.changes


def born(changes: list[tuple[Block, int]], operator: str, phase: str = "forward") -> list[int]:
    return [b.num_bytes for b, change in changes if change > 0 and (b.operator, b.phase) == (operator, phase)]


def casts_of_the_weight(changes: list[tuple[Block, int]]) -> list[str]:
    """When a copy of the weight was made and dropped, in order."""
    is_cast = [(b, c) for b, c in changes if (b.operator, b.shape, b.phase) == ("aten._to_copy", WEIGHT, "forward")]
    return ["made" if change > 0 else "dropped" for _, change in is_cast]


def inside(check: Callable[[nn.Module, torch.Tensor], None], dtype: torch.dtype = BF16) -> None:
    """Run a check inside `autocast("cuda")` in a step on the card."""
    ran = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype):
            check(model, batch)
            ran.append(True)
            result: torch.Tensor = model(batch).float().mean()
            return result

    changes_in(loss)
    assert ran


class TestTheBytes:
    @pytest.mark.parametrize("dtype", [FP16, BF16])
    def test_a_product_takes_half(self, dtype: torch.dtype) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype):
                result: torch.Tensor = model(batch).mean()
                return result

        plain = born(changes_in(lambda model, batch: model(batch).mean()), "aten.mm")
        assert plain == [SAMPLES * WIDTH * 4]
        assert born(changes_in(loss), "aten.mm") == [SAMPLES * WIDTH * 2]

    def test_the_products_of_backward_too_and_the_gradient_is_in_full_again(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda"):
                result: torch.Tensor = model(batch).mean()
                return result

        changes = changes_in(loss)
        assert born(changes, "aten.mm", "backward") == [WIDTH * WIDTH * 2]
        assert born(changes, "gradient", "backward") == [WIDTH * WIDTH * 4]

    def test_a_sum_in_float32_makes_no_copy_of_what_it_reads(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda"):
                result: torch.Tensor = model(batch).sum()
                return result

        changes = changes_in(loss)
        assert born(changes, "aten.sum") == [4]
        assert SAMPLES * WIDTH * 4 not in born(changes, "aten._to_copy")

    def test_a_power_makes_one(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda"):
                result: torch.Tensor = model(batch).pow(2).mean()
                return result

        assert SAMPLES * WIDTH * 4 in born(changes_in(loss), "aten._to_copy")


LOWER: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda model, x, h: model(x),
    "matmul": lambda model, x, h: x @ x.T,
    "einsum": lambda model, x, h: torch.einsum("ni,oi->no", x, model.weight),
    "bmm": lambda model, x, h: torch.bmm(x[None], x.T[None]),
    "addmm": lambda model, x, h: torch.addmm(x, x, model.weight),
    "conv1d": lambda model, x, h: F.conv1d(x[None], model.weight[:8, :SAMPLES, None]),
    "attention": lambda model, x, h: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "what is on no list stays as it is": lambda model, x, h: F.gelu(h),
    "a promotion of two alike": lambda model, x, h: torch.addcmul(h, h, h),
}
FULL: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "layer_norm": lambda model, x, h: F.layer_norm(h, (WIDTH,)),
    "rms_norm": lambda model, x, h: F.rms_norm(h, (WIDTH,)),
    "group_norm": lambda model, x, h: F.group_norm(h, 4),
    "softmax": lambda model, x, h: torch.softmax(h, -1),
    "log_softmax": lambda model, x, h: torch.log_softmax(h, -1),
    "cross_entropy": lambda model, x, h: F.cross_entropy(h, torch.zeros(SAMPLES, dtype=torch.long, device="cuda")),
    "mse_loss": lambda model, x, h: F.mse_loss(h, h),
    "sum": lambda model, x, h: h.sum(),
    "sum over a dimension": lambda model, x, h: h.sum(0),
    "cumsum": lambda model, x, h: h.cumsum(0),
    "norm": lambda model, x, h: h.norm(),
    "exp": lambda model, x, h: h.exp(),
    "pow": lambda model, x, h: h**2,
    "a promotion to the wider": lambda model, x, h: torch.addcmul(h, h, x),
    "an addition": lambda model, x, h: h + x,
    "cat": lambda model, x, h: torch.cat([h, x]),
    "stack": lambda model, x, h: torch.stack([h, x]),
}


class TestTheLists:
    def test_operators_of_the_lower_list_and_of_none(self) -> None:
        def check(model: nn.Module, batch: torch.Tensor) -> None:
            hidden = model(batch)
            assert {name: run(model, batch, hidden).dtype for name, run in LOWER.items()} == dict.fromkeys(LOWER, BF16)

        inside(check)

    def test_operators_of_the_full_list_and_promotions(self) -> None:
        def check(model: nn.Module, batch: torch.Tensor) -> None:
            hidden = model(batch)
            assert hidden.dtype is BF16
            assert {name: run(model, batch, hidden).dtype for name, run in FULL.items()} == dict.fromkeys(FULL, FP32)

        inside(check)

    def test_a_dtype_that_was_asked_for_stays(self) -> None:
        def check(model: nn.Module, batch: torch.Tensor) -> None:
            assert model(batch).sum(dtype=BF16).dtype is BF16
            assert torch.softmax(model(batch), -1, dtype=BF16).dtype is BF16

        inside(check)

    def test_float64_and_whole_numbers_are_left_alone(self) -> None:
        def check(model: nn.Module, batch: torch.Tensor) -> None:
            assert (batch.double() @ batch.double().T).dtype is torch.float64
            assert torch.arange(4, device="cuda").sum().dtype is torch.int64

        inside(check)

    @THE_LISTS_READ
    @pytest.mark.parametrize(
        ("macro", "ours"),
        [
            ("AT_FORALL_LOWER_PRECISION_FP", autocast._LOWER),
            ("AT_FORALL_FP32", autocast._FLOAT32),
            ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast._FLOAT32_RESULT),
            ("AT_FORALL_PROMOTE", autocast._WIDEST),
        ],
    )
    def test_they_are_those_of_the_header_that_torch_ships(self, macro: str, ours: str) -> None:
        body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*\n)", HEADER.read_text())
        assert body is not None
        theirs = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
        assert sorted(ours.split()) == sorted(f"{name}.{overload}".rstrip(".") for name, overload in theirs)

    def test_a_loss_that_overflows_is_refused(self) -> None:
        def check(model: nn.Module, batch: torch.Tensor) -> None:
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(model(batch).sigmoid(), model(batch).sigmoid())

        inside(check)


def used_twice(*, between: Callable[[], object] = lambda: None, **options: Any) -> Callable[..., torch.Tensor]:
    """A loss that uses the model twice within one autocast, and once outside."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cuda", **options):
            model(batch)
            between()
            model(batch)
        result: torch.Tensor = model(batch).mean()
        return result

    return loss


class TestTheCacheOfWeights:
    def test_a_weight_used_twice_is_cast_once_and_dropped_at_the_end(self) -> None:
        assert casts_of_the_weight(changes_in(used_twice())) == ["made", "dropped"]

    def test_the_next_region_casts_it_anew(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for _ in range(2):
                    with torch.autocast("cuda"):
                        model(batch)
            result: torch.Tensor = model(batch).mean()
            return result

        assert casts_of_the_weight(changes_in(loss)) == ["made", "dropped"] * 2

    def test_a_region_within_another_keeps_it(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.autocast("cuda"):
                for region in (nullcontext(), torch.autocast("cuda"), torch.autocast("cuda", enabled=False)):
                    with region:
                        model(batch)
                model(batch)
            result: torch.Tensor = model(batch).mean()
            return result

        assert casts_of_the_weight(changes_in(loss)) == ["made", "dropped"]

    def test_without_the_cache_each_use_casts(self) -> None:
        assert casts_of_the_weight(changes_in(used_twice(cache_enabled=False))) == ["made", "dropped"] * 2

    def test_clearing_it_by_hand_casts_anew(self) -> None:
        assert (
            casts_of_the_weight(changes_in(used_twice(between=lambda: torch.clear_autocast_cache())))
            == ["made", "dropped"] * 2
        )

    def test_what_is_no_weight_is_cast_each_time(self) -> None:
        assert born(changes_in(used_twice()), "aten._to_copy").count(SAMPLES * WIDTH * 2) == 2


class TestWhatTorchAnswers:
    def test_inside_and_outside(self) -> None:
        answers = []

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            def ask() -> None:
                answers.append((torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled(), model(batch).dtype))

            ask()
            with torch.autocast("cuda", BF16):
                assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is BF16
                ask()
                with torch.autocast("cuda", enabled=False):
                    ask()
                with torch.autocast("cpu", BF16):
                    ask()
            ask()
            result: torch.Tensor = model(batch).mean()
            return result

        changes_in(loss)
        no, yes = (False, False, FP32), (True, True, BF16)
        assert answers == [no, yes, no, yes, no]

    def test_the_default_is_float16(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda"):
                assert model(batch).dtype is FP16
            with torch.autocast("cpu", BF16):
                assert model(batch).dtype is FP32, "the model is not on the CPU"
            result: torch.Tensor = model(batch).mean()
            return result

        changes_in(loss)

    def test_as_a_decorator_and_by_the_type_of_a_tensors_device(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            @torch.autocast("cuda", BF16)  # type: ignore[untyped-decorator]
            def decorated() -> Any:
                return model(batch)

            assert decorated().dtype is BF16
            with torch.autocast(batch.device.type, BF16):
                result: torch.Tensor = model(batch)
            assert result.dtype is BF16
            return result.float().mean()

        changes_in(loss)

    def test_custom_fwd_casts_what_lies_on_the_card(self) -> None:
        seen = []

        class Doubled(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
            def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
                seen.append(given.dtype)
                return given * 2

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient * 2

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda"):
                result: torch.Tensor = Doubled.apply(model(batch)).float().mean()  # type: ignore[no-untyped-call]
                return result

        changes_in(loss)
        assert seen == [FP32]

    @pytest.mark.parametrize("fails", [False, True])
    def test_afterwards_nothing_is_left(self, fails: bool) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", BF16):
                result: torch.Tensor = model(batch).mean()
                if fails:
                    raise LookupError("mine")
                return result

        with pytest.raises(LookupError, match="mine") if fails else nullcontext():
            changes_in(loss)
        assert not autocast._casts
        assert not torch.cuda.is_available()
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is FP16
        with torch.autocast("cpu", BF16):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is BF16
