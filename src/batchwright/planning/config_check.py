"""Check whether the batch numbers of a config file agree, and say what to change if they do not.

Reads DeepSpeed configs and files of transformers' TrainingArguments, also one that names the other.

Promises:
- a file that cannot be read or holds impossible values is an error; one that is well-formed but contradicts
  itself is an answer (`agrees` is False);
- whatever is not set is taken at the framework's own default, and the answer says so;
- the verdict on the three numbers of DeepSpeed is its own: what it accepts agrees, what its assertion refuses does not;
- every change offered makes the numbers agree.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchwright.errors import InvalidInputError, import_extra
from batchwright.planning.split import largest_divisor
from batchwright.printed_result import PrintedResult
from batchwright.units import counted, shortened, whole_number
from batchwright.user_files import read_text

Config = dict[str, Any]
"""A training configuration, as its file holds it."""


def read_config(path: str | Path) -> Config:
    """Return the mapping that a config file holds."""
    if not isinstance(path, str | Path) or not str(path).strip() or "\0" in str(path):
        raise InvalidInputError(f"a config file is named by its path; received {shortened(path)}.")
    file = Path(path)
    try:
        text = read_text(file, encoding="utf-8-sig")
    except FileNotFoundError:
        raise InvalidInputError(f"no config file at '{file}'.", remedy=_nearby(file)) from None
    except OSError as error:
        raise InvalidInputError(
            f"cannot read '{file}': {error.strerror}.", remedy="a JSON or YAML file of settings"
        ) from None
    if not text.strip():
        raise InvalidInputError(f"'{file}' is empty; a JSON or YAML mapping of settings is expected.")
    data = _parse_yaml(file, text) if file.suffix.lower() in {".yaml", ".yml"} else _parse_json(file, text)
    if not isinstance(data, dict):
        raise InvalidInputError(
            f"'{file}' holds {type(data).__name__} {shortened(data)}; a mapping of settings is expected."
        )
    return {str(key): value for key, value in data.items()}


def _parse_json(file: Path, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"'{file}' is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except DuplicateKeyError as error:
        raise _set_twice(file, error) from None
    except (RecursionError, ValueError) as error:
        # Nested beyond the parser's depth, or a number of more digits than Python reads.
        raise InvalidInputError(f"'{file}' cannot be read as JSON: {error}.") from None


def _parse_yaml(file: Path, text: str) -> Any:
    yaml = import_extra("yaml", extra="transformers", purpose=f"reading the YAML file '{file}'")

    class OncePerKey(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """A loader that refuses what YAML itself forbids and its reader lets pass: one key twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise DuplicateKeyError(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=OncePerKey)
    except DuplicateKeyError as error:
        raise _set_twice(file, error) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise InvalidInputError(f"'{file}' is not valid YAML: {problem}{place}.") from None
    except (RecursionError, ValueError) as error:
        raise InvalidInputError(f"'{file}' cannot be read as YAML: {error}.") from None


class DuplicateKeyError(Exception):
    """A mapping that sets one key twice."""


def _set_twice(file: Path, error: DuplicateKeyError) -> InvalidInputError:
    return InvalidInputError(f"'{file}' sets {error.args[0]!r} twice, so one of its values would be ignored.")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Config:
    data: Config = {}
    for key, value in pairs:
        if key in data:
            raise DuplicateKeyError(key)
        data[key] = value
    return data


def _nearby(file: Path) -> str:
    """Name the config files that do exist in the same folder."""
    if not file.parent.is_dir():
        return f"the folder '{file.parent}' does not exist either"
    names = sorted(p.name for p in file.parent.iterdir() if p.suffix.lower() in {".json", ".yaml", ".yml"})
    return f"one of {', '.join(names[:5])} in the same folder" if names else ""


# train_batch_size = micro-batch x accumulation x devices. DeepSpeed fills in what is missing by integer division and
# then asserts the product, which names neither the remainder nor the remedy.
TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
AUTO = "auto"

Number = int | str | None


@dataclass(frozen=True)
class Verdict:
    """Whether the three agree, what they come to, and what to change if they do not."""

    agrees: bool
    finding: str
    total: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    changes: tuple[str, ...] = ()


def judge_triangle(total: Number, micro_batch: Number, accumulation: Number, devices: int) -> Verdict:
    """Judge the three numbers; each may be missing (None) or left to the trainer ("auto").

    >>> judge_triangle(64, 4, 4, devices=8).finding
    'train_batch_size is 64, but 4 x 4 x 8 devices = 128'
    >>> judge_triangle(64, 4, 4, devices=8).changes[0]
    'train_batch_size: 64 -> 128'
    """
    if AUTO in (total, micro_batch, accumulation):
        return _judge_auto(total, micro_batch, accumulation, devices)
    whole, size, steps = (_known(number) for number in (total, micro_batch, accumulation))
    if whole is None:
        if size is None:
            finding = f"neither {TOTAL} nor {MICRO} is set, and DeepSpeed needs one of them"
            return Verdict(False, finding, changes=(f"set {MICRO} to the largest micro-batch that fits",))
        return _agreement(size * (steps or 1) * devices, size, steps or 1, devices)
    if size is None:
        return _judge_total_alone(whole, steps, devices)
    return _judge_total_and_micro(whole, size, steps, devices)


def _judge_auto(total: Number, micro_batch: Number, accumulation: Number, devices: int) -> Verdict:
    names = [n for n, v in ((TOTAL, total), (MICRO, micro_batch), (STEPS, accumulation)) if v == AUTO]
    finding = f"{', '.join(names)} left to the trainer ('auto')"
    # Whatever the trainer fills in, the total stays a multiple of the numbers that are there.
    multiple = devices * (_known(micro_batch) or 1) * (_known(accumulation) or 1)
    if isinstance(total, int) and total % multiple:
        return Verdict(
            False,
            f"{finding}, but {TOTAL} {total:,} is not a multiple of {multiple:,}, what the other numbers come to",
            changes=_divisible_totals(total, multiple),
        )
    if isinstance(micro_batch, int) and isinstance(accumulation, int):
        total = micro_batch * accumulation * devices
    return Verdict(True, finding, _known(total), _known(micro_batch), _known(accumulation))


def _known(value: Number) -> int | None:
    return value if isinstance(value, int) else None


def _judge_total_and_micro(total: int, micro_batch: int, accumulation: int | None, devices: int) -> Verdict:
    multiple = micro_batch * devices
    steps = accumulation or total // multiple
    if steps and steps * multiple == total:
        return _agreement(total, micro_batch, steps, devices)
    by = counted(devices, "device")
    nearby = _nearby_divisor(total, micro_batch, devices)
    if accumulation is None:
        finding = f"{TOTAL} {total:,} is not a multiple of {MICRO} {micro_batch:,} x {by} = {multiple:,}"
        return Verdict(False, finding, changes=(*_divisible_totals(total, multiple), *nearby))
    product = multiple * accumulation
    changes = (
        f"{TOTAL}: {total:,} -> {product:,}",
        *_divided(STEPS, accumulation, total, multiple),
        *_divided(MICRO, micro_batch, total, accumulation * devices),
        *_divided("devices", devices, total, micro_batch * accumulation),
        *(() if total % multiple == 0 else nearby),
    )
    finding = f"{TOTAL} is {total:,}, but {micro_batch:,} x {accumulation:,} x {by} = {product:,}"
    return Verdict(False, finding, changes=changes)


def _judge_total_alone(total: int, accumulation: int | None, devices: int) -> Verdict:
    slots = (accumulation or 1) * devices
    micro_batch, remainder = divmod(total, slots)
    if micro_batch and not remainder:
        return _agreement(total, micro_batch, accumulation or 1, devices)
    by = f"{STEPS} {accumulation:,} x {counted(devices, 'device')}" if accumulation else counted(devices, "device")
    return Verdict(False, f"{TOTAL} {total:,} does not divide by {by}", changes=_divisible_totals(total, slots))


def _agreement(total: int, micro_batch: int, accumulation: int, devices: int) -> Verdict:
    finding = f"{micro_batch:,} x {accumulation:,} x {counted(devices, 'device')} = {total:,}"
    return Verdict(True, finding, total, micro_batch, accumulation)


def _divided(name: str, current: int, total: int, by: int) -> tuple[str, ...]:
    value, remainder = divmod(total, by)
    return (f"{name}: {current:,} -> {value:,}",) if value and not remainder else ()


def _divisible_totals(total: int, multiple: int) -> tuple[str, ...]:
    below = total // multiple * multiple
    return tuple(f"{TOTAL}: {total:,} -> {value:,}" for value in (below, below + multiple) if value)


def _nearby_divisor(total: int, micro_batch: int, devices: int) -> tuple[str, ...]:
    """Keep the total and find the largest smaller micro-batch that divides it."""
    per_device, remainder = divmod(total, devices)
    if remainder:
        return ()
    size = largest_divisor(per_device, at_most=micro_batch)
    return (f"{MICRO}: {micro_batch:,} -> {size:,} and {STEPS} -> {per_device // size:,}",) if size else ()


# transformers 5.22: TrainingArguments(per_device_train_batch_size=8, gradient_accumulation_steps=1)
_PER_DEVICE = "per_device_train_batch_size"
_TAKEN = {_PER_DEVICE: 8, STEPS: 1, "per_device_eval_batch_size": 8}
_TRAINING_ARGUMENTS = {*_TAKEN, "dataloader_num_workers", "dataloader_drop_last"}
_DEEPSPEED = {TOTAL, MICRO, "zero_optimization", "zero_allow_untested_optimizer", "steps_per_print"}
# DeepSpeed describes these with a mapping, TrainingArguments with a flag or a name.
_DEEPSPEED_SECTIONS = ("fp16", "bf16", "optimizer", "scheduler", "zero_optimization")


@dataclass(frozen=True, repr=False)
class ConfigCheck(PrintedResult):
    """What a config's batch numbers come to, and whether they agree."""

    in_repr = ("path", "kind", "devices", "agrees", "effective_batch")
    drawn_by = "plan_text.draw_check"

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

    def _repr_html_(self) -> str:
        from batchwright.report.display import table_to_html
        from batchwright.report.text.plan_text import check_remarks, summarize_check

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


def _check_deepspeed(path: str, config: Config, devices: int) -> ConfigCheck:
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


def _ignored_keys(config: Config) -> list[str]:
    """Name keys that look like a batch size but that DeepSpeed does not know: it ignores them silently."""
    return [
        f"'{key}' is not a key of DeepSpeed, which ignores it silently; it knows {TOTAL} and {MICRO}"
        for key in config
        if "batch_size" in key and key not in (TOTAL, MICRO)
    ]


def _check_training_arguments(path: Path, config: Config, devices: int) -> ConfigCheck:
    numbers = {key: _known(_number(str(path), config, key, may_be_auto=False)) for key in _TAKEN}
    micro_batch, steps = (numbers[key] or _TAKEN[key] for key in (_PER_DEVICE, STEPS))
    effective = micro_batch * steps * devices
    findings = [f"{micro_batch:,} x {steps:,} x {counted(devices, 'device')} = {effective:,}"]
    findings += [
        f"{key} is not set; transformers takes {_TAKEN[key]}" for key in (_PER_DEVICE, STEPS) if numbers[key] is None
    ]
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
    path: Path, config: Config, micro_batch: int, steps: int, devices: int
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
        number = _number(place, inner, key, may_be_auto=True)
        if number not in (None, AUTO, value):
            contradictions.append(f"{key} is {number:,} in {place}, but the arguments come to {value:,}")
            changes.append(f"{key}: {number:,} -> {value:,} in {place} (or 'auto')")
    for ignored in _ignored_keys(inner):
        contradictions.append(f"{ignored} (in {place})")
        changes.append(f"rename or remove it in {place}")
    return contradictions, changes


def _number(place: str, config: Config, key: str, *, may_be_auto: bool) -> Number:
    value = config.get(key)
    if value is None:
        return None
    if may_be_auto and value == AUTO:
        return AUTO
    # DeepSpeed takes 64.0 for 64, and JSON writers that know only one kind of number write it so.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return whole_number(value, f"{key} in '{place}'")
