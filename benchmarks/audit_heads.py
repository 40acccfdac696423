"""Which heads of the installed transformers ignore the item count? Builds every `*For*` class and asks it.

    python benchmarks/audit_heads.py [--only NAME ...] [--minutes N]

Each class is built from a tiny config (benchmarks/tiny_heads.py) and given one micro-batch with two counts
(`batchwright.integrations.transformers.check_head`). Classes run in child processes, so that a crash or a hang costs
one of them. Without --only the table goes to docs/reference/heads.md. About 15 minutes on one core, 4 GB of RAM.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS_PER_CLASS = 20
_MARK = "@head "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.only)
        return
    names = options.only or head_names()
    found = {}
    for row in run_all(names, deadline=time.monotonic() + 60 * options.minutes):
        found[row["head"]] = row
        print(f"{len(found):>4}/{len(names)} {row['head']}: {row['verdict']} {row['reason']}", flush=True)
    if not options.only:
        from heads_page import write_page

        write_page(found)


def head_names() -> list[str]:
    import transformers

    names = [name for name in dir(transformers) if re.search(r"For[A-Z]", name)]
    kinds = {name: getattr(transformers, name) for name in names}
    base = transformers.PreTrainedModel
    return [n for n, k in kinds.items() if isinstance(k, type) and issubclass(k, base) and k.config_class is not None]


def run_all(names: list[str], *, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield a row per class; a child that dies or hangs is replaced, and the class it was at is given up."""
    waiting = list(names)
    while waiting:
        if time.monotonic() > deadline:
            yield from ({"head": name, "verdict": "not built", "reason": "out of time"} for name in waiting)
            return
        command = [sys.executable, os.path.abspath(__file__), "--child", "--only", *waiting[:60]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        done = []
        for row in rows_of(child, deadline):
            done.append(row["head"])
            yield row
        left = [name for name in waiting[:60] if name not in done]
        if left:
            reason = "took too long" if child.returncode == -signal.SIGKILL else "the process ended"
            if time.monotonic() <= deadline:
                yield {"head": left[0], "verdict": "not built", "reason": reason}
                left = left[1:]
        waiting = left + waiting[60:]


def rows_of(child: subprocess.Popen[bytes], deadline: float) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    rest = b""
    descriptor = child.stdout.fileno()
    while True:
        ready, _, _ = select.select([descriptor], [], [], 20 * SECONDS_PER_CLASS)
        if not ready or time.monotonic() > deadline:
            child.kill()
            break
        text = os.read(descriptor, 65536)
        if not text:
            break
        *lines, rest = (rest + text).split(b"\n")
        for line in lines:
            if line.startswith(_MARK.encode()):
                yield json.loads(line[len(_MARK) :])
    child.wait()


def run_child(names: list[str]) -> None:
    import warnings

    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)

    def too_long(*_: Any) -> None:
        raise TimeoutError("took too long")

    # Of CPU time, so that a busy machine changes nothing.
    signal.signal(signal.SIGPROF, too_long)
    for name in names:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CLASS)
        try:
            row = check(getattr(transformers, name))
        except Exception as error:
            row = {"verdict": "not built", "reason": short(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(_MARK + json.dumps({"head": name, **row}), flush=True)


def check(kind: Any) -> dict[str, Any]:
    import torch
    from tiny_heads import build, input_forms, label_forms

    from batchwright.integrations.transformers.exact_loss import not_given_a_count

    labels = inspect.signature(kind.forward).parameters.get("labels")
    # As Trainer does: no labels, or labels that are lists of dicts, and nothing is counted.
    given = {} if labels is None else {"labels": None if "dict" in str(labels.annotation) else torch.ones(1)}
    why_not = not_given_a_count(kind, given)
    if why_not:
        reason = "its forward takes no labels" if labels is None and "labels" in why_not else why_not
        return {"verdict": "divided", "reason": reason}
    problems: list[str] = []
    for widths in (True, False):  # made small in every way; where that does not build or run, with fewer layers only
        try:
            model = build(kind, widths=widths)
            for inputs in input_forms(model):
                for index, form in enumerate(label_forms(model, inputs)):
                    row = check_once(model, {**inputs, "labels": form}, problems)
                    if row is not None:
                        return row
                    if is_refusal(problems[-1]):
                        return {"verdict": "not built", "reason": problems[-1]}
                    if index == 0 and not runs_without_labels(model, inputs):
                        break
        except TimeoutError:
            raise
        except Exception as error:
            problems.append(short(error))
    return {"verdict": "not built", "reason": (problems or ["no inputs known"])[0]}


def is_refusal(problem: str) -> bool:
    return bool(re.search(r"([Tt]raining|trainable)", problem))


def runs_without_labels(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether it can be the labels that a head does not take; those of a decoder may be all the input it has."""
    import torch

    if model.config.is_encoder_decoder:
        return True
    with contextlib.suppress(Exception), torch.no_grad():
        model(**inputs)
        return True
    return False


def check_once(model: Any, batch: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """Return the verdict on one form of labels, or None where the head does not take it."""
    import torch
    from tiny_heads import parts_of

    from batchwright.errors import InvalidInputError
    from batchwright.integrations.transformers.exact_loss import check_head, loss_at

    try:
        found = check_head(model, batch)
    except TimeoutError:
        raise
    except Exception as error:
        problems.append(short(error))
        with contextlib.suppress(Exception), torch.no_grad():
            loss_at(model, batch, None)
            if not isinstance(error, InvalidInputError):
                return {"verdict": "fails", "reason": short(error)}
        return None
    routers = [part for part in parts_of(model.config) if getattr(part, "output_router_logits", None) is False]
    if found.verdict == "uses" and routers:
        for part in routers:
            part.output_router_logits = True
        with contextlib.suppress(Exception):
            found = check_head(model, batch)
    return {"verdict": found.verdict, "reason": "", "share": found.ignored_share}


def short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:90]}"


if __name__ == "__main__":
    main()
