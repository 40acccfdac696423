"""The decorator: exact where accelerate's stops early, cut after two steps, and nothing of the user's disturbed."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchwright as bw
from batchwright.errors import InvalidInputError, NothingFitsError
from batchwright.fitting.find_batch_size import keep_effective_batch

if TYPE_CHECKING:
    from collections.abc import Callable

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2 GiB"


def limited(limit: int) -> Callable[[int], int]:
    """Return a function that runs out of memory above a limit, and else says at which size it ran."""

    def train(batch_size: int) -> int:
        if batch_size > limit:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return batch_size

    return train


class Task:
    """A small model in training that remembers, for each call, its size and the steps it took."""

    def __init__(self, limit: int = 10**9) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.limit = limit
        # Beside a lock, in an object of Python's own, which is not looked into: elsewhere calls of probes are forgotten.
        self._outside = threading.local()
        self._outside.lock, self._outside.calls = threading.Lock(), []

    @property
    def calls(self) -> list[list[int]]:
        calls: list[list[int]] = self._outside.calls
        return calls

    def begin(self, batch_size: int) -> None:
        self.calls.append([batch_size, 0])

    def step(self) -> None:
        batch_size = self.calls[-1][0]
        self.model(torch.randn(batch_size, 4) + random.random()).pow(2).mean().backward()
        self.calls[-1][1] += 1
        if batch_size > self.limit:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def everything(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), *(p.grad for p in self.model.parameters())]
        moments = [value.clone() for entry in self.optimizer.state.values() for value in entry.values()]
        copies = [None if tensor is None else tensor.clone() for tensor in tensors]
        return [copies, moments, torch.get_rng_state(), random.getstate(), self.model.training]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("start", "theirs"), [(128, 92), (8, 8), (100, 100)])
def test_it_answers_the_limit_where_accelerate_answers_what_its_start_allows(start: int, theirs: int) -> None:
    assert find_executable_batch_size(limited(100), starting_batch_size=start)() == theirs
    assert bw.find_batch_size(limited(100), starting_batch_size=start)() == 100


@pytest.mark.parametrize("limit", [1, 3, 37, 1000, 8191])
def test_it_is_exact_and_no_size_is_tried_twice(limit: int) -> None:
    train = bw.find_batch_size(limited(limit))
    assert train() == limit
    assert train.last_fit is not None
    sizes = [trial.micro_batch for trial in train.last_fit.trials]
    assert len(sizes) == len(set(sizes)) <= 20
    assert train.last_fit.certified
    assert train.last_fit.next_size is not None
    assert (train.last_fit.next_size.micro_batch, train.last_fit.next_size.outcome) == (limit + 1, "out_of_memory")


def test_growth_ends_at_the_limit_or_else_at_a_stated_size() -> None:
    assert bw.find_batch_size(starting_batch_size=3, limit=50)(limited(10**9))() == 50
    train = bw.find_batch_size(limited(10**9))
    assert train() == 8192
    assert train.last_fit is not None
    assert "8,192 is the largest size that is tried" in train.last_fit.reason
    assert bw.find_batch_size(starting_batch_size=64, limit=50)(limited(10**9))() == 50


def test_nothing_fits_is_said_with_the_sizes_tried() -> None:
    with pytest.raises(NothingFitsError, match="tried 128, 64, 32, 16, 8, 4, 2, 1"):
        bw.find_batch_size(limited(0))()


def test_a_probing_call_ends_after_its_second_step_and_the_last_call_runs_through() -> None:
    task = Task(limit=20)

    @bw.find_batch_size(starting_batch_size=16)
    def train(batch_size: int, name: str, *, num_steps: int = 7) -> str:
        task.begin(batch_size)
        for _ in range(num_steps):
            try:
                task.step()
            except ValueError:  # pragma: no cover
                raise
            except Exception as error:
                if not isinstance(error, torch.OutOfMemoryError):
                    return "swallowed"
                raise
        return f"{name}: {batch_size}"

    assert train("done") == "done: 20"
    assert [calls for calls in task.calls if calls[0] > 20] == [[32, 1], [24, 1], [22, 1], [21, 1]]
    assert [calls for calls in task.calls if calls[0] <= 20] == [[16, 2], [20, 2], [20, 7]]


def test_the_run_for_real_equals_one_that_was_never_probed() -> None:
    def train(batch_size: int, task: Task) -> list[Any]:
        task.begin(batch_size)
        for _ in range(4):
            task.step()
        return task.everything()

    results = []
    for run in (bw.find_batch_size(starting_batch_size=8)(train), functools.partial(train, 12)):
        torch.manual_seed(0)
        random.seed(0)
        task = Task(limit=12)
        # Moments that are there before, and a gradient that is left over.
        task.begin(2)
        for _ in range(3):
            task.step()
        results.append(run(task))
    assert same(*results)


def test_state_comes_back_also_when_the_function_has_a_bug() -> None:
    task = Task()

    @bw.find_batch_size
    def train(batch_size: int) -> None:
        task.begin(batch_size)
        task.step()
        task.model.eval()
        raise ZeroDivisionError("the user's own mistake")

    before = task.everything()
    with pytest.raises(ZeroDivisionError, match="the user's own mistake") as raised:
        train()
    assert same(before, task.everything())
    assert len(task.calls) == 1
    assert "in a probing call at batch size 128" in raised.value.__notes__[0]
    assert train.last_fit is None


def test_a_bug_that_only_large_sizes_show_names_the_limit_to_set() -> None:
    @bw.find_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> float:
        return 1 / (20 // batch_size)

    with pytest.raises(ZeroDivisionError) as raised:
        train()
    assert "set limit=16" in raised.value.__notes__[0]


def test_a_function_that_catches_everything_is_stopped_at_each_later_step() -> None:
    task = Task(limit=50)

    @bw.find_batch_size(starting_batch_size=50, limit=50)
    def train(batch_size: int) -> int:
        task.begin(batch_size)
        for _ in range(5):
            try:
                task.step()
            except:  # noqa: E722
                continue
        return batch_size

    assert train() == 50
    assert task.calls == [[50, 5], [50, 5]]
    assert train.last_fit is not None
    assert any("caught what ends a probing call" in note for note in train.last_fit.notes)


def test_a_function_that_turns_everything_into_its_own_error_is_understood() -> None:
    task = Task(limit=50)

    @bw.find_batch_size(starting_batch_size=50, limit=50)
    def train(batch_size: int) -> int:
        task.begin(batch_size)
        try:
            for _ in range(5):
                task.step()
        except BaseException as error:
            raise RuntimeError("training failed") from error
        return batch_size

    assert train() == 50
    assert task.calls == [[50, 2], [50, 5]]


def test_two_optimizers_that_take_turns_both_reach_their_second_step() -> None:
    one, other = Task(), Task()

    @bw.find_batch_size(starting_batch_size=8, limit=8)
    def train(batch_size: int) -> None:
        for task in (one, other):
            task.begin(batch_size)
        for _ in range(5):
            one.step()
            other.step()

    train()
    assert one.calls == other.calls == [[8, 2], [8, 5]]


def test_optimizers_that_step_inside_of_backward_are_cut_as_well() -> None:
    model = nn.Linear(4, 4)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    backwards = []

    @bw.find_batch_size(starting_batch_size=8, limit=8)
    def train(batch_size: int) -> None:
        for _ in range(5):
            backwards.append(batch_size)
            model(torch.ones(batch_size, 4)).sum().backward()

    train()
    assert len(backwards) == 2 + 5


def test_a_function_that_prepares_with_accelerate_is_cut_as_well() -> None:
    accelerator = Accelerator(cpu=True)
    task = Task()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(64, 4))))

    @bw.find_batch_size(starting_batch_size=8, limit=8)
    def train(batch_size: int) -> None:
        model, optimizer = accelerator.prepare(task.model, task.optimizer)
        task.begin(batch_size)
        for _ in range(5):
            accelerator.backward(model(loader.dataset[:batch_size][0]).mean())
            optimizer.step()
            optimizer.zero_grad()
            task.calls[-1][1] += 1

    train()
    assert task.calls == [[8, 1], [8, 5]]
    assert train.last_fit is not None
    assert "DataLoaderShard: it has a state_dict that raises" in train.last_fit.restored.not_covered[0]


def test_no_hook_is_left_behind() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = dict(_global_optimizer_post_hooks)
    test_the_run_for_real_equals_one_that_was_never_probed()
    assert dict(_global_optimizer_post_hooks) == before


def test_a_function_that_never_steps_runs_to_its_end_and_that_is_said() -> None:
    train = bw.find_batch_size(limited(9), starting_batch_size=8)
    assert train() == 9
    assert train.last_fit is not None
    assert "each probing call ran to the function's end" in train.last_fit.notes[-1]


def test_a_short_epoch_is_fine_and_said() -> None:
    task = Task()

    @bw.find_batch_size(starting_batch_size=8, limit=8)
    def train(batch_size: int) -> None:
        task.begin(batch_size)
        task.step()

    train()
    assert train.last_fit is not None
    assert "ended after 1 optimizer step" in train.last_fit.notes[-1]


def test_a_size_at_which_nothing_is_trained_is_not_an_answer() -> None:
    task = Task()

    @bw.find_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        task.begin(batch_size)
        for _ in range(20 // batch_size):
            task.step()

    with pytest.raises(InvalidInputError, match=r"no optimizer step at batch size 32, but does at 16") as raised:
        train()
    assert raised.value.remedy.startswith("limit=16")


@pytest.mark.parametrize("start", [1, 16, 10**6])
@pytest.mark.parametrize(
    ("effective", "room", "answer"),
    [
        (1, 10**9, 1),
        (7, 3, 1),
        (7, 7, 7),
        (12, 5, 4),
        (256, 100, 64),
        (256, 10**9, 256),
        (360, 100, 90),
        (360, 359, 180),
        (1_000_003, 10**9, 1_000_003),
        (1_000_003, 1_000_002, 1),
    ],
)
def test_every_call_keeps_the_effective_batch_exactly(effective: int, room: int, answer: int, start: int) -> None:
    calls = []

    @bw.find_batch_size(starting_batch_size=start, effective_batch=effective, limit=10**7)
    def train(batch_size: int, accumulation: int, name: str) -> tuple[int, int, str]:
        calls.append((batch_size, accumulation))
        if batch_size > room:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return batch_size, accumulation, name

    assert train("run") == (answer, effective // answer, "run")
    assert all(size * accumulation == effective for size, accumulation in calls)
    # The last call is the run for real.
    assert len(set(calls)) == len(calls) - 1
    fit = train.last_fit
    assert fit is not None
    assert fit.plan is not None
    assert fit.next_size is not None
    assert fit.micro_batch == fit.plan.micro_batch == answer
    assert fit.plan.accumulation == effective // answer
    if answer < effective:
        above = min(size for size in range(answer + 1, effective + 1) if effective % size == 0)
        assert (fit.next_size.micro_batch, fit.next_size.outcome) == (above, "out_of_memory")
        assert fit.reason == f"micro-batch {above:,} ran out of memory"
    else:
        assert fit.reason == f"the effective batch is {effective:,}"


def test_growth_doubles_also_among_divisors() -> None:
    sizes = []

    @bw.find_batch_size(starting_batch_size=16, effective_batch=256)
    def train(batch_size: int, accumulation: int) -> None:
        sizes.append(batch_size)
        if batch_size > 100:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    train()
    assert sizes == [16, 32, 64, 128, 64]


@pytest.mark.parametrize(("limit", "answer", "above"), [(100, 90, 120), (None, 360, 361)])
def test_a_divisor_that_the_limit_forbids_is_the_next_size(limit: int | None, answer: int, above: int) -> None:
    @bw.find_batch_size(effective_batch=360, limit=limit)
    def train(batch_size: int, accumulation: int) -> tuple[int, int]:
        return batch_size, accumulation

    assert train() == (answer, 360 // answer)
    assert train.last_fit is not None
    assert train.last_fit.next_size is not None
    assert (train.last_fit.next_size.micro_batch, train.last_fit.next_size.outcome) == (above, None)
    assert train.last_fit.reason == ("the limit is 100" if limit else "the effective batch is 360")


def test_a_search_cut_short_names_the_next_divisor() -> None:
    @bw.find_batch_size(starting_batch_size=8, effective_batch=256, max_trials=2)
    def train(batch_size: int, accumulation: int) -> tuple[int, int]:
        return batch_size, accumulation

    assert train() == (16, 16)
    assert train.last_fit is not None
    assert train.last_fit.next_size is not None
    assert (train.last_fit.next_size.micro_batch, train.last_fit.next_size.outcome) == (32, None)
    assert train.last_fit.reason.startswith("2 trials were used up")


@pytest.mark.parametrize(("effective", "is_said"), [(127, True), (128, False)])
def test_few_divisors_are_said_with_a_neighbour_that_has_more(effective: int, is_said: bool) -> None:
    @bw.find_batch_size(effective_batch=effective)
    def train(batch_size: int, accumulation: int) -> None:
        if batch_size > 100:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    train()
    assert train.last_fit is not None
    beginning = "no size between 1 and 127 divides 127, so none of them was tried; an effective batch of 128 has"
    assert train.last_fit.notes[-1].startswith(beginning) == is_said


def test_nothing_fits_names_the_divisors_where_they_are_the_reason() -> None:
    task = Task(limit=3)

    @bw.find_batch_size(effective_batch=7)
    def train(batch_size: int, accumulation: int) -> None:
        task.begin(batch_size)
        task.step()

    # Its BatchNorm needs two samples, so 2 and 3 would do.
    with pytest.raises(NothingFitsError, match="no size between 1 and 7 divides 7"):
        train()


def test_the_starting_batch_size_is_the_effective_batch_unless_one_is_given() -> None:
    @bw.find_batch_size(starting_batch_size=96)
    def train(batch_size: int, *, accumulation: int = 1) -> tuple[int, int]:
        if batch_size > 40:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return batch_size, accumulation

    assert train() == (32, 3)


def test_an_effective_batch_with_few_divisors_is_told_of_its_neighbour() -> None:
    plan, notes = keep_effective_batch(127, 100)
    assert (plan.micro_batch, plan.accumulation) == (1, 127)
    assert notes[-1] == "an effective batch of 128 would need only 64 x 2"


def test_a_divisor_far_below_what_fits_is_found() -> None:
    plan, _ = keep_effective_batch(3 * 2677, 3 * 2677 - 1)
    assert (plan.micro_batch, plan.accumulation) == (2677, 3)


def test_its_signature_is_the_function_without_what_the_decorator_passes() -> None:
    @bw.find_batch_size
    def train(batch_size: int, model: str, accumulation: int, *, name: str = "run") -> None:
        """Train a model."""

    assert list(inspect.signature(train).parameters) == ["model", "name"]
    assert train.__name__ == "train"  # type: ignore[attr-defined]
    assert train.__doc__ == "Train a model."
    assert callable(train)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((32, "model"), {}), (("model",), {"batch_size": 3}), (("model",), {"accumulation": 2}), ((), {})],
)
def test_a_wrong_call_is_answered_with_the_right_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    @bw.find_batch_size
    def train(batch_size: int, model: str, *, accumulation: int) -> None:
        raise AssertionError("must not be called")

    with pytest.raises(TypeError, match="callers leave out batch_size and accumulation") as raised:
        train(*args, **kwargs)
    assert isinstance(raised.value, InvalidInputError)
    assert raised.value.remedy == "train(model)"


def test_a_function_that_cannot_be_meant_is_refused_when_it_is_decorated() -> None:
    def nothing() -> None: ...

    async def later(batch_size: int) -> None: ...

    def method(self: Any, batch_size: int) -> None: ...

    for function, words in ((nothing, "first parameter"), (later, "plain functions"), (method, "first parameter")):
        with pytest.raises(InvalidInputError, match=words):
            bw.find_batch_size(function)
    with pytest.raises(InvalidInputError, match="no parameter named accumulation"):
        bw.find_batch_size(effective_batch=64)(limited(3))
    with pytest.raises(InvalidInputError, match="starting batch size"):
        bw.find_batch_size(starting_batch_size=0)(limited(3))
    with pytest.raises(InvalidInputError, match="limit"):
        bw.find_batch_size(limit=0)(limited(3))


def test_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match="runs on several ranks"):
        bw.find_batch_size(limited(3))()


def test_out_of_memory_in_the_run_for_real_says_what_had_fitted() -> None:
    model = nn.Linear(2, 1)

    @bw.find_batch_size(starting_batch_size=4, limit=4)
    def train(batch_size: int) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        for number in range(3):
            if number == 2:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            optimizer.step()

    with pytest.raises(torch.OutOfMemoryError) as raised:
        train()
    assert "2 optimizer steps fitted at batch size 4" in raised.value.__notes__[0]


def test_a_real_budget_is_kept_by_a_real_model() -> None:
    lines: list[str] = []

    @bw.find_batch_size(starting_batch_size=32, on="cpu", memory="192MiB", progress=lines.append)
    def train(batch_size: int, width: int) -> int:
        weight = nn.Parameter(torch.ones(width))
        optimizer = torch.optim.AdamW([weight])
        for _ in range(3):
            (torch.ones(batch_size, width) * weight).relu().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    size = train(2**18)
    # 1 MiB a sample, of which two copies at the least are alive at once and certainly no eight.
    assert 12 < size <= 96
    assert train.last_fit is not None
    assert train.last_fit.next_size is not None
    assert train.last_fit.next_size.outcome == "out_of_memory"
    assert lines[0] == "trying micro-batch 32"
    assert lines[-1] == f"running train at batch size {size:,}"


@pytest.mark.slow
def test_a_real_model_accumulates_within_a_real_budget_to_the_weights_of_the_full_batch() -> None:
    effective, width = 60, 2**18
    calls = []

    def train(batch_size: int, accumulation: int) -> torch.Tensor:
        calls.append((batch_size, accumulation))
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(width))
        optimizer = torch.optim.SGD([weight], lr=width)
        for step in range(3):
            for first in range(0, effective, batch_size):
                samples = torch.arange(first, first + batch_size)[:, None] / effective + step
                ((samples * weight).relu().mean() / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    whole = train(effective, 1)
    calls.clear()
    result = bw.find_batch_size(train, 6, effective_batch=effective, on="cpu", memory="80MiB")
    kept = result()
    assert all(size * accumulation == effective for size, accumulation in calls)
    fit = result.last_fit
    assert fit is not None
    assert fit.micro_batch is not None
    assert fit.next_size is not None
    # 1 MiB a sample, of which two copies at the least are alive at once and certainly no eight.
    assert 10 <= fit.micro_batch <= 30
    assert (fit.next_size.outcome, 60 % fit.next_size.micro_batch) == ("out_of_memory", 0)
    assert calls[-1] == (fit.micro_batch, 60 // fit.micro_batch)
    torch.testing.assert_close(kept, whole)


def test_a_live_model_is_inside_the_budget() -> None:
    model = nn.Linear(2**12, 2**12, bias=False)

    @bw.find_batch_size(starting_batch_size=1, limit=1, on="cpu", memory="100MiB")
    def train(batch_size: int) -> int:
        model(torch.ones(batch_size, 2**12)).sum().backward()
        return batch_size

    # 64 MiB of gradients fit into 100, but not beside 64 MiB of weights.
    with pytest.raises(NothingFitsError, match=r"micro-batch 1 does not fit on cpu \(100 MiB\)"):
        train()


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("was_frozen", [True, False])
def test_garbage_is_looked_for_among_new_objects_only_and_only_while_probing(was_frozen: bool) -> None:
    is_frozen: list[bool] = []

    @bw.find_batch_size(starting_batch_size=1, limit=1)
    def train(batch_size: int) -> None:
        is_frozen.append(gc.get_freeze_count() > 0)

    if was_frozen:
        gc.freeze()
    try:
        train()
        assert is_frozen == [True, was_frozen]
        assert (gc.get_freeze_count() > 0) == was_frozen
    finally:
        gc.unfreeze()
