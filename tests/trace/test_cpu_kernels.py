"""What kernels allocate for themselves: the trace against the profiler's memory events of the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from batchwright import Workload
from batchwright.errors import CannotTraceError
from batchwright.trace.cpu_workspaces import allocations_of, record_allocations
from batchwright.trace.run import trace_workload
from tests.trace.test_trace import FEW_BYTES, predicted, really

if TYPE_CHECKING:
    from collections.abc import Callable

CONVOLUTIONS: dict[str, Callable[[], list[nn.Module]]] = {
    "3x3": lambda: [nn.Conv2d(3, 24, 3, 1, 1), nn.Conv2d(24, 40, 3, 1, 1)],
    "strided, odd channels": lambda: [nn.Conv2d(3, 13, 3, 2, 1), nn.Conv2d(13, 21, 3, 2, 1)],
    "1x1": lambda: [nn.Conv2d(3, 24, 1), nn.Conv2d(24, 40, 1, 2)],
    "dilated": lambda: [nn.Conv2d(3, 24, 3, 1, 2, 2), nn.Conv2d(24, 24, 3, 1, 2, 2)],
    "grouped": lambda: [nn.Conv2d(3, 24, 3, 1, 1), nn.Conv2d(24, 48, 3, 1, 1, groups=4)],
    "depthwise": lambda: [nn.Conv2d(3, 21, 3, 1, 1), nn.Conv2d(21, 21, 3, 1, 1, groups=21)],
    "patches": lambda: [nn.Conv2d(3, 48, 16, 16)],
    "transposed": lambda: [nn.Conv2d(3, 24, 3, 2, 1), nn.ConvTranspose2d(24, 20, 4, 2, 1)],
    "transposed, few outputs": lambda: [nn.Conv2d(3, 32, 3, 2, 1), nn.ConvTranspose2d(32, 3, 2, 2)],
    "frozen first layer": lambda: [nn.Conv2d(3, 24, 3, 1, 1).requires_grad_(False), nn.Conv2d(24, 40, 3, 2, 1)],
    "batch norm": lambda: [nn.Conv2d(3, 24, 3, 1, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True)],
}


def make_pictures(layers: Callable[[], list[nn.Module]], **changes: Any) -> Workload:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(*layers()),
        "batch": lambda n: torch.randn(n, 3, 32, 32),
        "loss": lambda model, batch: model(batch).pow(2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return Workload(**{**given, **changes})


class Recurrent(nn.Module):
    def __init__(self, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 48), layers
        self.head = nn.Linear(layers.hidden_size * (1 + layers.bidirectional), 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embed(tokens))[0])
        return out


def make_recurrent(kind: type[nn.LSTM | nn.GRU], **options: Any) -> Workload:
    return Workload(
        model=lambda: Recurrent(kind(48, 64, **options)),
        # Batch first in any case, so that the batch has the size asked for.
        batch=lambda n: torch.randint(0, 50, (n, 40 if kind is nn.LSTM else 8)),
        loss=lambda model, tokens: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
        optimizer=lambda params: torch.optim.AdamW(params),
    )


class TestConvolutions:
    # One sample takes another path than several; twenty are more than the kernel is asked about.
    @pytest.mark.parametrize(
        ("name", "micro_batch"),
        [
            pytest.param(name, size, marks=[pytest.mark.slow] if (name, size) == ("grouped", 20) else [])
            for name in CONVOLUTIONS
            for size in (1, 4, 20)
        ],
    )
    def test_peak_is_the_real_one(self, name: str, micro_batch: int) -> None:
        workload = make_pictures(CONVOLUTIONS[name])
        assert predicted(workload, micro_batch) == pytest.approx(really(workload, micro_batch), abs=FEW_BYTES)

    @pytest.mark.parametrize("micro_batch", [4, 20])
    def test_peak_is_the_real_one_in_channels_last(self, micro_batch: int) -> None:
        def layers() -> list[nn.Module]:
            return [module.to(memory_format=torch.channels_last) for module in CONVOLUTIONS["3x3"]()]  # type: ignore[call-overload]

        def batch(n: int) -> torch.Tensor:
            return torch.randn(n, 3, 32, 32).contiguous(memory_format=torch.channels_last)

        workload = make_pictures(layers, batch=batch)
        assert predicted(workload, micro_batch) == pytest.approx(really(workload, micro_batch), abs=FEW_BYTES)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_peak_is_the_real_one_in_other_types(self, dtype: torch.dtype) -> None:
        def layers() -> list[nn.Module]:
            return [module.to(dtype) for module in CONVOLUTIONS["3x3"]()]

        workload = make_pictures(layers, batch=lambda n: torch.randn(n, 3, 32, 32, dtype=dtype))
        assert predicted(workload, 4) == pytest.approx(really(workload, 4), abs=FEW_BYTES)

    def test_of_one_and_three_dimensions(self) -> None:
        lines = make_pictures(lambda: [nn.Flatten(2), nn.Conv1d(3, 24, 5, 2, 2), nn.ConvTranspose1d(24, 8, 4, 2, 1)])
        volumes = make_pictures(lambda: [nn.Unflatten(2, (8, 4)), nn.Conv3d(3, 16, 3, 1, 1), nn.Conv3d(16, 8, 3, 2, 1)])
        for workload in (lines, volumes):
            assert predicted(workload, 4) == pytest.approx(really(workload, 4), abs=FEW_BYTES)

    def test_a_straight_line_from_small_batches_gives_what_the_whole_batch_gives(self) -> None:
        func = torch.ops.aten.convolution.default
        args = (torch.zeros(60, 24, 64, 64), torch.zeros(40, 24, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        assert allocations_of(func, args) == record_allocations(lambda: func(*args))

    def test_are_refused_while_a_profiler_runs(self) -> None:
        workload = make_pictures(lambda: [nn.Conv2d(3, 7, 3)])
        with (
            torch.autograd.profiler.profile(profile_memory=True),
            pytest.raises(CannotTraceError, match="while a profiler runs"),
        ):
            trace_workload(workload, 5)


LAYERS: dict[str, dict[str, Any]] = {
    "one layer": {"batch_first": True},
    "two layers": {"batch_first": True, "num_layers": 2, "dropout": 0.1},
    "both directions": {"batch_first": True, "bidirectional": True},
    "time first": {"num_layers": 2},
}


class TestRecurrentLayers:
    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            pytest.param(nn.LSTM, LAYERS["one layer"], id="LSTM-one layer"),
            pytest.param(nn.GRU, LAYERS["one layer"], id="GRU-one layer"),
            pytest.param(nn.LSTM, LAYERS["both directions"], id="LSTM-both directions"),
            pytest.param(nn.GRU, LAYERS["both directions"], id="GRU-both directions", marks=pytest.mark.slow),
            pytest.param(nn.LSTM, LAYERS["two layers"], id="LSTM-two layers", marks=pytest.mark.slow),
            pytest.param(nn.GRU, LAYERS["two layers"], id="GRU-two layers", marks=pytest.mark.slow),
            pytest.param(nn.LSTM, LAYERS["time first"], id="LSTM-time first", marks=pytest.mark.slow),
            pytest.param(nn.GRU, LAYERS["time first"], id="GRU-time first", marks=pytest.mark.slow),
        ],
    )
    def test_peak_is_the_real_one(self, kind: type[nn.LSTM | nn.GRU], options: dict[str, Any]) -> None:
        workload = make_recurrent(kind, **options)
        # The workspace is rounded up to pages.
        assert predicted(workload, 16) == pytest.approx(really(workload, 16), rel=0.002)


def _mask(x: torch.Tensor) -> torch.Tensor:
    return x > 0


HALF = torch.bfloat16
OF_SEVERAL_TYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mask": lambda x: x * _mask(x),
    "a mask, in place": lambda x: x.clone().mul_(_mask(x)),
    "a half and a whole": lambda x: x.to(HALF) + x,
    "a whole into a half": lambda x: x.to(HALF).add_(x),
    "a row": lambda x: x + x[0].to(HALF),
    "whole numbers divided": lambda x: x.long() / x.long(),
    "compared": lambda x: x == x.long(),
    "compared with a number": lambda x: x.long() > 0.5,
    "of two": lambda x: torch.where(_mask(x), x, x.to(HALF)),
    "filled": lambda x: x.masked_fill(_mask(x), 0.0),
    "roots of whole numbers": lambda x: x.long().sqrt(),
    "one of a type": lambda x: x + x,
    "a mean in another type": lambda x: x.to(HALF).mean(-1, dtype=torch.float32),
    "a running count": lambda x: _mask(x).cumsum(-1),
}


@pytest.mark.parametrize("name", OF_SEVERAL_TYPES)
def test_operands_of_another_type_are_copied_first(name: str) -> None:
    # Without a graph, and with nothing else as large in the step.
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            OF_SEVERAL_TYPES[name](x)
        value: torch.Tensor = model(x[:1]).sum()
        return value

    workload = make_pictures(lambda: [nn.Linear(64, 1)], batch=lambda n: torch.randn(n, 64), loss=loss)
    assert predicted(workload, 512) == pytest.approx(really(workload, 512), abs=FEW_BYTES)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "squares": F.mse_loss,
    "squares, summed": lambda y, x: F.mse_loss(y, x, reduction="sum"),
    "squares, each": lambda y, x: F.mse_loss(y, x, reduction="none").mean(),
    "smooth": F.smooth_l1_loss,
    "Huber's": F.huber_loss,
    "soft margin": lambda y, x: F.soft_margin_loss(y, x.sign()),
    "cross entropy of probabilities": lambda y, x: F.binary_cross_entropy(y.sigmoid(), x.sigmoid()),
    "k-th value": lambda y, x: y.kthvalue(3, -1).values.mean(),
    "bags": lambda y, x: F.embedding_bag(torch.zeros(512, 64, dtype=torch.int64), y).mean(),
    "bags, summed": lambda y, x: F.embedding_bag(torch.zeros(512, 64, dtype=torch.int64), y, mode="sum").mean(),
    "largest": lambda y, x: y.amax(-1).mean(),
    "the largest of all": lambda y, x: y.max(),
    "the smallest of all, in double": lambda y, x: y.double().min(),
    "the median of all": lambda y, x: y.median(),
    "without what is no number": lambda y, x: y.nansum(-1).mean(),
    "folded": lambda y, x: F.fold(F.unfold(y[None, None], 3), (512, 64), 3).pow(2).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_holds_is_counted(name: str) -> None:
    workload = make_pictures(
        lambda: [nn.Linear(64, 64)],
        batch=lambda n: torch.randn(n, 64),
        loss=lambda model, x: LOSSES[name](model(x), x),
    )
    assert predicted(workload, 512) == pytest.approx(really(workload, 512), abs=FEW_BYTES)
