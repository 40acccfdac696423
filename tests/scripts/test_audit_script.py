"""audit on an unmodified program: its own loop at one batch and at a split, with faults that loops really have."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from batchwright.auditing.audit_result import TOLERANCES
from batchwright.errors import InvalidInputError
from batchwright.scripts.audit_script import audit_script
from batchwright.scripts.script import Script

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
    import argparse, torch
    from torch import nn
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--fault", default="")
    args = parser.parse_args()
    data = torch.utils.data.TensorDataset(torch.randn(400, 16), torch.randn(400, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for index, (x, y) in enumerate(loader):
        if args.fault == "draws":
            x = torch.randn(args.batch_size, 16).flip(0)
        loss = (model(x) - y).square().mean()
        parts = 1 if args.fault == "fixed" else args.grad_accum
        (loss if args.fault == "count" else loss / parts).backward()
        if (index if args.fault == "first" else index + 1) % parts == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest) -> Script:
    (tmp_path / "train.py").write_text(dedent(PROGRAM))
    words = ["train.py", "--batch-size={micro_batch}", "--grad-accum={accumulation}", "--fault", request.param]
    return Script(words, cwd=tmp_path)


@pytest.mark.parametrize("script", ["none"], indirect=True)
def test_a_right_loop_gives_the_gradient_of_the_big_batch(script: Script) -> None:
    audit = audit_script(script, micro_batch=2, accumulation=4)
    assert audit.exact
    assert audit.relative_error is not None
    assert audit.relative_error <= TOLERANCES["fp32"]
    assert audit.splits[0].sizes == (2, 2, 2, 2)


@pytest.mark.parametrize("script", ["count"], indirect=True)
def test_a_count_that_is_ignored_is_named_with_its_factor(script: Script) -> None:
    audit = audit_script(script, micro_batch=2, accumulation=4)
    assert audit.ratio == pytest.approx(4, rel=1e-4)
    assert audit.cause == "count ignored"


@pytest.mark.parametrize("script", ["first"], indirect=True)
def test_a_first_window_of_one_micro_batch_is_seen_by_its_counts(script: Script) -> None:
    audit = audit_script(script, micro_batch=2, accumulation=4)
    assert not audit.exact
    assert not audit.is_comparable
    assert [defect.name for defect in audit.defects] == ["windows of different lengths"]
    assert "1, 4, 4 where 4" in audit.explanation


@pytest.mark.parametrize("script", ["draws"], indirect=True)
def test_samples_that_are_drawn_by_batch_cannot_be_compared(script: Script) -> None:
    audit = audit_script(script, micro_batch=3, accumulation=2)
    assert not audit.is_comparable
    assert audit.cause == "cannot be compared"
    assert "was not compared" in str(audit)


@pytest.mark.parametrize("script", ["fixed"], indirect=True)
def test_an_accumulation_that_changes_nothing_is_refused(script: Script) -> None:
    with pytest.raises(InvalidInputError, match="the accumulation changes nothing"):
        audit_script(script, micro_batch=2, accumulation=4)


@pytest.mark.parametrize("script", ["none"], indirect=True)
def test_options_are_recognised_and_named(script: Script) -> None:
    audit = audit_script(Script(["train.py"], cwd=script.cwd), micro_batch=2, accumulation=2)
    assert audit.exact
    assert "--grad-accum of the program sets its accumulation" in audit.notes
