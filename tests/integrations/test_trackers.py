"""Trackers: what is written is read back by the packages themselves, where they are installed."""

from __future__ import annotations

import importlib.util
import json
import math
import sqlite3
import types
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from batchwright.accumulate.accumulator import Accumulator
from batchwright.errors import InvalidInputError
from batchwright.integrations.trackers import KEYS, TrackerWarning, batch_metrics, effective_batch_text, tracker_for
from batchwright.noise.noise_scale import NoiseScale
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.plan import plan
from batchwright.sampler.pack import pack
from batchwright.sampler.token_batch_sampler import TokenBatchSampler
from tests.integrations.event_files import scalars, texts
from tests.noise.regression import batches_of, loss_of, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENTRY = "Config/effective_batch_size"
METRICS = {"batch/micro": 8, "batch/critical": 212.5, "batch/critical_high": math.inf, "batch/waste": math.nan}
WRITTEN = {"batch/micro": 8.0, "batch/critical": 212.5}


def needs(package: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed: pip install {package}")


def steps_of(number: int) -> Iterator[tuple[Any, NoiseScale]]:
    """Steps of a real run with an Accumulator: 2 micro-batches of 4 each."""
    model = make_model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), accumulation=2)
    noise = NoiseScale(accumulator)
    for batch in accumulator.micro_batches([part for step in range(number) for part in batches_of(step, [4, 4])]):
        step = accumulator.backward(loss_of(model, batch))
        if step is not None:
            yield step, noise


class TestMetrics:
    def test_a_step_tells_what_went_into_it(self) -> None:
        [(step, _)] = steps_of(1)
        assert batch_metrics(step) == {
            "batch/micro": 4, "batch/accumulation": 2, "batch/effective": 8, "batch/units": 8,
        }  # fmt: skip

    def test_a_step_over_devices_is_shared_among_them(self) -> None:
        [(step, _)] = steps_of(1)
        assert batch_metrics(step, devices=2)["batch/accumulation"] == 1
        assert batch_metrics(plan(8, micro_batch=4, devices=2), step)["batch/accumulation"] == 1

    def test_the_critical_batch_comes_with_both_ends_or_without_what_is_not_resolved(self) -> None:
        found = CriticalBatch(212.0, 168.0, 291.0, unit="samples", observations=120)
        ends = {"batch/critical": 212.0, "batch/critical_low": 168.0, "batch/critical_high": 291.0}
        assert batch_metrics(found) == ends
        assert batch_metrics(CriticalBatch(900.0, 168.0, math.inf, "samples", 120)) == {"batch/critical_low": 168.0}
        assert batch_metrics(CriticalBatch(900.0, 0.0, math.inf, "samples", 2)) == {}
        assert batch_metrics(CriticalBatch(math.inf, 168.0, math.inf, "samples", 120)) == {"batch/critical_low": 168.0}
        assert batch_metrics(None) == {}

    def test_tokens_are_told_in_samples_so_that_they_stand_beside_the_effective_batch(self) -> None:
        tokens = CriticalBatch(6400.0, 3200.0, 9600.0, unit="tokens", observations=50, samples_per_unit=1 / 64)
        assert batch_metrics(tokens)["batch/critical"] == 100
        unknown = CriticalBatch(6.0, 3.0, 9.0, unit="micro-batches", observations=50)
        assert batch_metrics(unknown)["batch/critical"] == 6

    def test_padding_is_that_of_the_sampler(self) -> None:
        sampler = TokenBatchSampler([3, 9, 4, 7, 2, 8, 5, 6] * 10, max_tokens=32)
        waste = sampler.stats().waste
        assert waste > 0
        assert batch_metrics(sampler) == batch_metrics(sampler.stats()) == {"batch/waste": waste}
        assert batch_metrics(pack([5, 3, 4], max_tokens=10)) == {"batch/waste": pytest.approx(0.4)}

    def test_names_are_the_agreed_ones_and_come_in_their_order(self) -> None:
        sampler = TokenBatchSampler([3, 9, 4, 7], max_tokens=32)
        [(step, _)] = steps_of(1)
        found = CriticalBatch(212.0, 168.0, 291.0, unit="samples", observations=120)
        assert tuple(batch_metrics(sampler.stats(), found, plan(8, micro_batch=4), step)) == KEYS

    def test_what_is_no_result_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match=r"batch_metrics takes a Plan, .*; received 'eight'"):
            batch_metrics("eight")


def test_the_product_is_written_as_people_write_it() -> None:
    micro, accumulation = 8, 4
    assert effective_batch_text(micro, accumulation) == f"{micro} × {accumulation} = {micro * accumulation}"  # noqa: RUF001
    assert effective_batch_text(8, 4, 2) == "8 × 4 × 2 = 64"  # noqa: RUF001
    assert effective_batch_text(plan(64, micro_batch=8, devices=2)) == effective_batch_text(8, 4, 2)
    with pytest.raises(InvalidInputError, match=r"micro-batch must be a whole number.*received 2\.5"):
        effective_batch_text(2.5)  # type: ignore[arg-type]


class TestTensorBoard:
    def test_a_real_run_is_read_back_by_tensorboard(self, tmp_path: Path) -> None:
        writer = SummaryWriter(str(tmp_path))
        tracker = tracker_for(writer)
        tracker.log_effective_batch(4, 2)
        wanted = {}
        for step, noise in steps_of(8):
            wanted[step.number] = batch_metrics(noise, step)
            tracker.log(wanted[step.number], step.number)
        writer.close()
        found = scalars(tmp_path)
        assert set(found) <= set(KEYS)
        assert found["batch/effective"] == dict.fromkeys(range(1, 9), 8)
        for key in KEYS:
            there = {number: metrics[key] for number, metrics in wanted.items() if key in metrics}
            assert found.get(key, {}) == pytest.approx(there, rel=1e-6)
        # From the first step that has one: a lower end takes a few observations.
        assert (
            min(found["batch/critical_low"]) == min(n for n, each in wanted.items() if "batch/critical_low" in each) > 1
        )
        assert texts(tmp_path) == {ENTRY: [effective_batch_text(4, 2)]}
        assert tracker.failures == 0

    def test_a_closed_writer_goes_on_in_another_file(self, tmp_path: Path) -> None:
        writer = SummaryWriter(str(tmp_path))
        tracker = tracker_for(writer)
        tracker.log(METRICS, 1)
        writer.close()
        tracker.log(METRICS, 2)
        writer.close()
        assert scalars(tmp_path)["batch/micro"] == {1: 8, 2: 8}
        assert tracker.failures == 0

    @needs("tensorboardX")
    def test_tensorboardx_is_written_to_as_well(self, tmp_path: Path) -> None:
        writer = importlib.import_module("tensorboardX").SummaryWriter(str(tmp_path))
        tracker = tracker_for(writer)
        tracker.log(METRICS, 3)
        tracker.log_effective_batch(8, 4)
        writer.close()
        assert scalars(tmp_path) == {"batch/micro": {3: 8}, "batch/critical": {3: 212.5}}
        assert texts(tmp_path) == {ENTRY: [effective_batch_text(8, 4)]}


@needs("wandb")
class TestWandb:
    @pytest.fixture
    def wandb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        return importlib.import_module("wandb")

    @pytest.mark.filterwarnings("ignore")
    def test_an_offline_run_holds_metrics_and_config(self, wandb: Any, tmp_path: Path) -> None:
        run = wandb.init(project="batchwright", dir=str(tmp_path))
        tracker = tracker_for(wandb)
        assert tracker.target is run
        tracker.log_effective_batch(8, 4)
        tracker.log(METRICS, 5)
        run.log({"loss": 1.0}, step=9)
        assert (run.summary["batch/micro"], run.summary["batch/critical"]) == (8, 212.5)
        assert "batch/waste" not in dict(run.summary)
        assert run.config[ENTRY] == effective_batch_text(8, 4)
        run.finish()
        assert tracker.failures == 0
        with pytest.warns(TrackerWarning, match=r"Weights & Biases did not take log at step 11 .*is finished"):
            tracker.log(METRICS, 11)
        assert tracker.failures == 1
        with pytest.raises(InvalidInputError, match="wandb has no open run"):
            tracker_for(wandb)


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_holds_metrics_and_a_tag(tmp_path: Path) -> None:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.set_experiment("batchwright")
    with mlflow.start_run() as run:
        client = mlflow.MlflowClient()
        trackers = [tracker_for(mlflow), tracker_for(run), tracker_for(client, run_id=run.info.run_id)]
        for step, tracker in enumerate(trackers):
            tracker.log(METRICS, step)
            tracker.log_effective_batch(8, step + 1)
            assert tracker.failures == 0
            assert client.get_run(run.info.run_id).data.tags[ENTRY] == effective_batch_text(8, step + 1)
    history = client.get_metric_history(run.info.run_id, "batch/critical")
    assert sorted((metric.step, metric.value) for metric in history) == [(0, 212.5), (1, 212.5), (2, 212.5)]
    assert client.get_run(run.info.run_id).data.metrics == WRITTEN
    with pytest.raises(InvalidInputError, match="an MlflowClient has many runs"):
        tracker_for(client)


@needs("trackio")
@pytest.mark.filterwarnings("ignore")
def test_trackio_holds_metrics_and_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = importlib.import_module("trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path, raising=False)
    with pytest.raises(InvalidInputError, match="trackio has no open run"):
        tracker_for(trackio)
    trackio.init(project="batchwright")
    tracker = tracker_for(trackio)
    tracker.log_effective_batch(8, 4)
    tracker.log(METRICS, 5)
    tracker.log_effective_batch(8, 8)
    trackio.finish()
    assert tracker.failures == 0
    with sqlite3.connect(tmp_path / "batchwright.db") as base:
        logged = {step: json.loads(metrics) for step, metrics in base.execute("SELECT step, metrics FROM metrics")}
        [config] = (json.loads(text) for (text,) in base.execute("SELECT config FROM configs"))
    assert logged[5] == WRITTEN
    assert {ENTRY: effective_batch_text(8, 8)} in logged.values()
    assert config[ENTRY] == effective_batch_text(8, 4)


class Stub:
    """Something of a package that need not be installed: it keeps the calls that it is sent."""

    def __init__(self, *names: str, **attributes: Any) -> None:
        self.calls: list[Any] = []
        for name in names:
            setattr(self, name, lambda *given, _name=name, **options: self.calls.append((_name, *given, options)))
        vars(self).update(attributes)


def stub_of(package: str, *names: str, **attributes: Any) -> Stub:
    kind = type("Thing", (Stub,), {"__module__": f"{package}.inner"})
    made: Stub = kind(*names, **attributes)
    return made


class TestWithoutThePackages:
    def test_each_is_called_in_its_own_way(self) -> None:
        config = Stub("update")
        run = stub_of("wandb", "log", config=config)
        tracker = tracker_for(run)
        tracker.log(METRICS, 3)
        tracker.log_effective_batch(8, 4)
        assert run.calls == [("log", WRITTEN, {"step": 3})]
        assert config.calls == [("update", {ENTRY: effective_batch_text(8, 4)}, {"allow_val_change": True})]

        run = stub_of("trackio", "log", config={})
        tracker_for(run).log(METRICS, 3)
        tracker_for(run).log_effective_batch(8, 4)
        assert run.calls == [("log", WRITTEN, {"step": 3})]
        assert vars(run)["config"] == {ENTRY: effective_batch_text(8, 4)}

        logger = stub_of("somewhere", "log_metrics", "log_hyperparams", experiment=None)
        tracker_for(logger).log(METRICS, 3)
        tracker_for(logger).log_effective_batch(8, 4)
        text = {ENTRY: effective_batch_text(8, 4)}
        assert logger.calls == [("log_metrics", WRITTEN, {"step": 3}), ("log_hyperparams", text, {})]

    def test_the_module_mlflow_is_its_active_run(self) -> None:
        calls: list[Any] = []
        module = types.ModuleType("mlflow")
        vars(module)["log_metrics"] = lambda metrics, step: calls.append((metrics, step))
        vars(module)["set_tag"] = lambda name, text: calls.append((name, text))
        tracker_for(module).log(METRICS, 3)
        tracker_for(module).log_effective_batch(8, 4)
        assert calls == [(WRITTEN, 3), (ENTRY, effective_batch_text(8, 4))]

    def test_a_client_needs_to_know_its_run(self) -> None:
        with pytest.raises(InvalidInputError, match=r"an MlflowClient has many runs[\s\S]*run_id=run\.info\.run_id"):
            tracker_for(stub_of("mlflow", "log_batch"))

    def test_a_function_gets_metrics_and_step_and_a_tracker_stays_itself(self) -> None:
        told: list[Any] = []
        tracker = tracker_for(lambda metrics, step: told.append((metrics, step)))
        tracker.log(METRICS, 3)
        tracker.log({"batch/critical": math.inf}, 4)
        tracker.log_effective_batch(8, 4)
        assert told == [(WRITTEN, 3)]
        assert tracker_for(tracker) is tracker
        assert tracker.failures == 0


@pytest.mark.parametrize("target", [None, 7, "runs/", object(), ["log"]])
def test_what_cannot_be_written_to_is_refused_with_what_can(target: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"metrics cannot be logged to [\s\S]*try: a SummaryWriter, a run of"):
        tracker_for(target)


def test_a_class_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="metrics cannot be logged to the class SummaryWriter"):
        tracker_for(SummaryWriter)


@pytest.mark.parametrize("value", ["eight", "8", None, True, [1, 2], torch.ones(2), 10**400, 1j])
def test_what_is_no_number_is_left_out_and_said_once(value: Any) -> None:
    told: list[Any] = []
    tracker = tracker_for(lambda metrics, step: told.append(metrics))
    with pytest.warns(TrackerWarning, match=r"batch/micro must be a number; received .*\. It was left out"):
        tracker.log({"batch/micro": value, "batch/units": 3}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.log({"batch/micro": value, "batch/units": 3}, 2)
    assert told == [{"batch/units": 3}] * 2
    assert tracker.failures == 2


def test_numbers_of_torch_and_numpy_are_numbers_and_their_nans_are_left_out() -> None:
    told: list[Any] = []
    tracker = tracker_for(lambda metrics, step: told.append(metrics))
    numpy = pytest.importorskip("numpy")
    tracker.log({"a": torch.tensor(3.5), "b": numpy.float32(0.5), "c": torch.tensor(math.nan), "d": numpy.inf}, 0)
    assert told == [{"a": 3.5, "b": 0.5}]
    assert tracker.failures == 0


def test_a_tracker_that_fails_is_warned_of_once_and_counted() -> None:
    class Broken:
        def add_scalar(self, *_: Any) -> None:
            raise OSError("no space left\non device")

        add_text = add_scalar

    tracker = tracker_for(Broken())
    with pytest.warns(TrackerWarning, match=r"TensorBoard did not take log at step 4 \(OSError: no space left\)"):
        tracker.log(METRICS, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.log(METRICS, 5)
        tracker.log_effective_batch(8, 4)
    assert tracker.failures == 3
