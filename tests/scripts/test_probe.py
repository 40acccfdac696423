"""Programs as people write them, run to their cut in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from batchwright.errors import BatchwrightError, InvalidInputError, StepFailedError
from batchwright.scripts.fork_server import descendants_of
from batchwright.scripts.probe import Probes
from batchwright.scripts.program_hooks import Watch
from batchwright.scripts.script import Script

if TYPE_CHECKING:
    from batchwright.scripts.script_run import ScriptRun

TRAIN = """
    import argparse, sys
    import torch
    from torch import nn
    from helper import make_model
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", "-b", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    data = torch.utils.data.TensorDataset(torch.randn(512, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, num_workers=args.workers)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(1000):
        for i, (x,) in enumerate(loader):
            (model(x).pow(2).mean() / args.accumulation).backward()
            if (i + 1) % args.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                print("step", i)
                torch.save(model.state_dict(), "model.pt")
                open("log.txt", "a").write("a line")
"""
HELPER = (
    "from torch import nn\ndef make_model():\n    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "log.txt").write_text("mine")
    return tmp_path


def probe(folder: Path, words: str, *, seconds: float = 60.0, **options: Any) -> ScriptRun:
    script = Script(words.split(), cwd=folder, seconds=seconds)
    with Probes(script, "cpu") as probes:
        return probes.run(script.command, **options)


@pytest.mark.parametrize(
    "words", ["train.py --batch-size 16", "python -u train.py -b 16", "python -m train -b 16 --workers 1"]
)
def test_a_training_script_is_cut_after_two_steps(folder: Path, words: str) -> None:
    run = probe(folder, words)
    assert (run.end, run.windows, run.num_windows) == ("cut", "optimizer steps", 2)
    assert (run.batch_size, run.accumulation, run.optimizers) == (16, 1, ("Adam",))
    assert run.options["--batch-size"] == 16
    assert run.loader_batch_sizes == (16,)
    assert run.peak_bytes is not None
    assert {Path(path).name for path in run.files_written} == {"model.pt", "log.txt"}
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "helper.py",
        "log.txt",
        "train.py",
    ]
    assert (folder / "log.txt").read_text() == "mine"


def test_what_packages_print_while_they_are_imported_is_no_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = folder / "packages"
    packages.mkdir()
    (packages / "talkative.py").write_text("print('settings were written')\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    (folder / "train.py").write_text("import talkative\n" + dedent(TRAIN))
    assert probe(folder, "train.py").was_cut


def test_accumulation_is_counted(folder: Path) -> None:
    run = probe(folder, "train.py --accumulation 3", num_windows=3)
    assert run.backwards_per_window == (3, 3, 3)


def test_a_program_that_fails_keeps_its_traceback(folder: Path) -> None:
    (folder / "bad.py").write_text("import torch\nprint('about to fail')\ntorch.ones(2) @ torch.ones(3)\n")
    with pytest.raises(StepFailedError, match=r"(?s)about to fail.*bad\.py.*line 3.*it fails without batchwright too"):
        probe(folder, "bad.py")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("print('nothing to do')", InvalidInputError, "ended by itself"),
        (
            "import multiprocessing as mp\nif __name__ == '__main__':\n    p = mp.Process(target=print); p.start(); p.join()",
            InvalidInputError,
            "processes of its own",
        ),
        ("import sys; sys.exit('no GPU')", StepFailedError, "(?s)sys.exit: no GPU.*seen: no forward.*arguments with"),
        ("import os, sys, time\nif os.fork(): sys.exit()\ntime.sleep(9)", InvalidInputError, "it forked"),
        ("import os, time\nif os.fork(): os._exit(0)\ntime.sleep(9)", StepFailedError, "without the fork"),
        ("import time; time.sleep(60)", BatchwrightError, "within 1 s"),
        ("input('how many? ')", StepFailedError, "asks for input"),
        ("import os; os._exit(9)", StepFailedError, "code 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", StepFailedError, "SIGSEGV"),
    ],
)
def test_whatever_happens_there_is_an_answer(folder: Path, text: str, error: type[Exception], words: str) -> None:
    (folder / "odd.py").write_text(text)
    with pytest.raises(error, match=words):
        probe(folder, "odd.py", seconds=1.0 if words == "within 1 s" else 30.0)


def test_a_run_at_another_size_is_a_fork_of_the_same_process_that_imports_its_modules_last(folder: Path) -> None:
    (folder / "parent.py").write_text(
        "import os, sys, background, torch, wave\nnames = list(sys.modules)\n"
        "assert names.index('batchwright.scripts.program_hooks') < names.index('wave'), 'holes in the heap'\nm = torch.nn.EmbeddingBag(10**7, 1); o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(2):\n    m(torch.full((int(sys.argv[1]), os.getppid() % 1000), 1)).sum().backward(); o.step()\n"
    )
    # A thread as pyarrow's jemalloc has it when it is imported.
    (folder / "packages").mkdir()
    (folder / "packages" / "background.py").write_text(
        "import ctypes, threading, time\nimport numpy\n"
        "def run():\n    ctypes.CDLL(None).prctl(15, b'jemalloc_bg_thd', 0, 0, 0)\n    time.sleep(100)\n"
        "threading.Thread(target=run, daemon=True).start()\ntime.sleep(0.1)\n"
    )
    script = Script(["PYTHONPATH=packages", "OPENBLAS_NUM_THREADS=2", "parent.py", "{micro_batch}"], cwd=folder)
    with Probes(script, "cpu") as probes:
        parents = {probes.run(script.at(size)).input_shapes[0][1] for size in (2, 3)}
    assert len(parents - {os.getpid() % 1000}) == len(parents) == 1


def test_updates_by_hand_and_two_optimizers(folder: Path) -> None:
    (folder / "by_hand.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 1)\n"
        "while True:\n    model.zero_grad()\n    model(torch.ones(8, 4)).sum().backward()\n"
        "    for p in model.parameters(): p.data.add_(p.grad, alpha=-0.1)\n"
    )
    run = probe(folder, "by_hand.py")
    assert (run.end, run.windows, run.batch_size) == ("cut", "zeroed gradients", 8)
    assert set(run.backwards_per_window) == {1}
    (folder / "gan.py").write_text(
        "import torch\na, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)\n"
        "A, B = torch.optim.SGD(a.parameters(), 1e-3), torch.optim.Adam(b.parameters())\n"
        "while True:\n    b(a(torch.ones(8, 4))).sum().backward()\n    A.step()\n    B.step()\n"
    )
    run = probe(folder, "gan.py")
    assert (run.num_windows, run.optimizers) == (2, ("Adam", "SGD"))
    # A critic that is ahead; the third one never steps.
    (folder / "wgan.py").write_text(
        "import torch\na, b, c = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.nn.Linear(1, 1)\n"
        "A, B = torch.optim.SGD(a.parameters(), 1e-3), torch.optim.Adam(b.parameters())\n"
        "C = torch.optim.SGD(c.parameters(), 1e-3)\n"
        "for step in range(1000):\n    b(a(torch.ones(8, 4))).sum().backward()\n    B.step()\n"
        "    if step % 5 == 4: A.step()\n"
    )
    run = probe(folder, "wgan.py")
    assert (run.end, run.num_windows, run.optimizers) == ("cut", 2, ("Adam", "SGD"))
    assert len(run.backwards_per_window) == 12


def test_nothing_that_it_started_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = folder / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    (folder / "forks.py").write_text(
        "import os, time, subprocess, sys, tempfile\nfolder = tempfile.TemporaryDirectory()\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(folder / 'scratch_pid')!r}, 'w')\nprint(p.pid, flush=True)\n"
        "import torch\nm = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "print('PID', p.pid)\nfor _ in range(9):\n    m(torch.ones(2, 2)).sum().backward(); o.step()\n"
    )
    before = time.monotonic()
    run = probe(folder, "forks.py")
    assert run.end == "cut"
    assert time.monotonic() - before < 60
    sleeping = [
        entry
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and b"time.sleep(100)" in _command_line(entry) and int(entry.name) != os.getpid()
    ]
    assert sleeping == []
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_nor_is_it_if_batchwright_is_killed(folder: Path) -> None:
    (folder / "waits.py").write_text("import time\nfor _ in range(60): time.sleep(1)\n")
    asking = subprocess.Popen(
        [sys.executable, "-m", "batchwright", "estimate", "--show-output", "--", "waits.py"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline, started = time.monotonic() + 60, list[int]()
    while len(started) < 2:  # the process that imports, and the program forked from it
        assert time.monotonic() < deadline
        started = [process for process in descendants_of(asking.pid) if _is_probe(process)]
        time.sleep(0.05)
    asking.kill()
    asking.wait()
    deadline = time.monotonic() + 10
    while any(map(_is_probe, started)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_probe(process: int) -> bool:
    return b"scripts.fork_server" in _command_line(Path(f"/proc/{process}"))


def _command_line(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_budget_is_kept(folder: Path) -> None:
    (folder / "wide.py").write_text(
        "import sys, torch\nm = torch.nn.Linear(1024, 1024); o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(9):\n    m(torch.ones(int(sys.argv[1]), 1024)).sum().backward(); o.step(); o.zero_grad()\n"
    )
    small = probe(folder, "wide.py 64", limit_bytes=64 * 2**20)
    large = probe(folder, "wide.py 65536", limit_bytes=64 * 2**20)
    assert (small.end, large.end) == ("cut", "out_of_memory")
    assert small.peak_bytes is not None
    assert small.peak_bytes.device is not None
    assert 8 * 2**20 < small.peak_bytes.device < 64 * 2**20


def test_a_program_that_only_evaluates_is_cut_after_its_forwards(folder: Path) -> None:
    (folder / "evaluate.py").write_text(
        "import sys, torch\nmodel = torch.nn.Linear(4, 1).eval()\n"
        "with torch.inference_mode():\n    while True:\n        model(input=torch.ones(int(sys.argv[1]), 4))\n"
    )
    run = probe(folder, "evaluate.py 8")
    assert (run.end, run.windows, run.num_windows, run.batch_size) == ("cut", "forwards", 2, 8)


def test_an_evaluation_before_the_training_does_not_end_it(folder: Path) -> None:
    (folder / "both.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with torch.no_grad():\n    for _ in range(9): model(torch.ones(64, 4))\n"
        "while True:\n    model(torch.ones(8, 4)).sum().backward(); optimizer.step()\n"
    )
    run = probe(folder, "both.py")
    assert (run.end, run.windows, run.num_windows) == ("cut", "optimizer steps", 2)
    assert run.batch_size == 8, "of the training, though most forwards had another"
    (folder / "trainer.py").write_text(
        "import sys, torch\nclass Trainer:\n    def train(self, model):\n"
        "        optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "        while True: model({'x': torch.ones(8, 4)}).sum().backward(); optimizer.step()\n"
        "model = torch.nn.Linear(4, 1).eval()\n"
        "forward = model.forward; model.forward = lambda x: forward(x['x'])\n"
        "from collections import UserDict\n"
        "with torch.no_grad():\n    for _ in range(9): model(UserDict(x=torch.ones(64, 4)))\n"
        "if sys.argv[1] == 'train': Trainer().train(model)\n"
    )
    assert probe(folder, "trainer.py train").batch_size == 8, "though its optimizer is made after the evaluation"
    run = probe(folder, "trainer.py evaluate")
    assert (run.windows, run.num_windows, run.batch_size) == ("forwards", 9, 64)


def test_a_batch_of_more_samples_than_there_are_is_told() -> None:
    import torch
    from torch.utils.data import DataLoader

    watch = Watch(2)
    with watch.on():
        data = torch.utils.data.TensorDataset(torch.ones(5, 4))
        assert [len(x) for size in (5, 8) for (x,) in DataLoader(data, batch_size=size)] == [5, 5]
    assert watch.report().notes == (
        "a loader has 5 samples, fewer than its batch of 8: what was probed with it is no whole batch",
    )


def test_generation_is_one_window_with_its_cache(folder: Path) -> None:
    (folder / "generate.py").write_text(
        "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=32)).eval()\n"
        "while True:\n    model.generate(torch.ones(4, 3, dtype=torch.long), max_new_tokens=5, do_sample=False)\n"
    )
    run = probe(folder, "generate.py")
    assert (run.end, run.windows, run.num_windows) == ("cut", "forwards", 2)
    assert run.input_shapes == ((4, 3), (4, 3))


def test_a_run_goes_on_for_as_many_steps_as_are_asked_for(folder: Path) -> None:
    with Probes(Script(["train.py"], cwd=folder, steps=4), "cpu") as probes:
        assert probes.run(probes.script.command).num_windows == 4
    with pytest.raises(InvalidInputError, match="steps"):
        Script(["train.py"], steps=0)
