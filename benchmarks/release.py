"""What a user gets: wheel and sdist, built, installed into empty environments, every command run, and removed again.

    python benchmarks/release.py                               (torch 2.13.0; needs the extra `site` for `build`)
    python benchmarks/release.py --torch 2.10.0 2.13.0         (each in an environment of its own: gigabytes)
    python benchmarks/release.py --without-torch python3.12 python3.13

Of each environment: every command without any extra, its seconds, and what is left after `pip uninstall`.
The commands that need no torch run with torch made impossible to import. It says "not tested" where an environment
could not be had. Ends with 1 if a command fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKLOAD = """
import torch
import batchwright as bw

data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))

def workload():
    return bw.Workload(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)),
        data=data,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
"""
PROGRAM = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
options = parser.parse_args()
data = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(data, batch_size=options.batch_size):
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Without torch; then with it. The tuned run is drawn, alone and beside itself.
PLAIN = (
    "plan 256 --micro-batch 12 --devices 4",
    "plan 64 --micro-batch 8 --for deepspeed",
    "plan --check ds.json --devices 8",
    "recommend 7b --memory 24GiB",
    "advise slow --micro-batch 4",
    "explain accumulation --lang zh",
    "estimate llama-3-8b",
)
WITH_TORCH = (
    "estimate w.py:workload --micro-batch 8 --what-if",
    "estimate w.py:workload --on a100-40gb",
    "fit w.py:workload --memory 512MiB --limit 16",
    "audit w.py:workload",
    "noise w.py:workload --steps 24 --effective-batch 16",
    "tune w.py:workload --memory 512MiB --limit 8 --steps 24 --noise-batch 16 --run-file run.json",
    "report run.json",
    "report run.json run.json -o two.html",
    "estimate --on cpu -- python program.py --batch-size 4",
    "fit --memory 1GiB -- python program.py --batch-size {micro_batch}",
    "calibrate",
    "check",
)
# These may say no: the check of a config whose numbers disagree, noise without an upper end.
MAY_SAY_NO = ("plan --check", "noise")
_WITHOUT_TORCH = "raise ImportError('torch must not be imported here')\n"


@dataclass(frozen=True)
class Ran:
    """One command in one environment."""

    line: str
    code: int
    seconds: float
    said: str
    is_our_failure: bool

    @property
    def is_fine(self) -> bool:
        """Whether it answered; a clean no is an answer where one is expected."""
        is_no = self.code == 1 and self.line.startswith(MAY_SAY_NO) and not self.is_our_failure
        return self.code == 0 or is_no


@dataclass(frozen=True)
class Environment:
    """An environment of its own, with nothing in it but what the package asks for."""

    folder: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def pip(self, *words: str) -> str:
        """Run its pip and return what it said; an error ends the run."""
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pip {' '.join(words)}: {(done.stderr.strip() or 'failed').splitlines()[-1][:200]}")
        return done.stdout

    def run(self, line: str, cwd: Path, *, blocks_torch: bool = False) -> Ran:
        """Run one command as a user would, with its own cache and no torch if none is to be imported."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "BATCHWRIGHT_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}
        variables.pop("PYTHONPATH", None)
        if blocks_torch:
            blocked = cwd / "blocked"
            for name in ("torch", "numpy"):
                (blocked / name).mkdir(parents=True, exist_ok=True)
                (blocked / name / "__init__.py").write_text(_WITHOUT_TORCH)
            variables["PYTHONPATH"] = str(blocked)
        start = time.monotonic()
        words = ["batchwright", *line.split()]
        done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=variables, check=False)
        said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [""]
        is_ours = "batchwright itself failed" in done.stderr  # after what it said of its progress
        return Ran(line, done.returncode, time.monotonic() - start, said[0][:90], is_ours)


def build(out: Path) -> tuple[Path, Path]:
    """Build wheel and sdist, and return them."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, cwd=out)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def prepare(folder: Path) -> Path:
    """Write what the commands read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "w.py").write_text(WORKLOAD)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "ds.json").write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    return folder


def make_environment(folder: Path, python: str) -> Environment:
    """Make an empty environment."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True, capture_output=True)
    return Environment(folder)


def files_in(environment: Environment) -> set[str]:
    """Return every file of its packages that names batchwright."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = subprocess.run([environment.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    names = (str(path) for folder in (Path(place), environment.folder / "bin") for path in folder.rglob("*"))
    return {name for name in names if "batchwright" in Path(name).name or "/batchwright/" in name}


def show(title: str, rows: list[Ran]) -> bool:
    """Print the commands of one environment; whether all were fine."""
    bad = [row for row in rows if not row.is_fine]
    total = sum(row.seconds for row in rows)
    print(f"\n{title}: {len(rows) - len(bad)} of {len(rows)} commands answered, {total:.0f} s")
    for row in rows:
        print(f"  {'ok ' if row.is_fine else 'BAD'} {row.code} {row.seconds:5.1f} s  {row.line}  | {row.said}")
    return not bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Build, install, run and remove the package.")
    parser.add_argument("--torch", nargs="*", default=["2.13.0"], help="versions of torch, an environment each")
    parser.add_argument("--without-torch", nargs="*", default=[], metavar="PYTHON", help="interpreters for the rest")
    parser.add_argument("--sdist", action="store_true", help="also install the sdist, without torch")
    options = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dist").mkdir()
        wheel, sdist = build(folder / "dist")
        print(f"{wheel.name} {wheel.stat().st_size // 1024} KiB, {sdist.name} {sdist.stat().st_size // 1024} KiB")
        plain = [(python, wheel) for python in options.without_torch] + [(sys.executable, sdist)] * options.sdist
        for number, (python, package) in enumerate(plain):
            try:
                environment = make_environment(folder / f"plain-{number}", python)
                environment.pip("install", "--quiet", "--no-deps", str(package))
                environment.pip("install", "--quiet", "click>=8.1.7", "rich>=13.7")
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                print(f"\n{python}: not tested ({error})")
                continue
            cwd = prepare(folder / f"plain-work-{number}")
            rows = [environment.run(line, cwd, blocks_torch=True) for line in PLAIN]
            fine &= show(f"{package.name} on {python}, no torch", rows)
        for version in options.torch:
            try:
                environment = make_environment(folder / f"torch-{version}", sys.executable)
                environment.pip("install", "--quiet", f"torch=={version}", str(wheel))
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                print(f"\ntorch {version}: not tested ({error})")
                continue
            before = environment.pip("list", "--format", "freeze").split()
            cwd = prepare(folder / f"work-{version}")
            rows = [environment.run(line, cwd, blocks_torch=True) for line in PLAIN]
            rows += [environment.run(line, cwd) for line in WITH_TORCH]
            fine &= show(f"torch {version}, {len(before)} packages", rows)
            environment.pip("uninstall", "--quiet", "--yes", "batchwright")
            left = files_in(environment)
            print(f"  after uninstall: {len(left)} files of it are left; the cache is where `check` says it is")
            fine &= not left
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
