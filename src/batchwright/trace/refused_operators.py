"""What a trace must refuse, and what the user reads then: the operator, the reason, the user's own line.

Torch itself would fail in words of its own, or go on with a wrong number.

Promises:
- values that leave the tensors (numpy, pickle, dlpack) are refused where they leave, so that the user's line is known;
- a plan over ranks that PyTorch itself refuses is told in its words, with what makes it run;
- an operator that is not torch's own, and whose shape rule is missing or fails, is refused by its name.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

import batchwright
from batchwright.errors import CannotTraceError, MixedDevicesError
from batchwright.simulated.torch_patches.backend import NAME as SIMULATED
from batchwright.simulated.torch_patches.patches import Patch

# What torch raises by itself where it needs values, or has no rule.
TORCHS_OWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

_WAYS_OUT = ("numpy", "__reduce_ex__", "__dlpack__")
# Whose lines are not the user's.
_OURS = (str(Path(torch.__file__).parent), str(Path(batchwright.__file__).parent), "<")
_NAMESPACES_OF_TORCH = ("aten", "prim", "prims")


class NotFollowedError(Exception):
    """An operator that the trace cannot follow, and why; `explaining` turns it into what the user reads."""

    def __init__(self, operator: str, reason: str) -> None:
        super().__init__(f"{operator}: {reason}")
        self.func = operator
        self.reason = reason


# FakeTensorDeviceMismatchError of torch 2.13; earlier ones raise a plain RuntimeError, with the operator in its words.
_TWO_DEVICES = re.compile(rf"(for (?P<operator>\S+), found )?two (different )?devices,? .*\b{SIMULATED}:0")


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Turn what torch raises where values or rules are missing into what the user reads, with the user's line."""
    try:
        yield
    except CannotTraceError as error:
        if error.details or not _place_of(error):
            raise
        raise CannotTraceError(error.problem, details=_place_of(error), remedy=error.remedy) from error
    except (*TORCHS_OWN, NotFollowedError) as error:
        raise _explained(error, what=what) from error
    except RuntimeError as error:
        if "no fake impl registered" in str(error):  # as Dynamo says it
            raise CannotTraceError(
                f"{what} cannot be compiled: {_without_a_rule(error)} has no shape rule (register_fake).",
                details=_place_of(error),
                remedy="a rule, which torch.compile needs on a real card too: torch.library.register_fake; or the step "
                "without torch.compile, for its eager peak",
            ) from error
        if (mixed := _TWO_DEVICES.search(str(error))) is not None:
            operator = str(getattr(error, "func", mixed["operator"] or "an operator")).removesuffix(".default")
            raise MixedDevicesError(
                f"{what} mixes devices: {operator} needs all tensors on the same device, and has one on the CPU beside "
                "one on the simulated card.",
                details=_place_of(error),
                remedy="move what the step holds besides model and batch (a teacher, an EMA, a constant), as on a real "
                "card: teacher.to(batch.device)",
            ) from error
        if "TorchScript interpreter" not in str(error):
            raise
        raise CannotTraceError(
            f"{what} cannot be traced: TorchScript runs its operators on real tensors only.",
            details=_place_of(error),
            remedy="the module as it was before torch.jit.script; or bw.fit(workload), which runs the step",
        ) from error
    except AssertionError as error:
        place = place_in_torch(error)
        if place is None:
            raise
        raise _explained(error, place, "torch's fake tensors do not know it", what=what) from error


# What PyTorch's own code for ranks refuses, and what makes it run. Each was seen to raise on real ranks.
_ALL_SHARDED = "a style for every module that has weights (SequenceParallel for norms), so that all are DTensors"
_MIXED = r"got mixed torch\.Tensor and DTensor"
_REMEDIES_OF_PLANS = (
    (rf"_foreach_(?!norm).*{_MIXED}", f"{_ALL_SHARDED}; or an optimizer with foreach=False"),
    (rf"_foreach_norm.*{_MIXED}", f"{_ALL_SHARDED}; or no clipping of all gradients at once"),
    (_MIXED, "a style for every module that a DTensor reaches; or use_local_output=True where it comes from"),
    (r"currently only supports? ", "a style for that kind of module: SequenceParallel for norms, or none"),
    (r"[Mm]esh should not be bigger", "devices= as many as the mesh has, or a smaller mesh"),
    (r"reshard_after_forward as an int", "a factor of the ranks that weights are sharded over, or True"),
    (r"cannot be larger than number of stages", "a stage for each rank of the pipeline, or a mesh whose pp is smaller"),
    (r"loss_fn and target required", "schedule.step(target=...) on the rank of the last stage"),
    (r"process group has not been initialized", "devices=N and a card: a plan over ranks needs both"),
    (r"must be greater than or equal to the number of stages", "n_microbatches= at least the number of stages"),
    (r"requires gradients to be enabled", "schedule.eval(...) where nothing is trained"),
    (r"First stage requires real tensors", "schedule.step(inputs) on the rank of the first stage"),
)
_NEAREST_PLAN = "the plan as it runs under torchrun; or fully_shard in its place, for the nearest peak"
_PLANS_OF_TORCH = str(Path(torch.__file__).parent / "distributed")


@contextmanager
def explaining_plans(what: str) -> Iterator[None]:
    """Turn what PyTorch's code for ranks refuses into what the user reads; their own mistakes stay as they are."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_of_ranks = bool(frames) and frames[-1].filename.startswith(_PLANS_OF_TORCH)
        if not is_of_ranks and not re.search(_MIXED, str(error)):  # which C++ raises
            raise
        words = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".!")
        remedy = next((remedy for known, remedy in _REMEDIES_OF_PLANS if re.search(known, words)), _NEAREST_PLAN)
        raise CannotTraceError(
            f"PyTorch itself refuses what {what} does over ranks: {words}.",
            details=_place_of(error),
            remedy=remedy,
        ) from error


def _without_a_rule(error: Exception) -> str:
    """The operator that has none, as Dynamo names it."""
    named = re.search(r"registered for (?:<CustomOpDef\()?([\w.:]+)", str(error))
    return f"operator {named[1]}" if named else "an operator of its own"


def _place_of(error: Exception) -> list[str]:
    """Return the user's line that an error came from, as the details of another."""
    # What Dynamo looks at does not run, so its frames are in no traceback: it keeps the stack of the user's code.
    seen = getattr(error, "real_stack", None) or ()
    line = users_line((*traceback.extract_tb(error.__traceback__), *seen))
    return [f"at {line}"] if line else []


def _explained(error: Exception, operator: str = "", reason: str = "", *, what: str) -> CannotTraceError:
    operator = operator or str(getattr(error, "func", error)).splitlines()[0]
    reason = reason or getattr(error, "reason", "torch knows no shape rule for it")
    if isinstance(error, DataDependentOutputException):
        reason = "it reads a value out of a tensor, and a traced tensor has none"
    elif isinstance(error, DynamicOutputShapeException):
        reason = "the size of its result depends on values, and a traced tensor has none"
    return CannotTraceError(
        f"{what} cannot be traced: operator {operator}: {reason}.",
        details=_place_of(error),
        remedy="bw.fit(workload) runs the step instead; or keep that line out of the step that is traced",
    )


def users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's nor ours."""
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def values_stay_inside(known: Callable[[torch.Tensor], torch.Tensor | None] | None = None) -> Iterator[Patch]:
    """Refuse to hand out what a traced tensor has not got; `known` returns one with its values where they are known."""
    # On the class, not through a TorchFunctionMode: under such a mode modules leave their fast paths.
    for name in _WAYS_OUT:
        yield Patch(FakeTensor, name, _refusal(name, known if name == "numpy" else None))
    # transformers leaves out a mask of nothing but ones, if it may look: it does not look into tensors that are fake.
    transformers = sys.modules.get("transformers.utils.import_utils")
    if known is not None and hasattr(transformers, "is_fake_tensor"):
        yield Patch(transformers, "is_fake_tensor", lambda x: isinstance(x, FakeTensor) and known(x) is None)


def _refusal(name: str, known: Callable[[torch.Tensor], torch.Tensor | None] | None) -> Callable[..., Any]:
    def refuse(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        real = None if known is None else known(tensor)
        if real is not None:
            with _disable_current_modes():
                return real.clone().numpy()
        raise NotFollowedError(f"Tensor.{name}", "it takes values out of a tensor, and a traced tensor has none")

    return refuse


def shapes_from(rule: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Run the shape rule of an operator; say of one that is not torch's own that its rule is missing or fails."""
    try:
        return rule(*args, **kwargs)
    except (*TORCHS_OWN, NotFollowedError):
        raise
    except Exception as error:
        # Torch checks shapes in its own rules, so what they raise is most likely the user's mistake; but no mistake
        # in shapes is "not implemented".
        if func.namespace in _NAMESPACES_OF_TORCH and not isinstance(error, NotImplementedError):
            raise
        raise NotFollowedError(str(func), f"its shape rule is missing or fails ({_first_sentence(error)})") from error


def _first_sentence(error: Exception) -> str:
    """What failed; torch goes on, in the same line, with the list of all its backends."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first_line.split(". ")[0].removesuffix(".")


def place_in_torch(error: AssertionError) -> str | None:
    """Where torch came upon a tensor that fake ones cannot stand for (a nested one); None for any other assertion."""
    fakes = str(Path(torch._subclasses.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.startswith(fakes):
        return None
    callers = [frame for frame in frames if not frame.filename.startswith(fakes)]
    return f"{Path(callers[-1].filename).stem}.{callers[-1].name}"


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor that is sharded over ranks lies on this one."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def pieces_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a tensor's bytes: of one made of others (8-bit states, float8 weights), those."""
    tensor = local_part(tensor)
    if isinstance(tensor, FakeTensor) or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [piece for name in names for piece in pieces_of(getattr(tensor, name))]


def storage_of(tensor: torch.Tensor, operator: str) -> torch.UntypedStorage:
    """The one storage of a tensor, of a sharded one that of its own shard; what has none, or several, is refused."""
    try:
        return local_part(tensor).untyped_storage()
    except NotImplementedError as error:
        kind = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        kind = "opaque" if kind == "strided" else kind
        raise NotFollowedError(operator, f"it makes a tensor of {kind} layout, whose memory is not followed") from error
