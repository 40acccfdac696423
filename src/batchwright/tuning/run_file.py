"""A run as one JSON file: written whole or not at all, and read back with a clear word where it cannot be.

Promises:
- a file is replaced at once: a full disk, or a process that is killed, leaves the one before;
- every section is there: what `--json` of its command prints, or `{"skipped": reason}`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from batchwright.errors import BatchwrightError, InvalidInputError

KIND, SCHEMA = "batchwright run", 1
SECTIONS = ("workload", "estimate", "fit", "throughput", "audit", "noise", "plan", "recommendation")


def new_run(created: str) -> dict[str, Any]:
    """Return a run of which nothing has been done.

    >>> new_run("2026-11-16")["fit"]
    {'skipped': 'not reached'}
    """
    # Branches are no command of their own, and may be missing.
    empty = {name: {"skipped": "not reached"} for name in (*SECTIONS, "branches")}
    return {"schema": SCHEMA, "kind": KIND, "created": created, "finished": False, **empty}


def is_done(section: dict[str, Any]) -> bool:
    """Whether a section holds an answer; that of `noise` has a `skipped` of its own, which counts steps.

    >>> is_done({"skipped": "as asked"}), is_done({"micro_batch": 8}), is_done({"skipped": {"not finite": 2}})
    (False, True, True)
    """
    return not isinstance(section.get("skipped"), str)


def write_run(run: dict[str, Any], file: Path) -> None:
    """Replace the file by this run."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(run, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise BatchwrightError(
            f"the run cannot be written to '{file}': {error.strerror or error}.",
            remedy="another place: --run FILE, in a folder that exists and has room",
        ) from None


def read_run_file(file: str | Path) -> dict[str, Any]:
    """Return the run in a file."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidInputError(
            f"no run at '{path}'.", remedy="batchwright tune TARGET writes one; --run FILE says where"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"the run at '{path}' cannot be read: {error}.", remedy="the file that tune wrote"
        ) from None
    try:
        run = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f" from line {error.lineno} on" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidInputError(
            f"the run at '{path}' is damaged: it is no JSON{place} ({error}).",
            remedy="batchwright tune TARGET --run FILE, which writes it anew",
        ) from None
    if not isinstance(run, dict) or run.get("kind") != KIND:
        raise InvalidInputError(f"'{path}' is no run of batchwright tune.", remedy="the file that tune wrote")
    schema = run.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise InvalidInputError(
            f"the run at '{path}' has schema {schema}, and this batchwright reads up to {SCHEMA}.",
            remedy="pip install --upgrade batchwright",
        )
    missing = [name for name in SECTIONS if not isinstance(run.get(name), dict)]
    if missing:
        raise InvalidInputError(
            f"the run at '{path}' is damaged: it has no {', '.join(missing)}.",
            remedy="batchwright tune TARGET --run FILE, which writes it anew",
        )
    return {"branches": {"skipped": "not reached"}, **run}
