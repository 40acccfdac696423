"""Is the accumulation of the user's own program right: the command at one batch and at a split, gradients compared.

Promises:
- both runs begin from the same random state, with dropout, clipping and autocast off and batch statistics frozen, so
  that what differs is the accumulation;
- gradients are compared only if both windows hold the same samples, in the same order, which is checked;
- if they do not, the verdict is that they cannot be compared, with the reason; what the counts of backwards show is
  said all the same.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter

from batchwright.auditing.audit_result import TOLERANCES, Audit, Cause, SplitAudit
from batchwright.auditing.causes import COUNT_IGNORED, DIVIDED_TWICE, NOT_COMPARABLE, SHORT_WINDOW, UNKNOWN
from batchwright.auditing.gradients import Gradient, compare_modules
from batchwright.auditing.overrides import frozen_statistics, without_autocast, without_clipping, without_dropout
from batchwright.catalogue.cards import names_a_card
from batchwright.device.device import default_device
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.scripts.command import ACCUMULATION, MICRO_BATCH, UserCommand
from batchwright.scripts.probe import Probes
from batchwright.scripts.recognise import with_recognised_options
from batchwright.units import counted, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from batchwright.scripts.script import Script
    from batchwright.scripts.script_run import ScriptRun

# Optimizer steps whose backwards are counted: a window that differs from the others needs two of those.
_NUM_WINDOWS = 3
_NEAR = 1e-3


class GradientMeasure:
    """In the program's process: the gradient before the first optimizer step, and the samples it was made of."""

    def __init__(self, _: int) -> None:
        self._overrides = ExitStack()
        self._seen: list[nn.Module] = []
        self._samples: list[str] = []
        self._by_name: dict[str, torch.Tensor] | None = None

    def seed(self) -> None:
        """Begin from the same random state in every run, and leave out what is not accumulation."""
        torch.manual_seed(0)
        random.seed(0)
        try:
            import numpy
        except ImportError:
            pass
        else:
            numpy.random.seed(0)
        self._overrides.enter_context(without_clipping(lambda _: None))
        self._overrides.enter_context(without_autocast())

    def forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the samples of a forward that belongs to the first window."""
        if self._by_name is not None:
            return
        if all(module is not seen for seen in self._seen):
            self._seen.append(module)
            self._overrides.enter_context(without_dropout(module))
            self._overrides.enter_context(frozen_statistics(module))
        self._samples += fingerprints(args, kwargs)

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradient of the modules whose weights are about to be stepped."""
        if self._by_name is not None:
            return
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        roots = [m for m in self._seen if held & {id(weight) for weight in m.parameters()}]
        self._by_name = {}
        for number, root in enumerate(roots):
            prefix = f"{number}." if len(roots) > 1 else ""
            self._by_name |= {prefix + name: value for name, value in Gradient.of(root).by_name.items()}

    def stepped(self, optimizer: torch.optim.Optimizer, run: ScriptRun) -> None:
        """Nothing to do."""

    def result(self) -> dict[str, Any]:
        """Return the gradient by name, and a mark for every sample."""
        return {"gradient": self._by_name or {}, "samples": self._samples}


def fingerprints(args: Any, kwargs: Any) -> list[str]:
    """Return a mark for each sample of a model's inputs; what an attention mask hides does not count.

    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> padded = fingerprints((), {"input_ids": ids, "attention_mask": (ids > 0).long()})
    >>> short = fingerprints((), {"input_ids": ids[:1, :2], "attention_mask": torch.ones(1, 2, dtype=torch.long)})
    >>> len(padded), padded[0] == short[0]
    (2, True)
    """
    tensors = [v.detach().cpu() for v in tree_iter((args, kwargs)) if isinstance(v, torch.Tensor) and v.dim()]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    mask = kwargs.get("attention_mask")
    marks = []
    for index in range(len(tensors[0]) if tensors else 0):
        mark = hashlib.sha256()
        for tensor in tensors:
            row = tensor[index]
            if isinstance(mask, torch.Tensor) and mask.shape == tensor.shape:
                row = row[mask[index].bool().cpu()]
            mark.update(str(row.dtype).encode())
            mark.update(bytes(row.reshape(-1).contiguous().view(torch.uint8).tolist()))
        marks.append(mark.hexdigest()[:16])
    return marks


@dataclass(frozen=True)
class _Window:
    """What one run did until its first optimizer step."""

    run: ScriptRun
    gradient: Gradient
    samples: list[str]
    """A mark for each, in the order they came: labels that the model does not receive are paired by it."""


def audit_script(
    script: Script,
    *,
    micro_batch: int = 2,
    accumulation: int = 4,
    shape: Mapping[str, Any] | None = None,
    on: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Audit:
    """Run a program at one batch and at a split of it, and compare the gradients before the first optimizer step.

    Args:
        script: the program as it is typed, with a place for the micro-batch and one for the accumulation.
        micro_batch: samples of a micro-batch.
        accumulation: micro-batches per optimizer step; the big batch has both multiplied.
        shape: values of further placeholders.
        on: this machine's own device; a simulated card has no values to compare.
        progress: called with what is being done.
    """
    size, parts = whole_number(micro_batch, "micro_batch"), whole_number(accumulation, "accumulation", least=2)
    place = on or default_device()
    if names_a_card(place):
        raise InvalidInputError(
            f"gradients are compared by their values, and {place} is simulated: it has none.", remedy='on="cpu"'
        )
    with Probes(script, place) as probes:
        script, recognised = with_recognised_options(probes, (MICRO_BATCH, ACCUMULATION), shape=shape, say=progress)
        big, split = (
            _run_window(probes, script.at(size_of, accumulation=count, shape=shape), progress)
            for size_of, count in ((size * parts, 1), (size, parts))
        )
    if big.run.backwards_per_window == split.run.backwards_per_window:
        raise InvalidInputError(
            f"the accumulation changes nothing: {script.name} makes {split.run.accumulation} backward(s) per step "
            f"at an accumulation of 1 and of {parts}.",
            remedy="{accumulation} in the place that does",
        )
    return _judge(script.name, big, split, (size,) * parts, recognised)


def _run_window(probes: Probes, command: UserCommand, say: Callable[[str], None]) -> _Window:
    say(f"running {command} until optimizer step {_NUM_WINDOWS}")
    run = probes.run(command, num_windows=_NUM_WINDOWS, measure="gradient")
    data = run.measured or {}
    if not data.get("gradient"):
        raise BatchwrightError(
            f"{command} came to no step of an optimizer whose weights belong to a model that was called.",
            details=[f"seen: {run.num_windows} {run.windows}, {counted(len(run.input_shapes), 'forward')}"],
        )
    return _Window(run, Gradient(data["gradient"]), data["samples"])


def _judge(name: str, big: _Window, split: _Window, sizes: tuple[int, ...], recognised: tuple[str, ...]) -> Audit:
    notes = [
        *recognised,
        "dropout, clipping and autocast were off and batch statistics frozen; both runs were seeded alike",
        f"backwards per optimizer step: {', '.join(map(str, split.run.backwards_per_window))}",
    ]
    counts = split.run.backwards_per_window
    defects = []
    if set(counts) != {len(sizes)}:
        listed = ", ".join(map(str, counts))
        explanation = f"{SHORT_WINDOW.explanation}: {listed} where {len(sizes)} were asked for"
        defects.append(replace(SHORT_WINDOW, explanation=explanation))
    what = "the program's own loop, unmodified"
    if big.samples != split.samples:
        reason = _why_not(big, split)
        row = SplitAudit(sizes, None, None, exact=False, cause=NOT_COMPARABLE.name)
        cause = defects[0] if defects else replace(NOT_COMPARABLE, explanation=reason)
        if defects:
            notes.append(f"gradients were not compared: {reason}")
        return Audit(
            name, what, "fp32", (row,), row, (), cause.name, cause.remedy, cause.explanation, tuple(notes),
            defects=tuple(defects), is_comparable=False,
        )  # fmt: skip
    ratio, error = split.gradient.ratio_to(big.gradient), split.gradient.error_to(big.gradient)
    is_exact = error is not None and error <= TOLERANCES["fp32"]
    cause_of_it = None if is_exact else _cause(split.gradient, big.gradient, len(sizes))
    row = SplitAudit(sizes, ratio, error, is_exact, None if cause_of_it is None else cause_of_it.name)
    modules = () if is_exact else compare_modules(split.gradient, big.gradient)
    named = cause_of_it or (defects[0] if defects else None)
    return Audit(
        name,
        what,
        "fp32",
        (row,),
        row,
        modules,
        None if named is None else named.name,
        None if named is None else named.remedy,
        "" if named is None else named.explanation,
        tuple(notes),
        defects=tuple(defects),
    )


def _why_not(big: _Window, split: _Window) -> str:
    shared = sum((Counter(big.samples) & Counter(split.samples)).values())
    if shared == len(big.samples) == len(split.samples):
        return "the samples are the same, and come in another order: the program draws them by batch"
    reason = (
        f"{shared} of the {len(big.samples)} samples of the big batch are among the {len(split.samples)} of the split"
    )
    return reason if shared else f"{reason}: the program draws its samples by batch"


def _cause(gradient: Gradient, reference: Gradient, parts: int) -> Cause:
    """Name a factor that the accumulation explains; more is not known of a program that runs by itself."""
    for factor, cause in ((float(parts), COUNT_IGNORED), (1.0 / parts, DIVIDED_TWICE)):
        error = gradient.times(1.0 / factor).error_to(reference)
        if error is not None and error <= _NEAR:
            return cause
    return replace(
        UNKNOWN,
        explanation="no factor explains it; micro-batches of different lengths that count alike would",
        remedy="divide sums by the units of the whole window, as bw.Accumulator does with weight=",
    )
