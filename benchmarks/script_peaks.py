"""The peak told of a script, beside that of a workload of the same step and beside that of the plain run.

    python benchmarks/script_peaks.py --repositories FOLDER [--only NAME ...]

FOLDER holds clones as for `benchmarks/scripts.py`; what runs are copies, with data made up in their own format.

On a card: the workload imports the project's own model and keeps nothing between steps. A second workload keeps what
the script keeps, so that what the two differ by is the script's habit.

On the host: the script runs five times as a process of its own, nothing of batchwright in it, until it prints that it
is past its second step. The kernel's peak of its address space, without what is not private memory, less what a process
holds that only imports the same, is the real peak; its median is compared with that of three probes. glibc's thresholds
are those that a probe pins; one thread computes. Bar: 1 %, met or not.

What imports leave free in the heap serves the script's small blocks, and a probe has imported batchwright too. So the
script also runs, without a hook, after batchwright's imports: what differs there is where the heap puts things.
"""

from __future__ import annotations

import os

# Before torch starts: the probes and the plain runs inherit them.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import ast
import io
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from scripts import write_characters, write_cifar, write_idx_digits, write_words
from torch.nn import functional

import batchwright as bw
from batchwright.device.host import PINNED_ENVIRONMENT
from batchwright.scripts.estimate_script import ScriptEstimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.units import PeakBytes

CARD = "a100-40gb"
MIB = 2**20
BAR_PERCENT = 1.0
NANOGPT = "train.py --dataset=shakespeare_char --compile=False --gradient_accumulation_steps=1 --eval_iters=1"


@dataclass(frozen=True)
class Place:
    """A script's project and folder, and the data it needs."""

    project: str
    folder: str = "."
    prepare: Callable[[Path], None] = lambda _: None


def example(name: str, prepare: Callable[[Path], None] | None = None) -> Place:
    return Place("examples", name, prepare or (lambda folder: write_idx_digits(folder.parent / "data")))


GPT = Place("nanoGPT", prepare=write_characters)


@contextmanager
def copied(place: Place, repositories: Path) -> Iterator[Path]:
    """Copy the project, and stand in the script's folder with its data and its modules."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, place.project)
        shutil.copytree(repositories / place.project, root, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        folder = root / place.folder
        place.prepare(folder)
        # PYTHONPATH for children: what makes up data may leave a sitecustomize in the folder.
        paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        with chdir(folder), patch.dict(os.environ, PYTHONPATH=paths):
            sys.path.insert(0, str(folder))
            try:
                yield folder
            finally:
                sys.path.remove(str(folder))
                for name, module in list(sys.modules.items()):
                    if str(getattr(module, "__file__", "")).startswith(scratch):
                        del sys.modules[name]


def name_with_commit(name: str, place: Place, repositories: Path) -> str:
    words = ["git", "-C", str(repositories / place.project), "rev-parse", "--short=7", "HEAD"]
    return f"{name} {subprocess.run(words, capture_output=True, text=True).stdout.strip()}"


def names_in(file: Path, *arguments: str) -> dict[str, Any]:
    """Return what a script defines when it is imported."""
    with patch.object(sys, "argv", [str(file), *arguments]):
        return runpy.run_path(str(file), run_name=file.stem)


def peak_of(case: OnCard | OnHost, folder: Path, on: str) -> PeakBytes:
    """Return what is told of the script."""
    estimate = bw.estimate(bw.Script(case.arguments.split(), cwd=folder), on=on)
    assert isinstance(estimate, ScriptEstimate)
    assert estimate.run.peak_bytes is not None
    return estimate.run.peak_bytes


# On a card.


@dataclass(frozen=True)
class Step:
    """A training step as somebody would retell it from the script; `forward` returns the loss and what made it."""

    model: Callable[[], torch.nn.Module]
    batch: Callable[..., Any]
    forward: Callable[[torch.nn.Module, Any], tuple[torch.Tensor, Any]]
    optimizer: Callable[..., Any]
    clip_norm: float | None = None

    def careful(self) -> bw.Workload:
        """Nothing outlives the step."""
        return bw.Workload(
            self.model, lambda m, b: self.forward(m, b)[0], self.batch, lambda model: self.optimizer(model)
        )

    def like_script(self, zeroed: str) -> bw.Workload:
        """Loss, outputs and batch live until names are bound anew; `zeroed` says when gradients go."""
        kept: dict[str, Any] = {}

        def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            kept["batch"] = batch
            if zeroed == "before forward":
                model.zero_grad()
            kept["loss"], kept["outputs"] = self.forward(model, batch)
            if zeroed == "before backward":
                model.zero_grad()
            return kept["loss"]  # type: ignore[no-any-return]

        def optimizer(model: torch.nn.Module) -> Any:
            inside = self.optimizer(model)
            if zeroed != "after step":
                # The step of a workload ends by zeroing; here the loss function does it, when the script would.
                vars(inside)["zero_grad"] = lambda **_: None
            return inside

        return bw.Workload(self.model, loss, self.batch, optimizer)


def forward_with(criterion: Callable[[Any, Any], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, Any]]:
    def forward(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        outputs = model(batch[0])
        return criterion(outputs, batch), outputs

    return forward


def with_labels(*size: int, classes: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda n: (torch.rand(n, *size), torch.randint(0, classes, (n,)))


def retell_nanogpt(folder: Path) -> Step:
    own = names_in(folder / "model.py")

    def forward(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits, loss = model(*batch)
        return loss, logits

    return Step(
        lambda: own["GPT"](own["GPTConfig"](block_size=512, n_layer=6, bias=False, dropout=0.0)),
        lambda n: (torch.randint(0, 65, (n, 512)), torch.randint(0, 65, (n, 512))),
        forward,
        lambda model: model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda"),
        clip_norm=1.0,
    )


def retell_mnist(folder: Path) -> Step:
    forward = forward_with(lambda outputs, batch: functional.nll_loss(outputs, batch[1]))
    model = names_in(folder / "main.py")["Net"]
    return Step(model, with_labels(1, 28, 28, classes=10), forward, lambda m: torch.optim.Adadelta(m.parameters()))


def retell_vae(folder: Path) -> Step:
    own = names_in(folder / "main.py", "--no-accel")
    forward = forward_with(lambda outputs, batch: own["loss_function"](outputs[0], batch[0], *outputs[1:]))
    return Step(own["VAE"], lambda n: (torch.rand(n, 1, 28, 28),), forward, lambda m: torch.optim.Adam(m.parameters()))


def retell_classifier(model: Callable[[], torch.nn.Module], pixels: int, classes: int) -> Step:
    return Step(
        model,
        with_labels(3, pixels, pixels, classes=classes),
        forward_with(lambda outputs, batch: functional.cross_entropy(outputs, batch[1])),
        lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-4),
    )


def retell_imagenet(folder: Path) -> Step:
    return retell_classifier(names_in(folder / "main.py")["models"].resnet18, 224, 1000)


def retell_cifar(folder: Path) -> Step:
    return retell_classifier(names_in(folder / "models" / "dla_simple.py")["SimpleDLA"], 32, 10)


@dataclass(frozen=True)
class OnCard:
    """A script whose step can be retold, and what it does that a careful workload does not."""

    name: str
    place: Place
    arguments: str
    micro_batch: int
    retell: Callable[[Path], Step]
    zeroed: str
    habit: str


IMAGENET = "main.py -a resnet18 --dummy -j 0 -b 32"
CIFAR = Place("pytorch-cifar", prepare=write_cifar)
ON_CARD = (
    OnCard("nanoGPT", GPT, f"{NANOGPT} --batch_size=8 --n_layer=6 --block_size=512", 8, retell_nanogpt,
           "after step", "the last logits live until the next forward ends"),
    OnCard("mnist", example("mnist"), "main.py --batch-size 64", 64, retell_mnist,
           "before forward", "nothing that counts"),
    OnCard("vae", example("vae"), "main.py --batch-size 128", 128, retell_vae,
           "before forward", "batch and reconstruction live through the optimizer step"),
    OnCard("imagenet", example("imagenet", lambda _: None), IMAGENET, 32, retell_imagenet,
           "before backward", "the last gradients live until the next forward ends"),
    OnCard("pytorch-cifar", CIFAR, "main.py", 128, retell_cifar, "before forward", "nothing that counts"),
)  # fmt: skip


def compare_on_card(case: OnCard, repositories: Path) -> tuple[str, float, float]:
    """Return a row, and the differences from the careful workload and from the one that keeps what the script keeps."""
    # Models print when they are built.
    with copied(case.place, repositories) as folder, redirect_stdout(io.StringIO()):
        script = peak_of(case, folder, CARD).allocated
        step = case.retell(folder)
        estimates = [
            bw.estimate(workload, micro_batch=case.micro_batch, on=CARD, clip_norm=step.clip_norm)
            for workload in (step.careful(), step.like_script(case.zeroed))
        ]
    peaks = [estimate.peak_bytes.allocated or 0 for estimate in estimates]
    assert script is not None
    careful, alike = (100 * (script / peak - 1) for peak in peaks)
    sizes = [f"{size / MIB:,.1f}" for size in (script, *peaks)]
    row = (
        f"| {name_with_commit(case.name, case.place, repositories)} | {case.micro_batch} | {sizes[0]} | {sizes[1]} "
        f"| {careful:+.2f} % | {case.habit} | {sizes[2]} | {alike:+.2f} % |"
    )
    return row, careful, alike


# On the host.


@dataclass(frozen=True)
class OnHost:
    """A script on the CPU; it is past its second step once its output has `past`."""

    name: str
    place: Place
    arguments: str
    past: str


THIRD_BATCH = r"(?s)(Train Epoch: 1 .*){3}"
ON_HOST = (
    OnHost("mnist", example("mnist"), "main.py --no-accel --log-interval 1 --batch-size 256", THIRD_BATCH),
    OnHost("vae", example("vae"), "main.py --no-accel --log-interval 1 --batch-size 1024", THIRD_BATCH),
    OnHost("mnist_rnn", example("mnist_rnn"), "main.py --log-interval 1 --batch-size 1024", THIRD_BATCH),
    OnHost(
        "word_language_model", example("word_language_model", write_words),
        "main.py --model LSTM --use-optimizer --lr 0.001 --log-interval 1 --batch_size 64", r"\| +2/ *\d+ batches",
    ),
    OnHost("makemore", Place("makemore"), "makemore.py --device cpu --batch-size 512", "step 10 "),
    OnHost(
        "nanoGPT", GPT,
        f"{NANOGPT} --device=cpu --batch_size=8 --block_size=128 --n_layer=4 --n_head=4 --n_embd=256", "iter 2: ",
    ),
)  # fmt: skip


def observe(words: list[str], until: str, *, seconds: float = 240.0) -> tuple[int, int]:
    """Run a process until its output has `until`, end it, and return its private memory at last and at most."""
    last, most, text, deadline = 0, 0, "", time.monotonic() + seconds
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            env={**os.environ, **PINNED_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while not re.search(until, text):
                time.sleep(0.003)
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{words} did not print {until}: {text[-2000:]}")
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                kilobytes = {
                    name: int(rest.split()[0])
                    for name, _, rest in (line.partition(":") for line in lines)
                    if name in ASKED
                }
                if kilobytes:
                    last, size, peak = (1024 * kilobytes[name] for name in ASKED)
                    most = max(last, peak - (size - last))
                text = os.pread(output.fileno(), MIB, 0).decode(errors="replace")
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its loader workers too
            process.wait()
    return last, most


ASKED = ("VmData", "VmSize", "VmPeak")
FIRST_OF_ALL = "import time, torch, torch._dynamo; torch.ones(8).add_(1)"
OURS = "import batchwright.device.host, batchwright.scripts.fork_server, batchwright.scripts.program_hooks"
WAIT = "print('ready'); time.sleep(600)"
GO_ON = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def imports_of(script: Path) -> list[str]:
    """Write what a script imports, and what every first optimizer and first operator load."""
    nodes = [node for node in ast.parse(script.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = [ast.unparse(node) for node in nodes if getattr(node, "module", "") != "__future__"]
    return [*lines, FIRST_OF_ALL]


def compare_on_host(case: OnHost, repositories: Path) -> tuple[str, float]:
    """Return a row and the difference from the plain run."""
    words = case.arguments.split()
    with copied(case.place, repositories) as folder:
        told = sorted(peak_of(case, folder, "cpu").device or 0 for _ in range(3))[1]

        def run_after(imports: list[str], then: str, until: str) -> tuple[int, int]:
            (folder / "after_imports.py").write_text("\n".join([*imports, then]))
            return observe(["after_imports.py", *words], until)

        imports = imports_of(folder / words[0])
        outside, _ = run_after(imports, WAIT, "ready")
        plain = sorted(observe(words, case.past)[1] - outside for _ in range(5))
        outside_ours, _ = run_after([*imports, OURS], WAIT, "ready")
        after_ours = run_after([*imports, OURS], GO_ON, case.past)[1] - outside_ours
    least, real, most = plain[0], plain[2], plain[-1]
    difference = 100 * (told / real - 1)
    row = (
        f"| {name_with_commit(case.name, case.place, repositories)} | {told / MIB:,.1f} | {real / MIB:,.1f} "
        f"| {least / MIB:,.1f} to {most / MIB:,.1f} | {difference:+.2f} % | {(told - real) / MIB:+.1f} "
        f"| {after_ours / MIB:,.1f} | {100 * (told / after_ours - 1):+.2f} % |"
    )
    return row, difference


def main() -> None:
    """Print both tables, or the rows that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    repositories = options.repositories.resolve()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}; card {CARD}, peaks allocated; host in private memory; MiB\n")
    wanted = [case for case in (*ON_CARD, *ON_HOST) if not options.only or case.name in options.only]
    print(
        "| script | n | its peak | careful workload | script is | what it does besides | workload alike | script is |"
    )
    print("|---|---:|---:|---:|---:|---|---:|---:|")
    from_careful, from_alike = [0.0], [0.0]
    for case in wanted:
        if isinstance(case, OnCard):
            row, careful, alike = compare_on_card(case, repositories)
            from_careful.append(abs(careful))
            from_alike.append(abs(alike))
            print(row, flush=True)
    print(
        f"\n{len(from_alike) - 1} scripts: worst {max(from_careful):.2f} % from a careful workload, "
        f"{max(from_alike):.2f} % from one alike\n"
    )
    print("| script | told | plain, median | five runs | told is | by | after imports of ours | told is |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    differences = []
    for case in wanted:
        if isinstance(case, OnHost):
            row, difference = compare_on_host(case, repositories)
            differences.append(abs(difference))
            print(row, flush=True)
    met = sum(difference <= BAR_PERCENT for difference in differences)
    worst = max(differences, default=0.0)
    print(f"\n{len(differences)} scripts: worst {worst:.2f} % from the plain run; {met} within {BAR_PERCENT:.0f} %")


if __name__ == "__main__":
    main()
