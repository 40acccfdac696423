"""What convolutions hold on a card: copies for tensor cores, Winograd's transforms without, nothing for products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import batchwright as bw
from batchwright.catalogue.cards import find_card
from batchwright.simulated.operators.convolutions import convolution_workspace, largest_convolution_workspace

V100, A100 = find_card("v100-32gb"), find_card("a100-40gb")
IMAGES, CHANNELS, SIDE = 2, 64, 32
MAP_BYTES = IMAGES * CHANNELS * SIDE * SIDE * 4
DENSE = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def tensors(
    kernel: int = 3, dtype: torch.dtype = torch.float32, groups: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    image = torch.empty(IMAGES, CHANNELS, SIDE, SIDE, dtype=dtype)
    return image, torch.empty(CHANNELS, CHANNELS // groups, kernel, kernel, dtype=dtype), torch.empty_like(image)


def settings(stride: int = 1, dilation: int = 1, groups: int = 1) -> tuple[Any, ...]:
    return ([stride] * 2, [1, 1], [dilation] * 2, False, [0, 0], groups)


def test_without_tensor_cores_a_dense_3x3_is_written_out_in_winograds_form() -> None:
    transformed = 2 * MAP_BYTES * 36 // 16 + CHANNELS * CHANNELS * 36 * 4
    for kind in ("forward", "data", "weight"):
        assert convolution_workspace(V100, kind, *tensors(), DENSE) == transformed


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        (1, settings()),
        (5, settings()),
        (3, settings(stride=2)),
        (3, settings(dilation=2)),
        (3, settings(groups=2)),
    ],
)
def test_winograds_algorithm_applies_to_nothing_else(kernel: int, how: tuple[Any, ...]) -> None:
    assert convolution_workspace(V100, "forward", *tensors(kernel, groups=how[-1]), how) == 0


def test_tensor_cores_read_copies_in_their_own_layout() -> None:
    weights = CHANNELS * CHANNELS * 9 * 4
    for kind in ("forward", "data", "weight"):
        assert convolution_workspace(A100, kind, *tensors(), DENSE) == 2 * MAP_BYTES + weights
    grouped = convolution_workspace(A100, "forward", *tensors(groups=2), settings(groups=2))
    assert grouped == 2 * MAP_BYTES + weights // 2
    assert convolution_workspace(A100, "forward", *tensors(1), DENSE) == 0


def test_the_most_is_never_less_than_what_is_usual() -> None:
    for card in (V100, A100):
        for kernel in (1, 3, 5):
            for kind in ("forward", "data", "weight"):
                usual = convolution_workspace(card, kind, *tensors(kernel), DENSE)
                assert largest_convolution_workspace(card, *tensors(kernel), DENSE) >= usual


def test_depthwise_convolutions_hold_nothing() -> None:
    given = tensors(groups=CHANNELS)
    assert largest_convolution_workspace(A100, *given, settings(groups=CHANNELS)) == 0


def test_the_bound_of_a_conv_net_covers_a_kernel_that_copies_where_a_transformers_has_its_margin_only() -> None:
    def bound_over_peak(model: Any, shape: tuple[int, ...]) -> float:
        workload = bw.Workload(
            model=model, batch=lambda n: torch.randn(n, *shape), loss=lambda net, x: net(x).square().mean()
        )
        found = bw.estimate(workload, micro_batch=64, on="a100-40gb")
        assert found.upper_bytes.allocated is not None
        assert found.peak_bytes.allocated is not None
        return found.upper_bytes.allocated / found.peak_bytes.allocated

    assert bound_over_peak(lambda: torch.nn.Conv2d(64, 64, 1), (64, 64, 64)) > 1.3
    assert 1 < bound_over_peak(lambda: torch.nn.Linear(1024, 1024), (64, 1024)) < 1.1


def test_channels_last_stays_so_through_a_net_and_needs_no_copies() -> None:
    layouts: list[bool] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = torch.nn.Conv2d(16, 64, 3, padding=1), torch.nn.BatchNorm2d(64)
            self.second = torch.nn.Conv2d(64, 64, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.second(self.norm(self.first(x)).relu())
            layouts.append(made.is_contiguous(memory_format=torch.channels_last))
            return made

    def peak(layout: Any) -> int:
        workload = bw.Workload(
            model=lambda: Net().to(memory_format=layout),  # type: ignore[call-overload]
            batch=lambda n: torch.randn(n, 16, 64, 64),
            loss=lambda model, x: model(x.to(memory_format=layout)).mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        layouts.clear()
        return bw.estimate(workload, micro_batch=64, on="a100-40gb").peak

    last = peak(torch.channels_last)
    assert all(layouts)
    # Two outputs that are kept, two gradients of that size, and the input: nothing else of that order.
    assert last == pytest.approx((4 * 64 + 2 * 16) * 64 * 64 * 64 * 4, rel=0.01)
    assert last < peak(torch.contiguous_format)
    assert not any(layouts)


def test_where_a_workspace_has_no_room_the_next_plan_runs_without() -> None:
    def peak(memory: int | None) -> Any:
        workload = bw.Workload(
            model=lambda: torch.nn.Conv2d(64, 64, 3, padding=1),
            batch=lambda n: torch.randn(n, 64, 64, 64),
            loss=lambda model, x: model(x).mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        return bw.estimate(workload, micro_batch=64, on="a100-40gb", memory=memory, context="1MiB")

    one_map = 64 * 64 * 64 * 64 * 4
    roomy = peak(None)
    assert roomy.peak > 4 * one_map
    near = peak(roomy.peak - one_map)
    assert near.fits
    assert near.peak < roomy.peak - one_map
    assert not peak(2 * one_map).fits  # results and batch themselves have none
