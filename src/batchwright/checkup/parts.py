"""What is tried of each part: the smallest run that would fail if the part did not work here.

Promises:
- a part that fails, hangs or leaves by an exception of any kind does not end the check; the next one is tried;
- nothing is written but to a temporary folder, and nothing is remembered;
- a part whose package or system is missing is "not here", never "failed".
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import batchwright as bw
from batchwright.errors import BatchwrightError

SMALL_NET = "batchwright.checkup.small_gpt:small_net"
# A process that is stuck shows no other sign than time; on a busy laptop two ranks and their children start in 20 s.
PROCESS_SECONDS = 60.0


class NotHereError(Exception):
    """What a part needs is missing on this machine."""


def try_arithmetic() -> str:
    """Run the part that needs no torch."""
    answer = bw.recommend("llama-3-8b", on="a100-40gb", tuning="qlora").answers[0]
    bw.advise("out-of-memory", micro_batch=8)
    plan = bw.plan(1000, micro_batch=48, devices=4)
    return f"{plan.effective_batch:,} by plan; micro-batch {answer.recommended_batch_size} by recommend"


def try_estimate() -> str:
    """Trace a step on the CPU."""
    from batchwright.checkup.small_gpt import small_net

    return f"{bw.estimate(small_net(), micro_batch=8, on='cpu').peak:,} bytes on the CPU"


def try_simulated_card() -> str:
    """Trace a step on a card that need not be there, and search its largest micro-batch."""
    from batchwright.checkup.small_gpt import workload

    largest = bw.estimate(workload(), on="rtx-4090-24gb", find_max=True)
    return f"micro-batch {largest.micro_batch:,} would fit on rtx-4090-24gb"


def try_audit() -> str:
    """Compare an accumulated gradient with that of the big batch."""
    from batchwright.auditing.audit import audit_workload
    from batchwright.checkup.small_gpt import small_net

    audit = audit_workload(small_net())
    error = max(split.relative_error or 0.0 for split in audit.splits)
    return _checked(audit.exact, f"relative error {error:.1g}")


def try_accumulator() -> str:
    """Accumulate over uneven micro-batches and compare with one backward."""
    import torch

    torch_state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        model, data = torch.nn.Linear(8, 1), torch.randn(10, 8)
    finally:
        torch.set_rng_state(torch_state)
    model(data).square().mean().backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    seen: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    accumulator = bw.Accumulator(model, optimizer, accumulation=3)
    for micro in accumulator.micro_batches([data[:4], data[4:8], data[8:]]):
        accumulator.backward(model(micro).square().mean())
    handle.remove()
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(seen, whole, strict=True))
    return _checked(error < 1e-5, f"10 samples as 4, 4 and 2: relative error {error:.1g}")


def try_noise() -> str:
    """Train for some steps and measure the critical batch."""
    from batchwright.checkup.small_gpt import small_net
    from batchwright.noise.noise_run import measure_noise

    run = measure_noise(small_net(), effective_batch=32, steps=24, on="cpu")
    return str(run.critical_batch)


def try_sampler() -> str:
    """Batch samples of many lengths under a budget."""
    lengths = [3 + 7 * n % 61 for n in range(200)]
    sampler = bw.TokenBatchSampler(lengths, max_tokens=128)
    batches = list(sampler)
    padded = max(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    is_whole = sorted(i for batch in batches for i in batch) == list(range(200))
    return _checked(is_whole and padded <= 128, f"{len(batches)} batches, the largest {padded} of 128 tokens")


def try_script() -> str:
    """Run a program that knows nothing of batchwright, on a simulated card."""
    from batchwright.checkup.small_gpt import PROGRAM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(PROGRAM, encoding="utf-8")
        script = bw.Script([sys.executable, "train.py", "--batch-size", "4"], cwd=folder, seconds=60.0)
        answer = script.answer_estimate(
            micro_batch=None,
            accumulation=None,
            on="rtx-4090-24gb",
            shape=None,
            memory=None,
            find_max=False,
            devices=1,
            progress=None,
        )
    return _checked(bool(answer.fits), "train.py --batch-size 4 on rtx-4090-24gb")


def try_tune_and_report() -> str:
    """Tune a small net and draw its page."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.json")
        bw.tune(SMALL_NET, on="cpu", limit=8, steps=24, noise_batch=16, skip=("fit", "audit"), file=file)
        _run([sys.executable, "-m", "batchwright", "report", str(file)], PROCESS_SECONDS)
        page = file.with_suffix(".html").read_text(encoding="utf-8")
    return _checked("</html>" in page, f"a page of {len(page) // 1024} KiB")


def try_ranks() -> str:
    """Fit over two ranks of this machine, which talk through gloo."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise NotHereError("this build of torch has no gloo")
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "batchwright")
    words = ("fit", SMALL_NET, "--on", "cpu", "--memory", "1GiB", "--limit", "4", "--no-cache", "--json")
    out = _run([sys.executable, "-m", *launcher, *words], PROCESS_SECONDS)
    answer = json.loads(out)
    return _checked(answer["micro_batch"] == 4, f"micro-batch {answer['micro_batch']} on {answer['ranks']} ranks")


def _run(command: list[str], seconds: float) -> str:
    """Run a command in a group of its own, which ends with it; its stdout if it succeeds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    own_group = sys.platform != "win32"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=own_group,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException as error:
        if own_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BatchwrightError(f"no answer within {seconds:.0f} s.") from None
        raise
    if process.returncode:
        raise BatchwrightError(err.strip() or f"exit code {process.returncode}.")
    return out


def try_framework(name: str) -> Callable[[], str]:
    """Return the trial of one framework's integration."""

    def try_it() -> str:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise NotHereError("not installed") from None
        importlib.import_module(f"batchwright.integrations.{name}")
        return version

    return try_it


def _checked(holds: bool, detail: str) -> str:
    if not holds:
        raise BatchwrightError(detail)
    return detail


PARTS: dict[str, Callable[[], str]] = {
    "plan, advise, recommend": try_arithmetic,
    "estimate": try_estimate,
    "estimate --on CARD": try_simulated_card,
    "estimate -- COMMAND": try_script,
    "audit": try_audit,
    "Accumulator": try_accumulator,
    "TokenBatchSampler": try_sampler,
    "noise": try_noise,
    "tune, report": try_tune_and_report,
    "ranks": try_ranks,
    "with transformers": try_framework("transformers"),
    "with lightning": try_framework("lightning"),
    "with accelerate": try_framework("accelerate"),
}
