"""Compiled models: what Inductor takes is traced, what it cannot lower runs as it is, and torch is as it was."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from batchwright import Workload, estimate
from batchwright.errors import CannotTraceError
from batchwright.timing.step_time import StepTime
from tests.simulated.torch_patches.test_patches import Recorded, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["recorded"]
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
CARD = "a100-40gb"
WIDTH, ROWS = 64, 4096
ONE = 4 * ROWS * WIDTH
"""Bytes of one tensor of a layer."""


class Waves(nn.Module):
    """Eight elementwise operators between two layers: eager they keep a tensor each, compiled they are one kernel."""

    def __init__(self, *, breaks: bool = False, recomputes: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.breaks, self.recomputes, self.dropout = breaks, recomputes, nn.Dropout(dropout)

    def wave(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.sin(torch.exp(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.wave, x, use_reentrant=False) if self.recomputes else self.wave(x)
        if self.breaks:
            torch._dynamo.graph_break()
        out: torch.Tensor = self.last(self.dropout(x))
        return out


def workload(build: Callable[[], Any], **fields: Any) -> Workload:
    parts: dict[str, Any] = {
        "model": build,
        "batch": lambda n: torch.randn(n, WIDTH),
        "loss": lambda model, batch: model(batch).sum(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1),
    }
    return Workload(**{**parts, **fields})


def found(build: Callable[[], Any], on: str = CARD, *, devices: int = 1, **fields: Any) -> tuple[int, tuple[str, ...]]:
    answer = estimate(workload(build, **fields), micro_batch=ROWS, on=on, devices=devices)
    assert answer.peak_bytes.allocated is not None
    return answer.peak_bytes.allocated, tuple(note for note in answer.notes if not note.startswith("context: "))


@pytest.mark.parametrize("on", [CARD, "cpu"])
def test_what_is_fused_is_not_held(on: str, recorded: Recorded) -> None:
    eager = estimate(workload(Waves), micro_batch=ROWS, on=on)
    compiled = estimate(workload(lambda: torch.compile(Waves())), micro_batch=ROWS, on=on)
    assert [note for note in compiled.notes if not note.startswith("context: ")] == []
    assert eager.peak - compiled.peak > 2 * ONE
    if on == CARD:
        assert isinstance(eager.time, StepTime)
        assert isinstance(compiled.time, StepTime)
        assert eager.time.flops == compiled.time.flops > 0
        assert 0.2 < compiled.time.device_seconds / eager.time.device_seconds < 0.7
        assert any("fused" in entry.operator for entry in compiled.time.costliest)
    recorded.check()


class Kept(nn.Module):
    """Its gradient has the same text whether what it returns beside the output is kept or not, and other buffers."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.first, self.keeps = nn.Linear(WIDTH, WIDTH), keeps

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x)
        return (hidden.sin(), hidden.detach()) if self.keeps else (hidden.sin(),)


def test_a_gradient_of_the_same_text_is_lowered_by_what_it_may_reuse() -> None:
    def peak(keeps: bool) -> int:
        asked_for = workload(lambda: torch.compile(Kept(keeps=keeps)), loss=lambda model, batch: model(batch)[0].sum())
        return estimate(asked_for, micro_batch=ROWS, on=CARD).peak_bytes.of_allocator[0]

    def anew(keeps: bool) -> int:
        import_module("batchwright.simulated.torch_patches.inductor")._LOWERED.clear()
        return peak(keeps)

    first, second = anew(True), anew(False)
    assert first > second
    assert (anew(True), peak(False), peak(True)) == (first, second, first)


def test_a_graph_is_lowered_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        return torch.compile(nn.Sequential(nn.Linear(WIDTH, 3), nn.GELU()))

    first = found(build)
    lowering = import_module("torch._inductor.graph").GraphLowering
    monkeypatch.setattr(lowering, "run", lambda *_: pytest.fail("the graph was lowered again"))
    assert found(build) == first


def autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return model(batch).sum()  # type: ignore[no-any-return]


def in_parts(**options: Any) -> nn.Module:
    model = nn.Sequential(Waves(**options), Waves(**options))
    for part in model:
        part.compile()
    return model


def sharded(model: Any) -> Any:
    for part in model:
        fully_shard(part)
    return fully_shard(model)


def compiled_step(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "fields"),
    [
        pytest.param(lambda: torch.compile(Waves(breaks=True)), {}, id="a graph break"),
        pytest.param(lambda: torch.compile(Waves(recomputes=True)), {}, id="checkpointing inside"),
        pytest.param(lambda: torch.compile(Waves(dropout=0.1)), {}, id="dropout"),
        pytest.param(lambda: torch.compile(Waves()), {"loss": autocast}, id="autocast"),
        pytest.param(lambda: torch.compile(Waves(), fullgraph=True), {}, id="fullgraph"),
        pytest.param(lambda: torch.compile(Waves(), dynamic=True), {}, id="dynamic"),
        pytest.param(lambda: torch.compile(Waves(), mode="max-autotune-no-cudagraphs"), {}, id="mode"),
        pytest.param(in_parts, {}, id="blocks"),
        pytest.param(lambda: torch.compile(Waves()), {"optimizer": compiled_step}, id="the optimizer too"),
        pytest.param(in_parts, {"wrap": sharded, "devices": 4}, id="FSDP2"),
        pytest.param(Waves, {"wrap": lambda m: torch.compile(DistributedDataParallel(m)), "devices": 4}, id="DDP"),
        pytest.param(lambda: torch.compile(Waves(), backend="aot_eager"), {}, id="another backend"),
    ],
)
def test_ways_to_compile(build: Callable[[], Any], fields: dict[str, Any], recorded: Recorded) -> None:
    compiled, notes = found(build, **fields)
    assert notes == ()
    assert compiled > 4 * ONE
    recorded.check()


def test_a_live_compiled_model_and_a_compiled_loss() -> None:
    live: Any = torch.compile(Waves())
    plain = lambda out: F.gelu(out).pow(2).sum()  # noqa: E731
    loss = torch.compile(plain)
    before = {name: weight.clone() for name, weight in live.state_dict().items()}
    peak, notes = found(lambda: live, loss=lambda model, batch: loss(model(batch)))
    assert notes == ()
    assert peak < found(Waves, loss=lambda model, batch: plain(model(batch)))[0] - 2 * ONE  # type: ignore[no-untyped-call]
    assert all(torch.equal(weight, before[name]) for name, weight in live.state_dict().items())


@torch.library.custom_op("tests_compiled::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda _, gradient: gradient * 2)


@torch.library.custom_op("tests_compiled::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Custom(nn.Module):
    """A model with an operator of somebody's own."""

    def __init__(self, operator: Callable[[torch.Tensor], torch.Tensor] = twice) -> None:
        super().__init__()
        self.layer, self.operator = nn.Linear(WIDTH, WIDTH), operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(self.layer(x))


def test_a_graph_that_inductor_refuses_is_traced_as_eager_and_says_so() -> None:
    refused: dict[str, Any] = {"implicit_fallbacks": False}
    (compiled, (note,)) = found(lambda: torch.compile(Custom(), options=refused))
    assert compiled == found(Custom)[0]
    assert "test_compiled.py" in note
    assert "MissingOperator" in note
    assert "traced as eager" in note


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_that_dynamo_fails_at_is_traced_as_eager_and_says_so(
    fullgraph: bool, monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    # As with a torch that lacks a name.
    converter: Any = import_module("torch._subclasses.fake_tensor").FakeTensorConverter
    monkeypatch.setattr(converter, "from_real_tensor", lambda *_, **__: getattr(torch, "no_such_name"))  # noqa: B009
    compiled, (note,) = found(lambda: torch.compile(Waves(), fullgraph=fullgraph))
    monkeypatch.undo()
    assert compiled == found(Waves)[0]
    assert "no_such_name" in note
    assert "traced as eager" in note
    recorded.check()


def test_an_operator_without_a_fake_rule_is_named_with_the_users_line() -> None:
    with pytest.raises(CannotTraceError, match=r"(?s)tests_compiled::thrice.*register_fake") as caught:
        found(lambda: torch.compile(Custom(thrice)))
    assert "return self.operator(self.layer(x))" in str(caught.value)


def test_a_recompile_storm_ends_as_torch_has_it_and_says_so() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * len(name)
            return out

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(model(batch, "x" * number).sum() for number in range(1, 5))
        return total

    with torch._dynamo.config.patch(recompile_limit=2):
        _, notes = found(lambda: torch.compile(Counts(), backend="aot_eager"), loss=loss)
    assert any("gave up compiling it after 2 times" in note and "test_compiled.py" in note for note in notes)


def test_a_graph_break_under_fullgraph_is_the_users_error() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        found(lambda: torch.compile(Waves(breaks=True), fullgraph=True))


def test_nothing_is_written_to_the_cache_of_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found(lambda: torch.compile(Waves()), "cpu")
    assert list(tmp_path.rglob("*.*")) == []
