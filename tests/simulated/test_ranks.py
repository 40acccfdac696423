"""One of several ranks on a simulated card: FSDP2 by its own code, DDP by its buckets."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_process_group as early_init
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw
from batchwright.errors import CannotTraceError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LAYERS = 1024, 8
MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
LAYER_BYTES = MODEL_BYTES // LAYERS


def sharded(model: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    whole: nn.Module = fully_shard(model)
    return whole


def workload(wrap: Callable[[nn.Module], nn.Module] | None) -> bw.Workload:
    return bw.Workload(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
        batch=lambda n: torch.randn(n, WIDTH),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        wrap=wrap,
    )


def peak(wrap: Callable[[nn.Module], nn.Module] | None, devices: int) -> int:
    return bw.estimate(workload(wrap), micro_batch=2, on="a100-40gb", devices=devices).peak


@pytest.mark.parametrize(
    "degree", [pytest.param(2, marks=pytest.mark.slow), 8, pytest.param(64, marks=pytest.mark.slow)]
)
def test_a_shard_holds_its_part_of_weights_gradients_and_state(degree: int) -> None:
    found = bw.estimate(workload(sharded), micro_batch=2, on="a100-40gb", devices=degree)
    for part in ("weights", "optimizer"):
        assert found.parts[part] == pytest.approx(MODEL_BYTES / degree, rel=0.01)
    # Two layers gathered, gradients of one in full, and what the collectives copy from and to.
    held = 3 * MODEL_BYTES / degree + 16.25 * 2**20
    assert held < found.peak < held + 6 * LAYER_BYTES


def test_buckets_hold_every_gradient_once_more_unless_gradients_are_views_of_them() -> None:
    alone = peak(None, 1)
    assert peak(lambda model: DistributedDataParallel(model), 4) - alone == pytest.approx(MODEL_BYTES, rel=0.01)
    views = peak(lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True), 4)
    assert views - alone < 2 * LAYER_BYTES


def test_nothing_is_left_behind() -> None:
    peak(sharded, 4)
    assert not dist.is_initialized()
    assert DistributedDataParallel.__init__.__qualname__ == "DistributedDataParallel.__init__"


def test_ranks_need_a_card_and_a_wrap() -> None:
    with pytest.raises(InvalidInputError, match="on cards only"):
        bw.estimate(workload(sharded), devices=2)
    with pytest.raises(InvalidInputError, match="has no wrap="):
        peak(None, 2)


def on_four(wrap: Callable[[Any], nn.Module], **fields: Any) -> bw.Estimate:
    return bw.estimate(replace(workload(wrap), **fields), micro_batch=2, on="a100-40gb", devices=4)


def over(mesh: Callable[[], DeviceMesh]) -> Callable[[Any], nn.Module]:
    """Shard as `sharded` does, over a mesh."""

    def wrap(model: Any) -> nn.Module:
        made = mesh()
        for layer in model:
            fully_shard(layer, mesh=made)
        whole: nn.Module = fully_shard(model, mesh=made)
        return whole

    return wrap


class TestMeshes:
    @pytest.mark.parametrize(
        "mesh",
        [
            lambda: init_device_mesh("cuda", (4,)),
            pytest.param(
                lambda: dist.init_device_mesh("cuda", (4,)),  # type: ignore[attr-defined]
                marks=pytest.mark.slow,
            ),
            lambda: DeviceMesh("cuda", [0, 1, 2, 3]),
            pytest.param(lambda: DeviceMesh("cuda", torch.arange(4)), marks=pytest.mark.slow),
            lambda: init_device_mesh("cuda", (1, 4), mesh_dim_names=("outer", "inner"))["inner"],
        ],
        ids=["bound at import", "of dist", "a list", "a tensor", "a slice"],
    )
    def test_however_it_is_made_it_shards_as_no_mesh_does(self, mesh: Callable[[], DeviceMesh]) -> None:
        assert on_four(over(mesh)).peak == on_four(sharded).peak

    def test_sharded_in_pairs_and_replicated_holds_the_half(self) -> None:
        found = on_four(over(lambda: init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))))
        for part in ("weights", "optimizer"):
            assert found.parts[part] == pytest.approx(MODEL_BYTES / 2, rel=0.01)

    def test_tensor_parallel_layers_hold_their_part(self) -> None:
        def wrap(model: nn.Module) -> nn.Module:
            styles = [ColwiseParallel(), RowwiseParallel()]
            plan = {str(number): styles[number % 2] for number in range(LAYERS)}
            return parallelize_module(model, init_device_mesh("cuda", (4,)), plan)

        found = on_four(wrap)
        for part in ("weights", "optimizer"):
            assert found.parts[part] == pytest.approx(MODEL_BYTES / 4, rel=0.02)


class TestReplicas:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda model: DistributedDataParallel(model.cuda(), device_ids=[dist.get_rank()]),
            pytest.param(
                lambda model: DistributedDataParallel(model.to("cuda"), device_ids=[0], output_device=0),
                marks=pytest.mark.slow,
            ),
            lambda model: (dist.init_process_group("nccl"), DistributedDataParallel(model))[1],
            pytest.param(lambda model: (early_init("nccl"), DistributedDataParallel(model))[1], marks=pytest.mark.slow),
            pytest.param(
                lambda model: torch.compile(DistributedDataParallel(model)),
                marks=pytest.mark.filterwarnings("ignore:.*torch.jit.script_method"),
            ),
            lambda model: replicate(model),
        ],
        ids=["device_ids", "to", "starts the group", "starts it by a name bound before", "compiled", "replicate"],
    )
    def test_usual_ways_to_write_it_come_to_the_same(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        assert on_four(wrap).peak == on_four(DistributedDataParallel).peak
        assert not dist.is_initialized()

    def test_a_hook_that_compresses_holds_half_of_each_bucket_until_backward_ends(self) -> None:
        def hooked(model: nn.Module) -> nn.Module:
            replica = DistributedDataParallel(model)
            replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
            return replica

        plain, compressed = (
            {phase.phase: phase.peak_bytes for phase in on_four(wrap).phases}
            for wrap in (DistributedDataParallel, hooked)
        )
        # Less what backward itself held at its peak, before the last bucket was full.
        more = compressed["backward"] - plain["backward"]
        assert MODEL_BYTES / 2 - LAYER_BYTES < more <= MODEL_BYTES / 2
        assert compressed["forward"] == plain["forward"]

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
    def test_a_compiled_replica_is_compiled(self) -> None:
        found = on_four(lambda model: torch.compile(DistributedDataParallel(model)))  # type: ignore[arg-type, return-value]
        assert not any("compile" in note for note in found.notes)


@pytest.mark.parametrize(
    "settings",
    [
        {"capturable": True},
        pytest.param({"fused": True}, marks=pytest.mark.slow),
        pytest.param({"foreach": False}, marks=pytest.mark.slow),
    ],
)
def test_optimizers_step_on_shards(settings: dict[str, Any]) -> None:
    found = on_four(sharded, optimizer=lambda params: torch.optim.AdamW(params, **settings))
    assert found.parts["optimizer"] == pytest.approx(2 * MODEL_BYTES / 4, rel=0.01)


class TestFlatParameters:
    """FSDP1, by its own code."""

    @staticmethod
    def flat(**options: Any) -> Callable[[nn.Module], nn.Module]:
        return lambda model: FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=0, **options
        )

    @pytest.mark.parametrize("use_orig_params", [False, True])
    def test_a_rank_holds_its_part_and_the_units_that_are_gathered(self, use_orig_params: bool) -> None:
        found = on_four(self.flat(use_orig_params=use_orig_params))
        for part in ("weights", "optimizer"):
            assert found.parts[part] == pytest.approx(MODEL_BYTES / 4, rel=0.01)
        held = 3 * MODEL_BYTES / 4 + 16.25 * 2**20
        assert held < found.peak < held + 6 * LAYER_BYTES

    def test_strategies_hold_what_they_keep_whole(self) -> None:
        kinds = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
        full, gathered = (on_four(self.flat(sharding_strategy=kind)).peak for kind in kinds)
        assert gathered - full > MODEL_BYTES / 2  # every unit stays gathered from forward to backward


class TestRefusals:
    def test_an_optimizer_that_is_sharded_beside_ddp_too(self) -> None:
        def zero(params: Any) -> torch.optim.Optimizer:
            with warnings.catch_warnings(action="ignore"):  # torch's own functions are deprecated by torch
                from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.SGD, lr=0.1)

        with pytest.raises(CannotTraceError, match="ZeroRedundancyOptimizer"):
            on_four(DistributedDataParallel, optimizer=zero)

    @pytest.mark.parametrize("read", [lambda weight: weight.sum().item(), lambda weight: weight.numpy()])
    def test_a_wrap_that_reads_values_is_explained_as_a_step_is(self, read: Callable[[torch.Tensor], Any]) -> None:
        def reads(model: nn.Module) -> nn.Module:
            read(next(model.parameters()).detach())
            return DistributedDataParallel(model)

        with pytest.raises(CannotTraceError, match=r"(?s)wrap cannot be traced.*test_ranks\.py"):
            on_four(reads)

    def test_graphs_of_a_compiled_replica(self) -> None:
        with pytest.raises(CannotTraceError, match="CUDA graphs"):
            on_four(lambda model: torch.compile(DistributedDataParallel(model), mode="reduce-overhead"))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("fails", [False, True])
def test_torch_is_as_it_was(fails: bool) -> None:
    def state() -> list[Any]:
        inside = [cell.cell_contents for cell in dist.init_process_group.__closure__ or ()]
        kinds = (DeviceMesh, DistributedDataParallel, FullyShardedDataParallel, DTensor, nn.Module)
        return [*inside, dist.destroy_process_group, torch.compile, *(dict(vars(kind)) for kind in kinds)]

    def wrap(model: nn.Module) -> nn.Module:
        if fails:
            raise LookupError("mine")
        return sharded(model)

    before = state()
    with pytest.raises(LookupError) if fails else nullcontext():
        on_four(wrap)
    assert state() == before
