"""The peers of benchmarks/sampler.py: what each makes of the same lengths, by its own released code.

They are fetched once into a folder of their own, without dependencies that could change torch or numpy, and put at the
end of the path. fairseq is its compiled `batch_by_size_vec` alone, built here from the released file, with the
permutation, the stable sort and the shuffle around it as its dataset and epoch iterator have them. Of speechbrain and
TRL one file each is loaded, with the imports stubbed that the algorithm does not use.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import types
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]

BUDGET, RANKS = 16_384, 8
COUNT = 32  # for samplers that count samples
FAIRSEQ = "fairseq==0.12.2"
PACKAGES = ("lhotse==1.33.0", "speechbrain==1.1.2", "trl==1.16.0")
# What those import that is not there; never torch, numpy or transformers.
BESIDE = "Cython pyarrow intervaltree cytoolz toolz tabulate soundfile audioread lilcom cffi pycparser urllib3"


@dataclass(frozen=True)
class Peer:
    """How a peer plans; `given` is not timed, `start` is its construction and `plan` one epoch of one rank."""

    given: Callable[[Numbers], Any]
    start: Callable[[Any], Any]
    plan: Callable[[Any, int], Any]
    batches: Callable[[Any, int], Iterable[Any]]
    """All batches of all ranks, eight in a row for a step."""


def fetch(folder: Path) -> None:
    """Fetch the packages, and build fairseq's function."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not (folder / "lhotse").exists():
        _run([*pip, "install", "--no-deps", "--target", str(folder), *PACKAGES, *BESIDE.split()])
    if not list(folder.glob("data_utils_fast*.so")):
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
        _run([*pip, "download", *options, FAIRSEQ])
        with tarfile.open(next(folder.glob("fairseq-*.tar.gz"))) as archive:
            member = next(name for name in archive.getnames() if name.endswith("data_utils_fast.pyx"))
            source = archive.extractfile(member)
            assert source is not None, member
            (folder / "data_utils_fast.pyx").write_bytes(source.read())
        _run([sys.executable, "-m", "cython", "-3", "--cplus", "data_utils_fast.pyx"], cwd=folder)
        headers = [f"-I{sysconfig.get_path('include')}", f"-I{np.get_include()}"]
        built = f"data_utils_fast{sysconfig.get_config_var('EXT_SUFFIX')}"
        flags = ["-std=c++11", "-O3", "-w", "-shared", "-fPIC"]  # the first two are fairseq's own
        _run(["c++", *flags, *headers, "data_utils_fast.cpp", "-o", built], cwd=folder)


def _run(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])}: {done.stderr.strip().splitlines()[-1]}")


def peers(folder: Path) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can be had, and why the others cannot."""
    missing = {}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fetch(folder)
    except (RuntimeError, OSError) as error:
        missing["not all could be fetched"] = str(error)
    sys.path.append(str(folder))
    makers: dict[str, Callable[[], Peer]] = {
        "fairseq batch_by_size_vec (compiled)": _fairseq,
        "transformers group_by_length, 32": _group_by_length,
        "transformers batch_rebalance, 1,024 in 4 x 8": _batch_rebalance,
        "lhotse DynamicBucketingSampler, 30 buckets": _lhotse,
        "speechbrain DynamicBatchSampler, 200 buckets": lambda: _speechbrain(folder),
    }
    found = {}
    for name, maker in makers.items():
        try:
            found[name] = maker()
        except (ImportError, AttributeError, OSError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def _fairseq() -> Peer:
    batch_by_size = import_module("data_utils_fast").batch_by_size_vec

    def plan(given: tuple[Any, Numbers], epoch: int) -> list[Numbers]:
        # As LanguagePairDataset.ordered_indices, which has sizes in 32 bits, and EpochBatchIterator.
        sizes, lengths = given
        rng = np.random.RandomState(epoch)
        order = rng.permutation(len(sizes)).astype(np.int64)
        order = order[np.argsort(sizes[order], kind="mergesort")]
        found: list[Numbers] = batch_by_size(order, lengths[order], BUDGET, -1, 1)
        rng.shuffle(found)
        return found

    return Peer(lambda lengths: (lengths.astype(np.int32), lengths), lambda given: given, plan, plan)


def _group_by_length() -> Peer:
    grouped = import_module("transformers.trainer_pt_utils").get_length_grouped_indices

    def plan(lengths: list[int], epoch: int) -> list[int]:
        found: list[int] = grouped(lengths, COUNT, generator=torch.Generator().manual_seed(epoch))
        return found

    def batches(lengths: list[int], epoch: int) -> list[list[int]]:
        order = plan(lengths, epoch)
        return [order[at : at + COUNT] for at in range(0, len(order), COUNT)]

    return Peer(lambda lengths: lengths.tolist(), lambda given: given, plan, batches)


def _batch_rebalance() -> Peer:
    sampler_class = import_module("transformers.trainer_pt_utils").BatchRebalanceSampler
    accumulation = 4

    def start(lengths: list[int], rank: int = 0) -> Any:
        return sampler_class(lengths, COUNT * RANKS * accumulation, RANKS, accumulation, rank=rank, drop_last=False)

    def plan(sampler: Any, epoch: int) -> list[list[int]]:
        sampler.set_epoch(epoch)
        return list(sampler)

    def batches(sampler: Any, epoch: int) -> list[list[int]]:
        ranks = [plan(start(sampler.lengths, rank), epoch) for rank in range(RANKS)]
        return list(chain.from_iterable(zip(*ranks, strict=True)))

    return Peer(lambda lengths: lengths.tolist(), start, plan, batches)


def _lhotse() -> Peer:
    cut_class = import_module("lhotse").MonoCut
    sampler_class = import_module("lhotse.dataset.sampling").DynamicBucketingSampler

    def given(lengths: Numbers) -> list[Any]:
        order = np.random.default_rng(0).permutation(len(lengths)).tolist()
        return [cut_class(id=str(i), start=0, duration=float(lengths[i]), channel=0) for i in order]

    def start(cuts: list[Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sampler_class(cuts, max_duration=BUDGET, num_buckets=30, shuffle=True, world_size=RANKS, rank=0)

    def plan(sampler: Any, epoch: int) -> list[Any]:
        sampler.set_epoch(epoch)
        return list(sampler)

    def batches(sampler: Any, epoch: int) -> Iterable[list[int]]:
        # One rank draws the batches of all and keeps its own; here all are kept.
        sampler.set_epoch(epoch)
        iter(sampler)
        while True:
            try:
                yield [int(cut.id) for cut in sampler._next_batch()]
            except StopIteration:
                return

    return Peer(given, start, plan, batches)


def _speechbrain(folder: Path) -> Peer:
    stubs: dict[str, dict[str, Any]] = {
        "speechbrain": {},
        "speechbrain.dataio": {},
        "speechbrain.dataio.dataset": {"DynamicItemDataset": type("DynamicItemDataset", (), {})},
        "speechbrain.utils": {},
        "speechbrain.utils.logger": {"get_logger": import_module("logging").getLogger},
    }
    sampler_class = one_file(folder / "speechbrain/dataio/sampler.py", stubs).DynamicBatchSampler

    def start(lengths: list[int]) -> Any:
        return sampler_class(lengths, BUDGET, num_buckets=200, lengths_list=lengths)

    def plan(sampler: Any, epoch: int) -> list[list[int]]:
        sampler.set_epoch(epoch)
        found: list[list[int]] = sampler._batches
        return found

    return Peer(lambda lengths: lengths.tolist(), start, plan, plan)


def trl_packing(folder: Path) -> Callable[[Numbers, int, int | None], Callable[[], Numbers]]:
    """Return what prepares a packing of TRL; called again, it packs and returns how many samples each row has."""
    names = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    arrow = import_module("pyarrow")
    pack = one_file(folder / "trl/data_utils.py", {"datasets": {name: type(name, (), {}) for name in names}})._pack_bfd

    def prepare(lengths: Numbers, room: int, chunk: int | None) -> Callable[[], Numbers]:
        edges = np.append(0, np.cumsum(lengths))
        tokens = arrow.array(np.zeros(int(edges[-1]), np.int8))
        table = arrow.table({"input_ids": arrow.LargeListArray.from_arrays(edges, tokens)})
        size = chunk or len(lengths)

        def run() -> Numbers:
            rows = [pack(table.slice(at, size), room)["seq_lengths"] for at in range(0, len(lengths), size)]
            return np.array([len(row) for column in rows for row in column])

        return run

    return prepare


def one_file(path: Path, stubs: dict[str, dict[str, Any]]) -> Any:
    """Load one file of a package; `stubs` stand for modules that it imports, only meanwhile."""
    before = {name: sys.modules.get(name) for name in stubs}
    for name, values in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(values)
    try:
        spec = spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
    return module
