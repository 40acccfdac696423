"""What one probe runs: a few full steps at one size, the same on every device, watched by the device that runs them.

Promises:
- the real probe and the memory trace run the same function, `run_probe`; they differ only in the device, in how the
  model is built and in who observes the phases;
- a mistake in the user's code propagates untouched, with its own traceback; a workload that cannot be right (a loss
  that is no scalar, a batch that ignores its size, an optimizer over nothing, a step that trains nothing) is an
  `InvalidInputError` that says what to change: without it everything would seem to fit;
- nothing of a step is kept alive into the next one but weights and optimizer state;
- the user's functions are called inside of `untouched` only, which gives back what is theirs; a model comes back
  without a hook of ours;
- what a function of the user's hands out and somebody else holds, too (`model=lambda: model`), is kept before anything
  is done with it; what it builds anew is nobody's, and costs neither a copy nor, as a rule, a second call.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchwright.device.batches import make_batch
from batchwright.device.outcome import Outcome, is_too_small
from batchwright.device.pipeline import PipelineRank
from batchwright.errors import InvalidInputError
from batchwright.state.kept_tensor import hooks_taken_back
from batchwright.state.process_state import random_sources
from batchwright.state.untouched import current_keep, survivors, untouched
from batchwright.units import as_list, shortened, whole_number

if TYPE_CHECKING:
    from batchwright.workload import Workload


def scalar_loss(loss: Any) -> torch.Tensor:
    """Return what `loss=` returned if it is one real number in a tensor, or say what it is instead."""
    if not isinstance(loss, torch.Tensor):
        raise InvalidInputError(
            f"loss= must return a scalar tensor; received {type(loss).__name__}{_where_it_is(loss)}."
        )
    if loss.numel() != 1:
        raise InvalidInputError(
            f"loss= must return a scalar tensor; received one of shape {tuple(loss.shape)}.",
            remedy="loss.mean(), the mean over the batch's units",
        )
    if loss.is_complex() or loss.layout is not torch.strided:
        kind = "a complex number" if loss.is_complex() else f"a tensor of layout {loss.layout}"
        raise InvalidInputError(
            f"loss= must return a real scalar in a dense tensor; received {kind}.",
            remedy="loss.abs() or loss.real" if loss.is_complex() else "loss.to_dense()",
        )
    return loss


def checked_loss(loss: Any) -> torch.Tensor:
    """Return the loss if it can be differentiated, or say why it cannot."""
    checked = scalar_loss(loss)
    if not checked.requires_grad:
        raise InvalidInputError(
            "loss= returned a tensor that does not require a gradient, so there is nothing to train.",
            remedy="compute it from the model it receives, without no_grad(), detach() or .item()",
        )
    return checked


def _where_it_is(returned: Any) -> str:
    if inspect.isgenerator(returned):
        return "; a loss that is yielded can be asked about in estimate and fit only"
    if isinstance(getattr(returned, "loss", None), torch.Tensor):
        return "; it has a .loss, return that"
    if isinstance(returned, Mapping) and isinstance(returned.get("loss"), torch.Tensor):
        return "; it has a ['loss'], return that"
    if isinstance(returned, list | tuple) and returned and isinstance(returned[0], torch.Tensor):
        return "; if its first entry is the loss, return that"
    if isinstance(returned, float | int):
        return "; return the tensor itself, without float() or .item()"
    return ""


def check_that_something_trains(optimizers: Sequence[Any]) -> None:
    """Refuse a step that did nothing: everything would fit."""
    trained = [
        parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    # Hooks may have used a gradient up as soon as it was there (an optimizer that runs inside backward).
    if any(parameter.grad is not None or parameter._post_accumulate_grad_hooks for parameter in trained):
        return
    raise InvalidInputError(
        "the step trained nothing: after the backward none of the optimizer's parameters has a gradient.",
        remedy="compute the loss with the model that loss= receives",
    )


@contextlib.contextmanager
def needing_larger_micro_batches(split: str) -> Iterator[None]:
    """Say by which split batch normalization got a single value per channel: one sample has no spread."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InvalidInputError) or not is_too_small(error):
            raise
        raise InvalidInputError(
            f"{split} has micro-batches that are too small for batch normalization in training mode.",
            details=[str(error)],
            remedy="micro-batches of 2 samples or more; or GroupNorm, or frozen statistics (module.eval())",
        ) from error


@contextlib.contextmanager
def must_be_called(model: nn.Module) -> Iterator[None]:
    """Refuse inference that never called the model or a part of it: everything would fit."""
    called: list[nn.Module] = []

    def note(module: nn.Module, _: Any) -> None:
        called.append(module)
        remove()

    def remove() -> None:
        while handles:
            handles.pop().remove()

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        yield
    finally:
        remove()
    if not called:
        raise InvalidInputError(
            "the step did nothing with the model: neither it nor a part of it was called.",
            remedy="use the model that loss=, generate= and evaluate= receive",
        )


def handed_out(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's that hands out a model, an optimizer or a scaler, and return what it does."""
    keep = current_keep()
    if keep.knows_builder(function):
        return function(*arguments)
    # Under a trace no number is drawn for real.
    sources = {} if torch._C._len_torch_dispatch_stack() else random_sources(None)
    take_hooks_back = hooks_taken_back(_trained_by(arguments))
    returned = [function(*arguments)]  # in a list, so that no name of this frame counts as a holder
    shared = [thing for thing in as_list(returned[0]) if keep.state.has_met(thing)]
    for thing in shared:
        keep.keep_live(thing)
    # One that refers to itself seems held by somebody else, too.
    if len(shared) == len(as_list(returned[0])) or all(count <= _ALONE for count in _references(returned)):
        return returned[0]
    del shared
    things = as_list(returned.pop())
    # An optimizer that steps in backward hangs on its parameters: thrown away, it must not step beside the next one.
    take_hooks_back()
    alive = survivors(things)
    for thing in alive:
        keep.keep_live(thing)
    if not alive:
        keep.note_builder(function)
    for put_back in sources.values():
        put_back()
    return function(*arguments)


def _trained_by(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The parameters among what a function receives: a module's, or those in a list, with or without names."""
    for argument in arguments:
        if isinstance(argument, nn.Module):
            yield from argument.parameters()
        elif isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _trained_by(argument)


def _references(returned: list[Any]) -> list[int]:
    inside = returned[0] if isinstance(returned[0], list | tuple) else returned
    return [sys.getrefcount(thing) for thing in inside]


_ALONE = _references([object()])[0]


PHASES = ("build", "batch", "forward", "backward", "optimizer", "generate", "evaluate", "done")

# Two steps, not one: Adam makes its moments in the first step, so the second is the first to run beside them.
DEFAULT_STEPS = 2


@dataclass(frozen=True)
class StepSettings:
    """How a step is run, besides its micro-batch: what a question, its probes and its traces have in common."""

    shape: Mapping[str, Any] = field(default_factory=dict)
    """What goes to the workload's `batch` besides the number of samples."""
    accumulation: int = 1
    clip_norm: float | None = None
    routing: str = "balanced"
    """How a trace takes experts to share tokens; a real step knows."""
    devices: int = 1
    """Ranks that a simulated card is one of; a real step runs on one."""
    rank: int | None = None
    """Which of them; None for the one that holds the most."""


PLAIN_STEP = StepSettings()


def run_probe(
    workload: Workload,
    micro_batch: int,
    settings: StepSettings = PLAIN_STEP,
    *,
    device: torch.device,
    steps: int = DEFAULT_STEPS,
    on_phase: Callable[[str], object] = lambda _: None,
    build: Callable[[Workload, torch.device], nn.Module] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Build the model and its optimizer on a device, run full steps at one size, and return the seconds of each.

    `on_phase` is told when a phase, one of `PHASES`, begins; the one before it has then ended. `build` replaces
    `build_model`: the trace makes fake parameters there, ranks wrap the model there. `now` reads the clock between
    steps; on an accelerator it waits for the device first.
    """
    whole_number(micro_batch, "micro-batch")
    on_phase("build")
    model = (build or build_model)(workload, device)
    optimizers = build_optimizers(workload, model)
    seconds = _run_steps(
        workload, model, optimizers, micro_batch, settings, device=device, steps=steps, on_phase=on_phase, now=now
    )
    on_phase("done")
    return seconds


def build_model(workload: Workload, device: torch.device) -> nn.Module:
    """Return the workload's model on the device: a module as it is, or what the function builds.

    `wrap` is not applied: it is for ranks, and whoever starts those applies it in a `build` of their own.
    """
    model = hand_out_model(workload)
    if any(parameter.is_meta for parameter in model.parameters()) and device.type != "meta":
        raise InvalidInputError(
            "the model is on the meta device: it has no weights to run with.",
            remedy="model=a function that builds it on the CPU",
        )
    return model.to(device)


def hand_out_model(workload: Workload) -> nn.Module:
    """Return the workload's model as it is: the module, or what the function hands out."""
    current_keep(workload)
    given = workload.model
    model = given if isinstance(given, nn.Module) else handed_out(given)
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model= must be a module or a function that builds one; received {shortened(model)}.")
    return model


def build_scaler(workload: Workload) -> Any:
    """Return what scales the loss; None where nothing does."""
    current_keep(workload)
    return None if workload.scaler is None else handed_out(workload.scaler)


def build_optimizers(workload: Workload, model: nn.Module) -> tuple[Any, ...]:
    """Return the optimizers over what the model trains; none where the workload is inference only."""
    current_keep(workload)
    if workload.optimizer is None:
        return ()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidInputError(
            "the optimizer has no parameters: none of the model's parameters requires a gradient.",
            remedy="unfreeze what is to be trained, or leave out optimizer= for inference only",
        )
    optimizers = tuple(as_list(handed_out(workload.optimizer, _what_it_takes(workload.optimizer, model)))) or (None,)
    for optimizer in optimizers:
        if not all(hasattr(optimizer, name) for name in ("step", "zero_grad", "param_groups")):
            raise InvalidInputError(
                f"optimizer= must return an optimizer, or a list of them; received {shortened(optimizer)}.",
                remedy="optimizer=lambda params: torch.optim.AdamW(params)",
            )
    held = {id(parameter) for o in optimizers for group in o.param_groups for parameter in group["params"]}
    # Happens when optimizer= closes over another model than the one that model= builds.
    if held.isdisjoint(map(id, trained)):
        raise InvalidInputError(
            f"the optimizer holds none of the {len(trained)} parameters that the model trains.",
            remedy="optimizer=lambda params: torch.optim.AdamW(params), over the params it receives",
        )
    return optimizers


def _what_it_takes(optimizer: Callable[..., Any], model: nn.Module) -> Any:
    """Return what `optimizer=` takes, by the name of its argument: the model, its named parameters, or parameters."""
    try:
        name = next(iter(inspect.signature(optimizer).parameters), "params")
    except (TypeError, ValueError):
        name = "params"  # some builtins have no signature
    # What a wrapper holds is what the user wrote: only that has configure_optimizers(), and names without "module.".
    own = model.module if isinstance(model, DistributedDataParallel) else model
    if name in ("model", "module"):
        return own
    named = [(label, parameter) for label, parameter in own.named_parameters() if parameter.requires_grad]
    return named if name.startswith("named") else [parameter for _, parameter in named]


def _run_steps(
    workload: Workload,
    model: nn.Module,
    optimizers: Sequence[Any],
    micro_batch: int,
    settings: StepSettings,
    *,
    device: torch.device,
    steps: int,
    on_phase: Callable[[str], object],
    now: Callable[[], float],
) -> tuple[float, ...]:
    """Run full steps of a model that is built and placed, and return the seconds of each.

    A training workload generates and evaluates once, after its last step, when weights and optimizer state are
    all there. To an inference-only workload they are the work itself, so each step contains them.
    """
    whole_number(steps, "steps")
    accumulation = whole_number(settings.accumulation, "accumulation")
    pipeline = model if isinstance(model, PipelineRank) else None
    num_samples = micro_batch if pipeline is None else micro_batch * pipeline.num_micro_batches
    what_runs: Any = model if pipeline is None else pipeline.schedule

    def batch() -> Any:
        on_phase("batch")
        return make_batch(workload, num_samples, settings.shape, device)

    def without_gradients(model: nn.Module) -> None:
        for name, work in (("generate", workload.generate), ("evaluate", workload.evaluate)):
            if work is not None:
                inputs = batch()
                on_phase(name)
                with torch.no_grad(), evaluating(model):
                    work(what_runs, inputs)
                del inputs

    seconds = []
    if optimizers:
        assert workload.loss is not None, "a workload with an optimizer has a loss"
        # from_pretrained hands out a model in eval mode. One that trains already is left as it is: a part of it
        # may be in eval mode deliberately (a frozen BatchNorm).
        if not model.training:
            model.train()
        scaler = build_scaler(workload)
        if scaler is not None and pipeline is not None:
            raise InvalidInputError(
                "the loss of a pipeline is computed and differentiated by its schedule, where scaler= cannot scale it.",
                remedy="leave out scaler=, and scale in the schedule's loss_fn",
            )
        gradients = _Gradients(workload.loss, model, optimizers, scaler, accumulation, batch, on_phase)
        for _ in range(steps):
            start = now()
            gradients.compute()
            check_that_something_trains(optimizers)
            on_phase("optimizer")
            _update(model, optimizers, scaler, settings.clip_norm, gradients.compute_again)
            seconds.append(now() - start)
        without_gradients(model)
        return tuple(seconds)

    with must_be_called(model):
        for _ in range(steps):
            start = now()
            for _ in range(accumulation):
                if workload.loss is not None:
                    inputs = batch()
                    on_phase("forward")
                    with torch.no_grad(), evaluating(model):
                        _run_without_gradients(workload.loss, what_runs, inputs)
                    del inputs
                without_gradients(model)
            seconds.append(now() - start)
    return tuple(seconds)


@contextlib.contextmanager
def _loss_of(compute: Callable[..., Any], model: Any, inputs: Any) -> Iterator[torch.Tensor]:
    """Compute a loss that can be differentiated; if `loss=` yields it, what stands after that runs at the end."""
    returned = compute(model, inputs)
    if not inspect.isgenerator(returned):
        yield checked_loss(returned)
        return
    with contextlib.closing(returned):
        yield checked_loss(next(returned, None))
        for _ in returned:
            raise InvalidInputError("loss= yielded twice, and a step has one loss.", remedy="return or yield it once")


def _run_without_gradients(compute: Callable[..., Any], model: Any, inputs: Any) -> None:
    returned = compute(model, inputs)
    if inspect.isgenerator(returned):
        for _ in returned:
            pass


@dataclass
class _Gradients:
    """Computes gradients of one step; an object, as the frame of an inner function keeps what it closes over alive."""

    loss: Callable[[nn.Module, Any], torch.Tensor]
    model: nn.Module
    optimizers: Sequence[Any]
    scaler: Any
    accumulation: int
    batch: Callable[[], Any]
    on_phase: Callable[[str], object]

    def compute(self) -> torch.Tensor:
        """Run forward and backward of each micro-batch, and return the last loss."""
        total: Any = None
        for _ in range(self.accumulation):
            inputs = self.batch()
            self.on_phase("forward")
            if isinstance(self.model, PipelineRank):
                done: Any = self.loss(self.model.schedule, inputs)  # backward runs inside of it
                for _ in done if inspect.isgenerator(done) else ():
                    pass
                total = torch.zeros(())  # the loss is known to the last stage only
                del inputs
                continue
            with _loss_of(self.loss, self.model, inputs) as loss:
                # Divided only where it must be: even a scalar division is an allocation in the trace.
                loss = loss if self.accumulation == 1 else loss / self.accumulation
                self.on_phase("backward")
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = loss.detach()
            del inputs, loss
        assert isinstance(total, torch.Tensor)
        return total

    def compute_again(self) -> torch.Tensor:
        """Compute loss and gradients again, as an optimizer asks that takes a closure."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            total = self.compute()
        self.on_phase("optimizer")
        return total


def needs_closure(optimizer: Any) -> bool:
    """Whether an optimizer's step must be handed a function that computes the loss again, as LBFGS's must."""
    try:
        parameter = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    if parameter is None or parameter.kind is parameter.VAR_POSITIONAL:
        return False
    return parameter.default is parameter.empty


def _step(optimizer: Any, closure: Callable[[], torch.Tensor]) -> None:
    if needs_closure(optimizer):
        optimizer.step(closure)
        return
    try:
        optimizer.step()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        # Sharpness-aware optimizers take one that may be left out by its signature, and then miss it.
        if "closure" not in str(error):
            raise
        optimizer.step(closure)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and each of its modules back into the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _update(
    model: nn.Module,
    optimizers: Sequence[Any],
    scaler: Any,
    clip_norm: float | None,
    closure: Callable[[], torch.Tensor],
) -> None:
    if clip_norm is not None:
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip_norm)
    for optimizer in optimizers:
        if scaler is None:
            _step(optimizer, closure)
        elif needs_closure(optimizer):
            raise InvalidInputError(
                f"{type(optimizer).__name__} computes the loss inside its step, and a GradScaler allows no such step.",
                remedy="leave out scaler=, or hand in another optimizer",
            )
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


class Device(ABC):
    """A place where probes run: it can watch anything run, and so can probe."""

    @property
    def torch_device(self) -> torch.device:
        """Where model and batches are placed."""
        return torch.device("cpu")

    @property
    def name(self) -> str:
        """How the device is asked for."""
        return str(self.torch_device)

    @property
    def kind(self) -> str:
        """What it is: `host` or `accelerator`."""
        return "host" if self.torch_device.type == "cpu" else "accelerator"

    @property
    def total_bytes(self) -> int | None:
        """Memory there is; None where it is not known."""
        return None

    @property
    def free_bytes(self) -> int | None:
        """Memory that can still be taken; None where it is not known."""
        return None

    @abstractmethod
    def watch(
        self,
        run: Callable[[], tuple[float, ...]],
        *,
        micro_batch: int,
        shape: Mapping[str, Any] | None = None,
        accumulation: int = 1,
        held: Iterable[torch.Tensor] = (),
    ) -> Outcome:
        """Run anything and say how it ended; `held` are tensors that exist, for a device that counts tensors."""

    def now(self) -> float:
        """Read the clock between steps."""
        return time.perf_counter()

    def probe(
        self, workload: Workload, micro_batch: int, settings: StepSettings = PLAIN_STEP, *, steps: int = DEFAULT_STEPS
    ) -> Outcome:
        """Run full steps at one size, say how it went, and give back what is the user's."""
        model = workload.model
        with untouched(workload, accelerator=None if self.torch_device.type == "cpu" else self.torch_device):
            return self.watch(
                lambda: run_probe(workload, micro_batch, settings, device=self.torch_device, steps=steps, now=self.now),
                micro_batch=micro_batch,
                shape=settings.shape,
                accumulation=settings.accumulation,
                held=(*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else (),
            )
