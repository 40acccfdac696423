"""Write the JSON schema of every result: `python docs/schemas.py`, part of `make docs`.

A schema is read off answers: those that the tests make of every kind of result, and the fields that it declares.

Promises:
- every result that has a `to_dict` has a schema, and a test compares each answer it makes with it;
- a key is required only at the top, where it is always there;
- a number, text or flag inside of a record may be null, as what is unknown is; what no answer had is left open;
- a number is a number: whether it happened to be whole in an answer says nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FOLDER = DOCS / "reference" / "schemas"
Schema = dict[str, Any]

# Which command prints it with --json; the others are had in Python.
COMMANDS = {
    "Advice": "advise",
    "Audit": "audit",
    "Check": "check",
    "ConfigCheck": "plan --check",
    "Estimate": "estimate",
    "EveryCard": "estimate --on all",
    "Fit": "fit",
    "NoiseRun": "noise",
    "Plan": "plan",
    "Recommendation": "recommend",
    "ScriptEstimate": "estimate -- COMMAND",
    "Tuned": "tune",
}

PAGE = """# JSON of every result

Written by `make docs`. `--json` on a command prints what the result's `to_dict()` returns. `schema` is 1, `source` is
measured, predicted or formula, bytes are whole numbers; what is infinite, unresolved or unknown is null.
A schema lists what answers hold today; keys may be added, and none changes its meaning under the same number.

| result | command | schema |
|---|---|---|
{rows}
"""


def infer(value: Any) -> Schema:
    """Return the schema of one value.

    >>> infer({"peak": 3, "notes": ["a"]})["properties"]["notes"]
    {'type': 'array', 'items': {'type': 'string'}}
    """
    if value is None:
        return {"type": "null"}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int | float):
        return {"type": "number"}
    if isinstance(value, str):
        return {"type": "string"}
    if isinstance(value, list | tuple):
        items = merge([infer(item) for item in value])
        return {"type": "array", **({"items": items} if items else {})}
    return {"type": "object", "properties": {str(key): infer(part) for key, part in value.items()}}


def merge(schemas: list[Schema]) -> Schema:
    """Return a schema that every value of any of these has.

    >>> merge([{"type": "null"}, {"type": "number"}])
    {'type': ['null', 'number']}
    """
    types: list[str] = []
    for schema in schemas:
        given = schema["type"]
        types += [name for name in ([given] if isinstance(given, str) else given) if name not in types]
    if not types:
        return {}
    merged: Schema = {"type": types[0] if len(types) == 1 else sorted(types)}
    properties: dict[str, list[Schema]] = {}
    for schema in schemas:
        for key, part in schema.get("properties", {}).items():
            properties.setdefault(key, []).append(part)
    if properties:
        merged["properties"] = {key: merge(parts) for key, parts in properties.items()}
    if items := merge([schema["items"] for schema in schemas if "items" in schema]):
        merged["items"] = items
    return merged


def schema_of(name: str, results: list[Any]) -> Schema:
    """Return the schema of a kind of result from some answers of it."""
    answers = [json.loads(json.dumps(result.to_dict())) for result in results]
    schema = merge([infer(answer) for answer in answers])
    kind = type(results[0])
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        part = schema["properties"].get(field.name)
        types = [] if part is None else [part["type"]] if isinstance(part["type"], str) else part["type"]
        if part is not None and "None" in str(field.type) and "null" not in types:
            part["type"] = sorted([*types, "null"])
    schema["properties"] = {key: _open(part, is_top=True) for key, part in schema["properties"].items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " "),
        **schema,
        "required": [key for key in answers[0] if all(key in answer for answer in answers)],
    }


def _open(schema: Schema, *, is_top: bool = False) -> Schema:
    """Let what stands inside of a record be null, and what was only ever null be anything."""
    if not schema or schema["type"] == "null":
        return {}
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    opened = dict(schema) if is_top else {**schema, "type": sorted({*types, "null"})}
    if "properties" in schema:
        opened["properties"] = {key: _open(part) for key, part in schema["properties"].items()}
    if "items" in schema:
        opened["items"] = _open(schema["items"])
    return opened


def find_mismatches(value: Any, schema: Schema, place: str = "") -> Iterator[str]:
    """Name where a value is not what a schema says."""
    if "type" not in schema:
        return
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    kind = infer(value)["type"]
    if kind not in types:
        yield f"{place or 'the answer'} is {kind}, not {' or '.join(types)}"
        return
    if isinstance(value, dict):
        yield from (f"{place}.{key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, part in value.items():
            if key in schema.get("properties", {}):
                yield from find_mismatches(part, schema["properties"][key], f"{place}.{key}")
    if isinstance(value, list) and "items" in schema:
        for number, part in enumerate(value):
            yield from find_mismatches(part, schema["items"], f"{place}[{number}]")


def write_schemas() -> None:
    """Make an answer of every kind, and write its schema and the page that lists them."""
    sys.path[:0] = [str(DOCS.parent)]
    from tests.report.test_notebook_display import RESULTS

    answers: dict[str, list[Any]] = {}
    for title, make in RESULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            result = make(Path(folder))
        if hasattr(result, "to_dict"):
            answers.setdefault(title.split(",")[0], []).append(result)
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, results in sorted(answers.items()):
        text = json.dumps(schema_of(name, results), indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        command = f"`batchwright {COMMANDS[name]}`" if name in COMMANDS else "in Python"
        rows.append(f"| `{name}` | {command} | [{name}.json](schemas/{name}.json) |")
    (DOCS / "reference" / "schemas.md").write_text(PAGE.format(rows="\n".join(rows)), encoding="utf-8")


if __name__ == "__main__":
    write_schemas()
