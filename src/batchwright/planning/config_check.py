"""Check whether the batch numbers of a config file agree, and say what to change where they do not.

Reads DeepSpeed configs and files of transformers' TrainingArguments, also one that names the other.

Promises:
- a file that cannot be read or holds impossible values is an error; one that is well-formed but contradicts
  itself is an answer (`agrees` is False);
- whatever is not set is taken at the framework's own default, and that is said.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.batch_triangle import AUTO, MICRO, STEPS, TOTAL, Number, judge_triangle
from batchwright.planning.config_file import read_config
from batchwright.printed_result import PrintedResult
from batchwright.units import counted, shortened, whole_number

if TYPE_CHECKING:
    from rich.console import RenderableType

# transformers 5.22: TrainingArguments(per_device_train_batch_size=8, gradient_accumulation_steps=1)
_DEFAULT_PER_DEVICE = 8
_PER_DEVICE = "per_device_train_batch_size"
_TRAINING_ARGUMENTS = {
    _PER_DEVICE,
    "per_device_eval_batch_size",
    STEPS,
    "dataloader_num_workers",
    "dataloader_drop_last",
}
_DEEPSPEED = {TOTAL, MICRO, "zero_optimization", "zero_allow_untested_optimizer", "steps_per_print"}
# DeepSpeed describes these with a mapping, TrainingArguments with a flag or a name.
_DEEPSPEED_SECTIONS = ("fp16", "bf16", "optimizer", "scheduler", "zero_optimization")


@dataclass(frozen=True, repr=False)
class ConfigCheck(PrintedResult):
    """What a config's batch numbers come to, and whether they agree."""

    in_repr = ("path", "kind", "devices", "agrees", "effective_batch")

    path: str
    kind: str
    devices: int
    agrees: bool
    effective_batch: int | None
    micro_batch: int | None
    accumulation: int | None
    findings: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the check as plain data, the same as `batchwright plan --check FILE --json` prints."""
        lists = {"findings": list(self.findings), "changes": list(self.changes)}
        return {"schema": 1, "source": "formula", **asdict(self), **lists}

    def __rich__(self) -> RenderableType:
        from batchwright.report.check_text import draw_check

        return draw_check(self)

    def _repr_html_(self) -> str:
        from batchwright.report.check_text import check_remarks, summarize_check
        from batchwright.report.html import table_to_html

        return table_to_html(summarize_check(self), [], check_remarks(self))


def check_config(path: str | Path, *, devices: int = 1) -> ConfigCheck:
    """Check the batch numbers of a DeepSpeed or TrainingArguments file for a number of devices.

    >>> import json, tempfile
    >>> file = Path(tempfile.mkdtemp(), "ds.json")
    >>> _ = file.write_text(json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}))
    >>> check = check_config(file, devices=8)
    >>> check.agrees, check.accumulation
    (True, 2)
    """
    num_devices = whole_number(devices, "devices")
    config = read_config(path)
    is_deepspeed = bool(_DEEPSPEED & set(config)) or any(isinstance(config.get(k), dict) for k in _DEEPSPEED_SECTIONS)
    if is_deepspeed and _PER_DEVICE in config:
        raise InvalidInputError(
            f"'{path}' sets {_PER_DEVICE}, which belongs to TrainingArguments, beside keys of a DeepSpeed config: "
            "it is not clear which of the two reads it.",
            remedy="keep them in two files, the DeepSpeed one named by `deepspeed:` in the arguments",
        )
    if is_deepspeed:
        return _check_deepspeed(str(path), config, num_devices)
    if _TRAINING_ARGUMENTS & set(config):
        return _check_training_arguments(Path(path), config, num_devices)
    raise InvalidInputError(
        f"'{path}' is neither a DeepSpeed config nor a file of TrainingArguments: "
        f"it sets none of {TOTAL}, {MICRO}, {_PER_DEVICE}, {STEPS}.",
        details=[f"it sets {', '.join(sorted(config)[:8]) or 'nothing'}"],
    )


def _check_deepspeed(path: str, config: dict[str, Any], devices: int) -> ConfigCheck:
    total, micro_batch, steps = (_number(path, config, key, may_be_auto=True) for key in (TOTAL, MICRO, STEPS))
    verdict = judge_triangle(total, micro_batch, steps, devices)
    return ConfigCheck(
        path,
        "deepspeed",
        devices,
        verdict.agrees,
        verdict.total,
        verdict.micro_batch,
        verdict.accumulation,
        (verdict.finding, *_ignored_keys(config)),
        verdict.changes,
    )


def _ignored_keys(config: dict[str, Any]) -> list[str]:
    """Name keys that look like a batch size but that DeepSpeed does not know: it ignores them silently."""
    return [
        f"'{key}' is not a key of DeepSpeed, which ignores it silently; it knows {TOTAL} and {MICRO}"
        for key in config
        if "batch_size" in key and key not in (TOTAL, MICRO)
    ]


def _check_training_arguments(path: Path, config: dict[str, Any], devices: int) -> ConfigCheck:
    findings: list[str] = []
    micro_batch = _plain_number(path, config, _PER_DEVICE)
    if micro_batch is None:
        micro_batch = _DEFAULT_PER_DEVICE
        findings.append(f"{_PER_DEVICE} is not set; transformers takes {_DEFAULT_PER_DEVICE}")
    steps = _plain_number(path, config, STEPS)
    if steps is None:
        steps = 1
        findings.append(f"{STEPS} is not set; transformers takes 1")
    _plain_number(path, config, "per_device_eval_batch_size")
    effective = micro_batch * steps * devices
    findings.insert(0, f"{micro_batch:,} x {steps:,} x {counted(devices, 'device')} = {effective:,}")
    if config.get("auto_find_batch_size"):
        findings.append(
            "auto_find_batch_size shrinks the micro-batch when out of memory and keeps accumulation, "
            "so the effective batch falls"
        )
    contradictions, changes = _compare_with_deepspeed(path, config, micro_batch, steps, devices)
    return ConfigCheck(
        str(path),
        "transformers",
        devices,
        not contradictions,
        effective,
        micro_batch,
        steps,
        (*findings, *contradictions),
        tuple(changes),
    )


def _compare_with_deepspeed(
    path: Path, config: dict[str, Any], micro_batch: int, steps: int, devices: int
) -> tuple[list[str], list[str]]:
    """Compare with the DeepSpeed config that TrainingArguments may name or hold; transformers demands equality."""
    named = config.get("deepspeed")
    if named is None:
        return [], []
    if isinstance(named, dict):
        place, inner = f"{path}, under 'deepspeed'", named
    elif isinstance(named, str) and named.strip() and "\0" not in named:
        # transformers reads it relative to where training starts; beside the file is where people keep it.
        inner_path = next((p for p in (Path(named), path.parent / named) if p.is_file()), Path(named))
        place, inner = str(inner_path), read_config(inner_path)
    else:
        raise InvalidInputError(f"'{path}' sets deepspeed to {shortened(named)}; a file name or a mapping is expected.")
    wanted = {TOTAL: micro_batch * steps * devices, MICRO: micro_batch, STEPS: steps}
    contradictions, changes = [], []
    for key, value in wanted.items():
        found = _number(place, inner, key, may_be_auto=True)
        if found not in (None, AUTO, value):
            contradictions.append(f"{key} is {found:,} in {place}, but the arguments come to {value:,}")
            changes.append(f"{key}: {found:,} -> {value:,} in {place} (or 'auto')")
    for ignored in _ignored_keys(inner):
        contradictions.append(f"{ignored} (in {place})")
        changes.append(f"rename or remove it in {place}")
    return contradictions, changes


def _plain_number(path: Path, config: dict[str, Any], key: str) -> int | None:
    value = _number(str(path), config, key, may_be_auto=False)
    assert not isinstance(value, str)
    return value


def _number(place: str, config: dict[str, Any], key: str, *, may_be_auto: bool) -> Number:
    value = config.get(key)
    if value is None:
        return None
    if may_be_auto and value == AUTO:
        return AUTO
    # DeepSpeed takes 64.0 for 64, and JSON writers that know only one kind of number write it so.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return whole_number(value, f"{key} in '{place}'")
