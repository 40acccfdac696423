"""noise on an unmodified program: what NoiseScale would measure in its loop, from outside."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.scripts.noise_script import measure_noise_of_script
from batchwright.scripts.script import Script

if TYPE_CHECKING:
    from pathlib import Path

# The same loop with and without NoiseScale in it: the oracle is the loop that has it.
PROGRAM = """
    import sys, torch
    from torch import nn
    size = int(sys.argv[1])
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(4000, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=size, shuffle=True)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    noise = None
    for index, (x,) in enumerate(loader):
        (model(x) - x.sum(1, keepdim=True) - torch.randn(len(x), 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "watched" in sys.argv:
            import batchwright as bw
            if noise is None:
                noise = bw.NoiseScale(model, optimizer=optimizer, micro_batch=size)
                noise.average_over(30 * size)
            elif index == 59:
                print(noise.critical_batch.value, noise.critical_batch.low)
                break
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(dedent(PROGRAM))
    return tmp_path


def test_it_measures_what_noise_scale_measures_inside_the_loop(folder: Path) -> None:
    import subprocess
    import sys

    inside = subprocess.run(
        [sys.executable, "train.py", "16", "watched"], cwd=folder, capture_output=True, text=True, check=True
    )
    value, low = map(float, inside.stdout.split())
    run = measure_noise_of_script(Script(["train.py", "{micro_batch}"], cwd=folder), micro_batch=16, steps=60)
    assert run.critical_batch.value == pytest.approx(value, rel=1e-6)
    assert run.critical_batch.low == pytest.approx(low, rel=1e-6)
    assert (run.micro_batch, run.accumulation, run.steps, run.critical_batch.unit) == (16, 1, 60, "samples")
    assert "critical batch" in str(run)


def test_too_few_steps_say_so(folder: Path) -> None:
    with pytest.raises(BatchwrightError, match=r"1 step of train\.py gave no observation"):
        measure_noise_of_script(Script(["train.py", "16"], cwd=folder), steps=1)


def test_a_simulated_card_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="real gradients"):
        measure_noise_of_script(Script(["train.py", "16"], cwd=folder), on="a100-40gb")


def test_a_micro_batch_without_a_place_is_set_at_the_loader(folder: Path) -> None:
    measured = measure_noise_of_script(Script(["train.py", "16"], cwd=folder), micro_batch=8, steps=20)
    assert measured.micro_batch == 8
    assert any("DataLoader(batch_size=16)" in note for note in measured.notes)
