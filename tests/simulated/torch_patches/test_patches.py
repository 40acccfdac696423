"""torch is as it was: for other threads all the while, for the process afterwards, whatever happened in between."""

from __future__ import annotations

import _thread
import gc
import inspect
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchwright import Workload, estimate
from batchwright.errors import BatchwrightError
from batchwright.simulated.torch_patches import patches as torch_patches
from batchwright.simulated.torch_patches.patches import Patch, TorchPatches, applied

if TYPE_CHECKING:
    from collections.abc import Callable

CARD = "t4-16gb"


def workload(width: int = 64, **fields: Any) -> Workload:
    parts: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)),
        "batch": lambda n: torch.randn(n, 16),
        "loss": lambda model, batch: model(batch).pow(2).mean(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters),
    }
    return Workload(**{**parts, **fields})


def peak(on: str, width: int = 64) -> int | None:
    return estimate(workload(width), micro_batch=8, on=on).peak_bytes.allocated


def in_another_thread(ask: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = torch_patches._start  # a thread that nothing inside has started
    other = threading.Thread(target=lambda: answers.append(ask()))
    thread(other)
    other.join()
    return answers[0]


class Recorded:
    """Every place that is patched, and what stood there before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.originals: dict[tuple[int, str], tuple[Any, Any, Any, Any]] = {}
        apply = torch_patches._apply

        def record(patch: Patch) -> None:
            place, name = patch[:2]
            own = inspect.getattr_static(place, name, None)
            kind = type(place).__mro__[2] if isinstance(place, torch_patches._PatchedModule) else type(place)
            kept = (place, kind, own, name in vars(place) if hasattr(place, "__dict__") else True)
            self.originals.setdefault((id(place), name), kept)
            apply(patch)

        monkeypatch.setattr(torch_patches, "_apply", record)

    def check(self) -> None:
        """Every place holds the very same object again."""
        changed = []
        for (_, name), (place, kind, own, is_its_own) in self.originals.items():
            now = inspect.getattr_static(place, name, None)
            has_its_own = name in vars(place) if hasattr(place, "__dict__") else True
            if now is not own or type(place) is not kind or has_its_own != is_its_own:
                changed.append(f"{place}.{name}")
        assert changed == []
        assert torch_patches._applied == []
        assert not torch_patches.is_inside()
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        assert torch.is_grad_enabled()
        assert torch._C._is_multithreading_enabled()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert torch_patches._LOCK.acquire(blocking=False)
        torch_patches._LOCK.release()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def estimate_until_interrupted(timer: threading.Timer, on: str) -> None:
    timer.start()
    for _ in range(1000):
        peak(on)


class TestAfterwards:
    def test_every_patch_is_undone(self, recorded: Recorded) -> None:
        hook = sys.excepthook
        estimate(workload(wrap=lambda model: DistributedDataParallel(model)), micro_batch=4, on=CARD, devices=2)
        assert len(recorded.originals) > 150
        recorded.check()
        assert sys.excepthook is hook
        assert not dist.is_initialized()

    def test_also_where_the_step_raises(self, recorded: Recorded) -> None:
        def fails(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            estimate(workload(loss=fails), on=CARD)
        recorded.check()

    @pytest.mark.parametrize("number", [1, 2, 40, 150])
    @pytest.mark.parametrize("where", ["_apply", "_put_back"])
    def test_ctrl_c_while_patches_are_applied_or_undone(
        self, where: str, number: int, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = 0
        work: Any = getattr(torch_patches, where)

        def interrupted(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                signal.raise_signal(signal.SIGINT)
            work(*args)

        monkeypatch.setattr(torch_patches, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            peak(CARD)
        recorded.check()

    # One that comes while Python calls back for a tensor that dies is reported by Python and lost.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_ctrl_c_at_any_moment(self, recorded: Recorded) -> None:
        peak(CARD)
        for moment in range(24):
            timer = threading.Timer(0.003 * moment, _thread.interrupt_main)
            # Until it came: one that is late would end the test instead.
            with pytest.raises(KeyboardInterrupt):
                estimate_until_interrupted(timer, CARD if moment % 3 else "cpu")
            recorded.check()

    def test_more_estimates_hold_no_more_than_two(self) -> None:
        counts = []
        for _ in range(3):
            for on in (CARD, "cpu"):
                peak(on)
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert counts[2] - counts[1] < 20  # one step alone has hundreds


class TestOtherThreads:
    def test_get_the_originals_themselves(self) -> None:
        class Stands:
            pass

        def answer(*_: Any) -> str:
            return "inside"

        patches = [
            Patch(torch, "Generator", Stands),
            Patch(torch.version, "cuda", "12.8"),
            Patch(torch.cuda, "is_available", answer),
            Patch(nn.Module, "_apply", answer),
            Patch(torch.Tensor, "record_stream", answer),
            Patch(torch._C, "_no_such_name", answer),
        ]

        def ask() -> tuple[Any, ...]:
            return (
                torch.Generator,
                torch.version.cuda,
                torch.cuda.is_available(),
                nn.Module._apply,
                torch.Tensor.record_stream,
                hasattr(torch._C, "_no_such_name"),
            )

        before = ask()
        with TorchPatches(), applied(patches):
            inside, outside = ask(), in_another_thread(ask)
            started_inside: list[Any] = []
            thread = threading.Thread(target=lambda: started_inside.extend(ask()))
            thread.start()
            thread.join()
        assert outside == before == ask()
        assert outside[0] is before[0]
        assert inside[1:] == ("12.8", "inside", answer, answer, True)
        assert tuple(started_inside) == inside

    def test_a_class_that_a_library_kept_from_inside_means_the_original_outside(self) -> None:
        with TorchPatches(), applied([Patch(torch, "Generator", type("Stands", (), {}))]):
            kept: Any = torch.Generator
        assert isinstance(torch.Generator(), kept)
        assert type(kept()) is torch.Generator

    def test_see_no_process_group_of_simulated_ranks(self) -> None:
        seen: list[tuple[bool, bool]] = []

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            seen.append((dist.is_initialized(), in_another_thread(dist.is_initialized)))
            squares: torch.Tensor = model(batch).pow(2)
            return squares.mean()

        wrapped = workload(loss=loss, wrap=lambda model: DistributedDataParallel(model))
        estimate(wrapped, micro_batch=4, on=CARD, devices=2)
        assert set(seen) == {(True, False)}

    def test_a_thread_of_the_step_cannot_wait_for_the_step(self) -> None:
        raised: list[BaseException] = []

        def ask() -> None:
            try:
                peak(CARD)
            except BatchwrightError as error:
                raised.append(error)

        with TorchPatches():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(60)
        assert "started inside" in str(raised[0])

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_an_interrupt_ends_the_wait_for_one(self, number: int, recorded: Recorded) -> None:
        begun, done = threading.Event(), threading.Event()

        def trace() -> None:
            with TorchPatches():
                begun.set()
                done.wait(60)

        other = threading.Thread(target=trace)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            other.start()
            begun.wait(60)
            threading.Timer(0.1, _thread.interrupt_main, (number,)).start()
            with pytest.raises(KeyboardInterrupt), TorchPatches():
                pass
        finally:
            done.set()
            other.join()
            signal.signal(signal.SIGTERM, before)
        recorded.check()

    def test_train_as_alone_while_others_estimate(self, recorded: Recorded) -> None:
        expected = {(on, width): peak(on, width) for on in ("cpu", CARD) for width in (64, 128)}
        wrong: list[Any] = []
        done = threading.Event()

        def train(steps: int) -> tuple[list[torch.Tensor], set[bool]]:
            generator = torch.Generator().manual_seed(3)
            model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            believed = set()
            for _ in range(steps):
                model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                model.to("cpu")
                believed.add(torch.cuda.is_available() or torch.accelerator.is_available())
            return [parameter.detach().clone() for parameter in model.parameters()], believed

        def train_until_done() -> None:
            while not done.is_set():
                trained, believed = train(15)
                if believed != {False} or not all(map(torch.equal, trained, alone)):
                    wrong.append(("train", believed))

        def ask(on: str, width: int) -> None:
            for _ in range(2):
                if peak(on, width) != expected[on, width]:
                    wrong.append((on, width))

        alone, _ = train(15)
        trainings = [threading.Thread(target=train_until_done) for _ in range(2)]
        questions = [threading.Thread(target=ask, args=asked) for asked in expected]
        for thread in trainings + questions:
            thread.start()
        for thread in questions:
            thread.join()
        done.set()
        for thread in trainings:
            thread.join()
        assert wrong == []
        recorded.check()


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
def test_a_forked_child_runs_backward() -> None:
    script = """
import os, torch
from torch.utils.data import DataLoader
from tests.simulated.torch_patches.test_patches import peak

class Learns(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        x = torch.ones(3, requires_grad=True)
        (x * i).sum().backward()
        return x.grad

first = peak("t4-16gb")
batches = list(DataLoader(Learns(), num_workers=1, multiprocessing_context="fork"))
assert [b.tolist() for b in batches] == [[[0.0] * 3], [[1.0] * 3]]
child = os.fork()
if not child:
    torch.nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
    os._exit(0 if peak("t4-16gb") == first else 9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)
