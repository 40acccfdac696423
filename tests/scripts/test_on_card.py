"""Programs that name `cuda`, on a simulated card: the host is real, what is read back is known or made up."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.scripts.estimate_script import ScriptEstimate, estimate_script
from batchwright.scripts.script import Script

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
    import copy, math, sys
    import torch
    from torch import nn
    def build():
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
"""


def run(folder: Path, program: str, *arguments: str) -> ScriptEstimate:
    (folder / "train.py").write_text(dedent(HEAD) + dedent(program))
    return estimate_script(Script(["train.py", *arguments], cwd=folder), on="a100-40gb", seconds=120)


def test_the_peak_is_that_of_a_workload_of_the_same_step(tmp_path: Path) -> None:
    seen = run(
        tmp_path,
        """
        def step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model = build().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        while True:
            step(torch.randn(32, 64).to("cuda"))
        """,
    )
    workload = bw.Workload(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
        batch=lambda n: torch.randn(n, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters),
    )
    expected = bw.estimate(workload, micro_batch=32, on="a100-40gb").peak_bytes
    assert seen.run.peak_bytes is not None
    # Four bytes for each of Adam's counters, in blocks of 512, and the like.
    assert seen.run.peak_bytes.allocated == pytest.approx(expected.allocated, abs=8192)
    assert (seen.micro_batch, seen.run.made_up_reads) == (32, 0)


@pytest.mark.parametrize(
    "program",
    {
        "mixed precision": """
            model = build().cuda(); optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            while True:
                with torch.autocast("cuda", torch.float16):
                    loss = model(torch.randn(8, 64, device="cuda")).mean()
                scaler.scale(loss).backward(); scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
                print(f"{loss.item():.2f} {norm:.2f} {math.exp(loss):.1f}", loss)
                assert math.isfinite(loss.item())
        """,
        "averages and a checkpoint": """
            model = build(); optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            model.to(torch.device("cuda")); average = copy.deepcopy(model)
            while True:
                model(torch.randn(8, 64).cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
                for a, b in zip(average.parameters(), model.parameters()): a.data.lerp_(b.data, 0.1)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        "labels that are read": """
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            labels = torch.arange(8) % 3
            while True:
                y = labels.cuda()
                assert y.max().item() == 2 and y.tolist() == labels.tolist() and (y == 1).sum().item() == 3
                out = model(torch.randn(8, 64).cuda())
                picked = out[y == 1]
                assert picked.shape[0] == 3
                nn.functional.cross_entropy(out, y).backward(); optimizer.step()
        """,
        "unknown masks": """
            model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                out = model(torch.randn(8, 64).cuda())
                kept = out[out > 0]; where = (out > 0).nonzero(); chosen = out.masked_select(out > 0)
                assert kept.numel() == where.shape[0] == chosen.numel() == 512
                (kept.mean() + chosen.mean()).backward(); optimizer.step()
                out.detach().cpu().numpy(); out.argmax(1).tolist()
        """,
        "loader workers, pinned memory, a compiled model": """
            data = torch.utils.data.TensorDataset(torch.randn(64, 64))
            loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1, pin_memory=True)
            model = torch.compile(build().cuda()); optimizer = torch.optim.SGD(model.parameters(), 0.1)
            while True:
                for (x,) in loader:
                    model(x.cuda(non_blocking=True)).mean().backward(); optimizer.step()
                    torch.cuda.synchronize(); assert torch.cuda.memory_allocated() > 0
        """,
    }.items(),
    ids=lambda item: item[0],
)
def test_programs_run_to_their_cut(tmp_path: Path, program: tuple[str, str]) -> None:
    seen = run(tmp_path, program[1])
    assert (seen.run.end, seen.run.num_windows, seen.micro_batch) == ("cut", 2, 8)
    assert seen.fits
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".pt"] == []


def test_a_program_that_is_too_large_runs_out_there(tmp_path: Path) -> None:
    seen = run(
        tmp_path,
        """
        model = build().cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            model(torch.empty(2**28, 64, device="cuda")).mean().backward(); optimizer.step()
        """,
    )
    assert not seen.fits
    assert "runs out of memory on a100-40gb" in str(seen)
