"""Read a training configuration, JSON or YAML, into a plain mapping, or say what is wrong with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchwright.errors import InvalidInputError, import_extra
from batchwright.units import shortened
from batchwright.users_files import read_text


def read_config(path: str | Path) -> dict[str, Any]:
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


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise DuplicateKeyError(key)
        data[key] = value
    return data


def _nearby(file: Path) -> str:
    """Name the config files that do exist in the same folder."""
    if not file.parent.is_dir():
        return f"the folder '{file.parent}' does not exist either"
    found = sorted(p.name for p in file.parent.iterdir() if p.suffix.lower() in {".json", ".yaml", ".yml"})
    return f"one of {', '.join(found[:5])} in the same folder" if found else ""
