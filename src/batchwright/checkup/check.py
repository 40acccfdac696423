"""`check_machine`: try every part on this machine, and a training step on each of its devices.

Promises:
- the answer comes within two minutes on a machine that is not busy, and needs no extra, no GPU and no network;
- nothing fails silently: a part that did not work says with which error, and where;
- the step is predicted first, for the very card if the catalogue has it, and run afterwards by `fit`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import batchwright as bw
from batchwright import __version__
from batchwright.catalogue.cards import find_card
from batchwright.checkup.check_result import FAILED, NOT_HERE, WORKS, Check, CheckedDevice, CheckedPart, MeasuredProbe
from batchwright.checkup.parts import PARTS, NotHereError
from batchwright.checkup.small_gpt import NAME, workload
from batchwright.device.device import open_device, present_devices
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.units import format_bytes
from batchwright.user_files import cache_folder

PACKAGES = ("torch", "numpy", "click", "rich", "transformers", "accelerate", "lightning", "deepspeed", "peft", "triton")
MICRO_BATCH = 16
TARGET = f"{workload.__module__}:{workload.__name__}"


def check_machine(
    parts: Iterable[str] = tuple(PARTS),
    *,
    on: Iterable[str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Check:
    """Describe this machine, try the named parts, and run a small training step on each device, or those named by `on`.

    >>> check_machine(["Accumulator"], on=[]).parts[0].verdict
    'works'
    """
    start = time.monotonic()
    devices = tuple(map(describe_device, present_devices()))
    tried = []
    for name in parts:
        progress(f"{name} ...")
        tried.append(try_part(name))
    probes = []
    for device in (device for device in devices if on is None or device.name in tuple(on)):
        progress(f"a step on {device.name} ...")
        probe, part = probe_device(device)
        tried.append(part)
        if probe is not None:
            probes.append(probe)
    return Check(
        version=__version__,
        machine=describe_machine(),
        versions=installed_versions(),
        devices=devices,
        parts=tuple(tried),
        workload=NAME,
        probes=tuple(probes),
        cache_folder=_cache_folder(),
        seconds=round(time.monotonic() - start, 1),
    )


def describe_machine() -> dict[str, str]:
    """Return what can be said of the machine without naming it."""
    try:
        memory = format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        memory = "unknown"
    machine = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": _processor(),
        "cores": f"{os.cpu_count()} ({torch.get_num_threads()} used by torch)",
        "memory": memory,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }
    if torch.version.cuda or torch.version.hip:
        machine["accelerator"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        machine["driver"] = _driver()
    settings = {name: value for name, value in sorted(os.environ.items()) if name in _SETTINGS}
    if settings:
        machine["settings"] = " ".join(f"{name}={value}" for name, value in settings.items())
    return machine


# What changes how much memory or time a step takes, and names nobody.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "CUDA_MODULE_LOADING")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _driver() -> str:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return "unknown (no nvidia-smi)"
    query = [nvidia_smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next(iter(done.stdout.split()), "unknown")


def installed_versions() -> dict[str, str | None]:
    """Return the version of each package that matters, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch"] = torch.__version__  # with the build, such as +cpu
    return versions


def describe_device(name: str) -> CheckedDevice:
    """Say what a device of this machine is."""
    device = open_device(name)
    product, card = _processor() if name == "cpu" else name, None
    if name.startswith("cuda"):
        product = torch.cuda.get_device_name(torch.device(name))
        with contextlib.suppress(InvalidInputError):
            card = find_card(product).name
    return CheckedDevice(name, product, device.total_bytes, device.free_bytes, card)


def try_part(name: str) -> CheckedPart:
    """Try one part; whatever it raises is its answer, and what it prints is nobody's business."""
    start = time.monotonic()
    verdict, error = WORKS, ""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            with warnings.catch_warnings(action="ignore"):
                detail = PARTS[name]()
        except NotHereError as missing:
            verdict, detail = NOT_HERE, str(missing)
        except (Exception, SystemExit) as raised:
            verdict, detail, error = FAILED, _first_line(raised), _last_frames(raised)
    return CheckedPart(name, verdict, round(time.monotonic() - start, 1), detail, error)


def probe_device(device: CheckedDevice) -> tuple[MeasuredProbe | None, CheckedPart]:
    """Predict a step on a device, run it there, and return both; also whether `fit` worked on it."""
    name, start = f"fit on {device.name}", time.monotonic()
    place = "cpu" if device.name == "cpu" else device.card
    detail = "" if place else f"the catalogue has no card {device.product!r}, so nothing was predicted"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            predicted = None if place is None else bw.estimate(workload(), micro_batch=MICRO_BATCH, on=place).peak_bytes
            fit = bw.fit(TARGET, on=device.name, limit=MICRO_BATCH, cache=False)
            trial = next((trial for trial in fit.trials if trial.fits and trial.micro_batch == MICRO_BATCH), None)
            if trial is None:
                raise BatchwrightError(f"micro-batch {MICRO_BATCH} did not run: {fit.reason}")
        except (Exception, SystemExit) as raised:
            seconds = round(time.monotonic() - start, 1)
            return None, CheckedPart(name, FAILED, seconds, _first_line(raised), _last_frames(raised))
    probe = MeasuredProbe(
        device=device.name,
        micro_batch=MICRO_BATCH,
        predicted_on=place,
        predicted_bytes=predicted,
        measured_bytes=trial.peak_bytes,
        seconds=trial.step_seconds,
        detail=detail,
    )
    return probe, CheckedPart(name, WORKS, round(time.monotonic() - start, 1), f"micro-batch {MICRO_BATCH} ran")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return _unnamed(f"{type(error).__name__}: {lines[-1] if len(lines) > 20 else lines[0] if lines else ''}")


def _last_frames(error: BaseException) -> str:
    """Return where it was raised, by file names alone, and what was said."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return "\n".join([*places, *_unnamed(str(error).strip()).splitlines()[-12:]])


def _unnamed(text: str) -> str:
    """Write a text without the folders that name a person or a machine."""
    package = str(Path(bw.__file__).parents[1])
    for folder, name in (
        (sys.prefix, "<python>"),
        (package, "<packages>"),
        (os.getcwd(), "."),
        (str(Path.home()), "~"),
    ):
        text = text.replace(folder, name) if len(folder) > 1 else text
    return text.replace(platform.node(), "<host>") if platform.node() else text


def _cache_folder() -> str:
    folder = cache_folder()
    return "none: there is no home folder" if folder is None else str(folder).replace(str(Path.home()), "~", 1)
