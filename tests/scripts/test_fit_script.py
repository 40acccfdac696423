"""fit on an unmodified program: the largest size, by its own option, on a card and under a real budget."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from batchwright.errors import InvalidInputError, NothingFitsError, StepFailedError
from batchwright.fitting.fit import fit as fit_script
from batchwright.scripts.estimate_script import estimate_script
from batchwright.scripts.script import Script

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
    import argparse, torch
    from torch import nn
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--eval-batch-size", type=int, default=4)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--huge", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4 if args.fixed else args.batch_size
    if args.huge:
        torch.empty(10**10, device=device)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(50):
        x = torch.ones(size, 512, 1024).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(dedent(PROGRAM))
    return tmp_path


def test_on_a_card_the_largest_size_is_found_in_few_probes(folder: Path) -> None:
    script = Script(["train.py", "--batch-size", "{micro_batch}"], cwd=folder)
    fit = fit_script(script, on="t4-16gb", memory="2GiB")
    assert fit.micro_batch is not None
    assert fit.next_size is not None
    assert (fit.next_size.micro_batch, fit.next_size.outcome) == (fit.micro_batch + 1, "out_of_memory")
    assert len(fit.trials) <= 6
    assert not fit.certified
    assert f"type: train.py --batch-size {fit.micro_batch}" in fit.notes


def test_the_option_is_recognised_and_named(folder: Path) -> None:
    fit = fit_script(Script(["train.py"], cwd=folder), on="t4-16gb", limit=8)
    assert fit.micro_batch == 8
    assert fit.notes[0].startswith("--batch-size of the program sets its micro-batch")


def test_a_size_that_stands_in_the_program_is_turned_at_its_loader(folder: Path) -> None:
    (folder / "plain.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.ones(256, 8)), 16, shuffle=True)\n"
        "model = torch.nn.Linear(8, 8).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for (x,) in loader: model(x.cuda()).sum().backward(); optimizer.step()\n"
    )
    fit = fit_script(Script(["plain.py"], cwd=folder), on="t4-16gb", limit=64)
    assert fit.micro_batch == 64
    assert fit.notes[:2] == (
        "no option sets the micro-batch: the DataLoader(batch_size=16) of the program was given other sizes",
        "in plain.py: DataLoader(batch_size=64), where it is 16",
    )
    program = (folder / "plain.py").read_text().replace("model(x.cuda())", "(model(x.cuda()) + x.cuda().view(16, 8))")
    (folder / "plain.py").write_text(program)
    with pytest.raises(StepFailedError, match="if 16 stands elsewhere in the program too, make an option of it"):
        fit_script(Script(["plain.py"], cwd=folder), on="t4-16gb", limit=64)


def test_a_program_that_stays_on_the_cpu_is_refused_on_a_card(folder: Path) -> None:
    (folder / "plain.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True: model(torch.ones(8, 8)).sum().backward(); optimizer.step()\n"
    )
    with pytest.raises(InvalidInputError, match="put nothing on NVIDIA Tesla T4"):
        fit_script(Script(["plain.py"], cwd=folder), on="t4-16gb")


def test_shapes_give_a_table_and_a_start_is_kept(folder: Path) -> None:
    (folder / "shaped.py").write_text(
        "import sys, torch\nmodel = torch.nn.Linear(1024, 1024).cuda().eval()\n"
        "with torch.no_grad():\n    while True: model(torch.ones(int(sys.argv[1]), int(sys.argv[2]), 1024).cuda())\n"
    )
    script = Script(["shaped.py", "{micro_batch}", "{crops}"], cwd=folder)
    table = fit_script(script, on="t4-16gb", shapes={"crops": [1, 12]}, limit=64, scale="crops:2=1.0,else=0.5")
    assert [(row.shape, row.trials[0].micro_batch, row.micro_batch) for row in table.shapes] == [
        ({"crops": 1}, 64, 64),
        ({"crops": 12}, 32, 64),
    ]
    assert "type: shaped.py 64 12" in table.shapes[1].notes


def test_a_size_that_is_too_small_for_batch_norm_is_passed_over(folder: Path) -> None:
    (folder / "norm.py").write_text(
        "import sys, os, torch\nos.get_terminal_size(0)\nmodel = torch.nn.BatchNorm1d(8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True: model(torch.ones(int(sys.argv[1]), 8).cuda()).sum().backward(); optimizer.step()\n"
    )
    fit = fit_script(Script(["norm.py", "{micro_batch}"], cwd=folder), on="t4-16gb", limit=16)
    assert (fit.micro_batch, fit.trials[0].is_too_small) == (16, True)


def test_a_size_at_which_the_program_alone_fails_is_passed_over(folder: Path) -> None:
    (folder / "top5.py").write_text(
        "import sys, torch\nmodel = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nsize = int(sys.argv[1])\n"
        "while True: model(torch.ones(size, 8).cuda()).sum(1).topk(5)[0].sum().backward(); optimizer.step()\n"
    )
    fit = fit_script(Script(["top5.py", "{micro_batch}"], cwd=folder), on="t4-16gb", limit=16)
    assert (fit.micro_batch, fit.trials[0].is_too_small) == (16, True)
    with pytest.raises(StepFailedError, match="not in range"):
        fit_script(Script(["top5.py", "{micro_batch}"], cwd=folder), on="t4-16gb", limit=4)


def test_an_option_that_changes_nothing_is_refused(folder: Path) -> None:
    script = Script(["train.py", "--fixed"], cwd=folder, batch_option="--batch-size")
    with pytest.raises(InvalidInputError, match="still receives 4 samples"):
        fit_script(script, on="t4-16gb", limit=64)


def test_nothing_fits_is_said(folder: Path) -> None:
    script = Script(["train.py", "--huge"], cwd=folder, batch_option="--batch-size")
    with pytest.raises(NothingFitsError, match="micro-batch 1 does not fit on t4-16gb"):
        fit_script(script, on="t4-16gb")


def test_a_pass_that_ends_in_what_is_left_of_the_data_is_followed_to_the_next_whole_batch(folder: Path) -> None:
    program = (
        "import sys, torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.ones(SAMPLES, 1024)), int(sys.argv[1]))\n"
        "model = torch.nn.Linear(1024, 1024).cuda(); optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(9):\n    for (x,) in loader: model(x.cuda()).sum().backward(); optimizer.step()\n"
    )
    (folder / "left.py").write_text(program.replace("SAMPLES", "1250"))
    (folder / "whole.py").write_text(program.replace("SAMPLES", "2000"))
    scripts = (Script([name, "1000"], cwd=folder) for name in ("left.py", "whole.py"))
    left, whole = (estimate_script(script, on="t4-16gb").run for script in scripts)
    assert left.peak_bytes is not None
    assert whole.peak_bytes is not None
    assert (left.num_windows, whole.num_windows) == (3, 2)
    assert left.peak_bytes.allocated == whole.peak_bytes.allocated


def test_a_program_that_slices_its_own_data_gets_no_answer_beyond_them(folder: Path) -> None:
    (folder / "sliced.py").write_text(
        "import sys, torch\ndata = torch.ones(5000, 8).cuda(); size = int(sys.argv[1])\n"
        "model = torch.nn.Linear(8, 8).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n    for start in range(0, 5000, size):\n"
        "        model(data[start : start + size]).sum().backward(); optimizer.step()\n"
    )
    fit = fit_script(Script(["sliced.py", "{micro_batch}"], cwd=folder), on="t4-16gb")
    assert fit.micro_batch == 5000
    assert fit.next_size is not None
    assert fit.next_size.why == "not tried: the model receives 5,000 samples at most"


def test_memory_that_runs_out_is_recognised_in_a_program_that_leaves_by_sys_exit(folder: Path) -> None:
    program = (folder / "train.py").read_text()
    lines = "\n".join(f"    {line}" for line in program.splitlines())
    (folder / "main.py").write_text(f"import sys\ntry:\n{lines}\nexcept Exception as error:\n    sys.exit(1)\n")
    script = Script(["main.py", "--batch-size", "{micro_batch}"], cwd=folder)
    fit = fit_script(script, on="t4-16gb", memory="2GiB")
    assert fit.next_size is not None
    assert fit.next_size.outcome == "out_of_memory"


@pytest.mark.parametrize("drop", ["drop_last=True", "drop_last=False"])
def test_no_batch_is_larger_than_all_samples_of_the_loader(folder: Path, drop: str) -> None:
    (folder / "few.py").write_text(
        "import sys, torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        f"loader = DataLoader(TensorDataset(torch.ones(300, 8)), int(sys.argv[1]), {drop})\n"
        "held_out = DataLoader(TensorDataset(torch.ones(9, 8)), int(sys.argv[1]))\n"
        "model = torch.nn.Linear(8, 8).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(9):\n    for (x,) in loader: loss = model(x.cuda()).sum(); loss.backward(); optimizer.step()\n"
        "    for (x,) in held_out: print(model(x.cuda()), loss)\n"
    )
    said: list[str] = []
    fit = fit_script(Script(["few.py", "{micro_batch}"], cwd=folder), on="t4-16gb", progress=said.append)
    assert fit.micro_batch == 300
    assert fit.next_size is not None
    assert fit.next_size.why == "not tried: the dataset holds 300 samples"
    assert "the program's loader draws from 300 samples: none larger is tried" in said
    assert len(said) == len(set(said))


@pytest.mark.slow
def test_under_a_real_budget_the_answer_ran(folder: Path) -> None:
    script = Script(["train.py"], cwd=folder, batch_option="--batch-size")
    fit = fit_script(script, on="cpu", memory="128MiB")
    assert fit.certified
    assert fit.headroom_bytes is not None
    assert fit.headroom_bytes >= 0


def test_a_program_that_takes_powers_of_two_only_is_given_those(folder: Path) -> None:
    text = dedent(PROGRAM).replace("size = 4", 'assert 64 % args.batch_size == 0, "a queue of 64"\nsize = 4')
    (folder / "train.py").write_text(text)
    fit = fit_script(Script(["train.py", "--batch-size", "{micro_batch}"], cwd=folder), on="t4-16gb", memory="1GiB")
    assert fit.micro_batch == 32
    assert any("only powers of two were tried" in note for note in fit.notes)


def test_a_batch_in_the_second_dimension_or_in_a_list_of_objects_is_recognised(folder: Path) -> None:
    text = dedent(PROGRAM).replace("torch.ones(size, 512, 1024)", "torch.ones(512, size, 1024)")
    (folder / "train.py").write_text(text)
    fit = fit_script(Script(["train.py", "--batch-size", "6"], cwd=folder), on="t4-16gb", limit=8)
    assert "--batch-size of the program sets its micro-batch" in fit.notes[0]
    text = """
        import argparse, torch
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int, default=6)
        size = parser.parse_args().batch_size
        class Graph: pass
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(64, 64)
            def forward(self, graphs):
                return self.layer(torch.randn(len(graphs), 64).cuda())
        model = Model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            model([Graph() for _ in range(size)]).mean().backward()
            optimizer.step()
    """
    (folder / "train.py").write_text(dedent(text))
    assert fit_script(Script(["train.py"], cwd=folder), on="t4-16gb", limit=8).micro_batch == 8


def test_a_program_that_acts_on_one_sample_for_long_before_it_learns_is_followed(folder: Path) -> None:
    text = dedent(PROGRAM).replace(
        "optimizer = ", "for _ in range(600): model(torch.ones(1, 1024).to(device))\noptimizer = "
    )
    (folder / "train.py").write_text(text)
    assert fit_script(Script(["train.py"], cwd=folder), on="t4-16gb", limit=8).micro_batch == 8
