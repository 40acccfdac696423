"""Every result shows itself in a notebook: HTML that is whole by itself, with the user's names as text."""

from __future__ import annotations

import ast
import importlib.util
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.checkup.check import check_machine
from batchwright.integrations.transformers.exact_loss import ExactLoss, HeadCheck
from batchwright.memory.estimate import estimate_every_card
from batchwright.noise.noise_run import measure_noise
from batchwright.planning.critical_batch import CriticalBatch
from batchwright.planning.learning_rate import learning_rate_change
from batchwright.printed_result import PrintedLine, PrintedResult
from batchwright.report.display import render_plain
from batchwright.scripts.estimate_script import ScriptEstimate
from batchwright.scripts.script_run import ScriptRun
from batchwright.units import PeakBytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

ROOT = Path(bw.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
# As a name it is as bad as one can be: HTML, quotes, a control character, half of a pair.
EVIL = "<script>alert(1)</script>\"'\x00\ud800"
NAMED = {"Audit", "Estimate", "EveryCard", "ExactLoss", "Fit", "HeadCheck", "NoiseRun", "ScriptEstimate"}
# What a table in a notebook is made of; anything else came out of a name.
TAGS = {"p", "b", "br", "table", "thead", "tbody", "tr", "th", "td"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    off: torch.Tensor = model(batch) - batch.sum(1, keepdim=True) - torch.randn(len(batch), 1, device=batch.device)
    return off.pow(2).mean()


def work(**changes: Any) -> bw.Workload:
    told: dict[str, Any] = {
        "model": Layer,
        "batch": lambda n: torch.randn(n, 8),
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=1e-2),
        "name": EVIL,
    }
    return bw.Workload(**{**told, **changes})


def one_step() -> Any:
    model = Layer()
    accumulator = bw.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for batch in accumulator.micro_batches([torch.randn(4, 8)]):
        step = accumulator.backward(loss(model, batch))
    return step


def checked(folder: Path) -> bw.ConfigCheck:
    file = folder / "<b>ds.json"
    file.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    return bw.check_config(file, devices=8)


SCRIPT_RUN = ScriptRun(end="cut", num_windows=2, input_shapes=((8, 3),), peak_bytes=PeakBytes(1, 2, 3), notes=(EVIL,))
HEAD = HeadCheck(EVIL, "uses", 0.0, "it uses the count")
RESULTS: dict[str, Callable[[Path], Any]] = {
    "ScriptEstimate": lambda _: ScriptEstimate(EVIL, f"python {EVIL}", "a100-40gb", SCRIPT_RUN, None, "predicted"),
    "Advice": lambda _: bw.advise("oom", micro_batch=8),
    "Audit": lambda _: bw.audit(work()),
    "BestBatch": lambda _: bw.best_batch(400, {16: 0.12, 64: 0.24, 256: 0.72}),
    "Check": lambda _: check_machine(["Accumulator"], on=[]),
    "ConfigCheck": checked,
    "CriticalBatch": lambda _: CriticalBatch(212.4, 168.2, 290.6, unit="samples", observations=120),
    "Estimate": lambda _: bw.estimate(work(), micro_batch=4),
    "EveryCard": lambda _: estimate_every_card(work(), micro_batch=4),
    "ExactLoss": lambda _: ExactLoss(HEAD, None, is_exact=True, changed=(EVIL,), reason=EVIL, _undo={}, _trainer=None),
    "Fit": lambda _: bw.fit(work(), limit=4),
    "HeadCheck": lambda _: HEAD,
    "MeasuredCriticalBatch": lambda _: bw.measure_critical_batch(work(), batches=(4, 16), steps=30, seeds=1),
    "LearningRateChange": lambda _: learning_rate_change(
        "AdamW", 32, 64, CriticalBatch(212.4, 168.2, 290.6, unit="samples", observations=120)
    ),
    "NoiseRun": lambda _: measure_noise(work(), effective_batch=16, steps=25),
    "Packing": lambda _: bw.pack([5, 3, 4, 2, 6], max_tokens=10),
    "Plan": lambda _: bw.plan(32, micro_batch=8, samples=100),
    "Recommendation": lambda _: bw.recommend("7B", "24GiB"),
    "SamplerStats": lambda _: bw.TokenBatchSampler([5, 3, 4, 2, 6], max_tokens=10).stats(),
    "Step": lambda _: one_step(),
    "Tuned": lambda _: bw.tune(work(), limit=4, steps=20, skip=("estimate", "noise")),
    "Verdict": lambda _: measure_noise(work(), effective_batch=16, steps=25).verdict,
    "Tuned, nothing found": lambda _: bw.tune(
        work(), skip=("fit", "estimate", "throughput", "audit", "noise"), steps=20
    ),
}


class Reader(HTMLParser):
    """Reads a piece of HTML, and fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= {"style"}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module", params=RESULTS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    result = RESULTS[request.param](tmp_path_factory.mktemp("results"))
    assert type(result).__name__ == request.param.split(",")[0]
    return result


def test_a_result_is_html_that_is_whole_by_itself_with_names_as_text(found: Any) -> None:
    shown = found._repr_html_()
    words = "".join(Reader(shown).words)
    assert words.strip()
    assert "\x00" not in shown
    shown.encode()  # halves of pairs cannot be sent to a browser
    if type(found).__name__ in NAMED:
        assert "<script>alert(1)</script>\"'" in words


def test_a_result_is_as_its_schema_says(found: Any) -> None:
    if not hasattr(found, "to_dict"):
        return
    name = type(found).__name__
    schema = json.loads((DOCS / "reference" / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    answer = json.loads(json.dumps(found.to_dict()))
    assert list(load_schemas().find_mismatches(answer, schema)) == []
    assert set(schema["required"]) <= set(answer)


def load_schemas() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schemas", DOCS / "schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_print_of_a_result_is_the_text_of_its_command(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(found)
    assert text.strip()
    assert "\x1b" not in text
    if hasattr(found, "__rich__"):
        assert isinstance(found, PrintedResult)
        assert text == render_plain(found)
    for name, value in {"COLUMNS": "30", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    assert str(found) == text


def test_the_repr_of_a_result_is_one_short_line(found: Any) -> None:
    if isinstance(found, PrintedResult):
        assert repr(found).startswith(f"{type(found).__name__}(")
        assert len(repr(found)) < 300
        assert "\n" not in repr(found)
        assert "=None" not in repr(found).split(",")[0]


BASES = (PrintedResult.__name__, PrintedLine.__name__)


def drawn_classes() -> dict[str, set[str]]:
    """Every class of ours that draws itself, with the names of its methods."""
    found: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                if any(isinstance(base, ast.Name) and base.id in BASES for base in node.bases):
                    methods.add("_repr_html_")  # inherited
                # `Drawing` is what a result hands over to be drawn, and no result.
                if methods & {"__rich__", "_repr_html_"} and node.name not in (*BASES, "Drawing"):
                    found[node.name] = methods
    return found


def test_no_result_is_left_out_here_and_each_that_draws_itself_does_so_in_a_notebook_too() -> None:
    classes = drawn_classes()
    assert {name for name, methods in classes.items() if "_repr_html_" not in methods} == set()
    assert set(classes) - {name.split(",")[0] for name in RESULTS} == set()
