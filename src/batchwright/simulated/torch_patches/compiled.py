"""`torch.compile` in a simulated run: Dynamo, AOTAutograd and Inductor do their work, and its result is traced.

Replaces: torch.compile, torch.nn.Module.compile, torch._TorchCompileInductorWrapper.__call__,
torch._dynamo.eval_frame._maybe_set_eval_frame and its set_fullgraph_compiled_frame_count,
torch._dynamo.convert_frame.CatchErrorsWrapper.__call__, torch._dynamo.output_graph.OutputGraph.example_inputs,
torch._dynamo.guards.GuardBuilder.TORCH_FUNCTION_STATE, torch._dynamo.variables.optimizer.OptimizerVariable.call_method.
What else is replaced while something is compiled is listed in
`inductor.py` and `seen_as_cuda.py`.

Promises:
- Dynamo meets torch as it is: what stands in for torch in a run is put aside while it looks, and while what it has
  compiled checks that it still holds;
- nothing that happens while a graph is compiled is counted;
- a function that Dynamo fails at, and a graph that cannot be lowered, runs as it is, and a note says which, and why;
- CUDA graphs are refused: they keep memory pools of their own;
- nothing that was compiled in a run, and nothing that Dynamo learnt of sizes in it, is found after it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

import batchwright
from batchwright.errors import CannotTraceError
from batchwright.simulated.torch_patches.backend import card_device, is_on_card
from batchwright.simulated.torch_patches.inductor import NoteFused, NoteKernel, without_kernels
from batchwright.simulated.torch_patches.patches import Patch, applied, put_aside, undone
from batchwright.simulated.torch_patches.seen_as_cuda import Sight, as_cuda, inductor_on_card, with_devices

_OURS = str(Path(batchwright.__file__).parent)
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class Compiler:
    """What compiles the graphs of one run, on the host or on the card."""

    def __init__(
        self,
        device: torch.device,
        note: Callable[[str], object],
        note_kernel: NoteKernel,
        note_fused: NoteFused,
        capability: tuple[int, int] | None = None,
    ) -> None:
        self._device, self._capability = device, capability
        self._note, self._note_kernel, self._note_fused = note, note_kernel, note_fused
        self._sight = Sight()
        self._is_compiling = self._has_failed = False
        # The code of every function that was compiled, and the one that is.
        self._codes: dict[Any, None] = {}
        self._place = ""
        # What saw the operators of the step when Dynamo began to look.
        self._modes: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have torch compile through this one, within a run."""
        with undone(self._forget), _sizes_forgotten(), applied(self._patches()):
            yield

    def _forget(self) -> None:
        reset_code: Any = import_module("torch._dynamo.eval_frame").reset_code
        while self._codes:
            reset_code(self._codes.popitem()[0])

    def _patches(self) -> Iterator[Patch]:
        yield from _refusing_graphs()
        # No bound method: what stands in a class is handed the instance.
        yield Patch(torch._TorchCompileInductorWrapper, "__call__", lambda *args, **named: self._lower(*args, **named))
        frames: Any = import_module("torch._dynamo.convert_frame")
        internal_error = import_module("torch._dynamo.exc").InternalTorchDynamoError
        strategy = import_module("torch._dynamo.types").FrameExecStrategy
        compile_frame = frames.CatchErrorsWrapper.__call__

        def compile_without_ours(callback: Any, frame: Any, *state: Any) -> Any:
            if frame.f_code.co_filename.startswith(_OURS):
                return frames.ConvertFrameReturn()  # skipped: it stands in for torch's own
            self._codes[frame.f_code] = None
            self._place = _place_of(frame)
            self._modes = _get_current_dispatch_mode_stack()
            try:
                with self._compiling(), _without_function_modes():
                    returned = compile_frame(callback, frame, *state)
            except (internal_error, AssertionError) as error:
                # Not the user's, whose errors have classes of their own, or are met again where this runs as it is.
                self._note_eager(self._place, error)
                self._has_failed = True
                return frames.ConvertFrameReturn(strategy(frames.FrameAction.SKIP, frames.FrameAction.SKIP))
            if returned.frame_exec_strategy.cur_action == frames.FrameAction.RUN_ONLY:
                self._note(
                    f"{self._place}: torch gave up compiling it after {torch._dynamo.config.recompile_limit} times, as "
                    "something it depends on changes from call to call; from then on it was eager, as in a real run"
                )
            return returned

        yield Patch(frames.CatchErrorsWrapper, "__call__", compile_without_ours)
        graphs: Any = import_module("torch._dynamo.output_graph").OutputGraph
        examples = graphs.example_inputs
        yield Patch(graphs, "example_inputs", lambda graph: list(map(_as_traced, examples(graph))))
        yield self._calls_put_aside()
        yield self._states_of_optimizers()
        yield from self._graphs_counted()
        # The modes of this run are its own, and hold as long as it does.
        guards: Any = import_module("torch._dynamo.guards").GuardBuilder
        yield Patch(guards, "TORCH_FUNCTION_STATE", lambda *_: None)

    def _graphs_counted(self) -> Iterator[Patch]:
        """A function that is to be one graph, and that Dynamo has failed at, is not refused for having none."""
        frames: Any = import_module("torch._dynamo.eval_frame")
        set_count: Any = getattr(frames, "set_fullgraph_compiled_frame_count", None)
        if set_count is None:
            return  # torch 2.10 does not count them

        def count(number: int) -> int:
            before: int = set_count(number)
            return 1 if number < 0 and not before and self._has_failed else before

        yield Patch(frames, "set_fullgraph_compiled_frame_count", count)

    def _states_of_optimizers(self) -> Patch:
        """Dynamo has an optimizer make its state for real, so that belongs to the step."""
        variable: Any = import_module("torch._dynamo.variables.optimizer").OptimizerVariable
        call_method = variable.call_method

        def call(known: Any, transaction: Any, name: str, *given: Any) -> Any:
            make: Any = getattr(known.value, name, None) if name == "_init_group" else None
            if make is None:
                return call_method(known, transaction, name, *given)

            def make_in_the_step(*args: Any, **kwargs: Any) -> Any:
                with _pushed(self._modes), self._sight.switched(False):
                    return make(*args, **kwargs)

            known.value._init_group = make_in_the_step
            try:
                return call_method(known, transaction, name, *given)
            finally:
                del known.value._init_group

        return Patch(variable, "call_method", call)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        was_compiling, self._is_compiling = self._is_compiling, True
        put_again = put_aside(nn.Module, "_call_impl")
        try:
            with ExitStack() as stack:
                stack.enter_context(_quiet())
                if self._capability is not None and not was_compiling:
                    stack.enter_context(applied(self._sight.patches()))
                stack.enter_context(self._sight.switched(self._capability is not None))
                yield
        finally:
            put_again()
            self._is_compiling = was_compiling

    def _lower(self, backend: Any, graph: Any, inputs: Any, *, config_patches: dict[str, Any] | None = None) -> Any:
        """Do what the backend "inductor" does, with our last step; or have the graph run as it is."""
        if self._capability is not None and not _is_of_card(graph, inputs):
            return graph.forward  # of the host, which computes for real
        compile_fx: Any = import_module("torch._inductor.compile_fx")
        place = self._place

        def lower_operators(lowered: Any, examples: Any, **options: Any) -> Any:
            # The graph of a backward is compiled when it runs first, in the midst of the step.
            with self._compiling(), self._inductor():
                as_it_was = copy.deepcopy(lowered)
                try:
                    return compile_fx.compile_fx_inner(with_devices(lowered, as_cuda), examples, **options)
                except Exception as error:
                    if not options.get("is_backward"):
                        raise
                    self._note_eager(f"the backward of {place}", error)
                    return _boxed(as_it_was)

        settings = {**backend.config, **(config_patches or {})}
        with self._compiling(), self._inductor(), self._sight.switched(False):
            as_it_is = copy.deepcopy(graph)
            try:
                compiled = compile_fx.compile_fx(
                    with_devices(graph, card_device), inputs, lower_operators, config_patches=settings
                )
            except import_module("torch._dynamo.exc").RestartAnalysis:
                raise
            except Exception as error:
                self._note_eager(place, error)
                return as_it_is.forward

        def run(*given: Any) -> Any:
            # As a backward is run: so what a checkpoint compares says the same of its device there and here.
            with torch._C.DisableTorchFunction():
                return compiled(*given)

        return run

    def _note_eager(self, place: str, error: BaseException) -> None:
        while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
            error = inner
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        self._note(
            f"{place}: a compiled graph could not be lowered ({type(error).__name__}: {reason[:160]}); it was traced "
            "as eager, and a compiled run may need less"
        )

    @contextmanager
    def _inductor(self) -> Iterator[None]:
        with without_kernels(self._device, self._note_kernel, self._note_fused, self._capability), ExitStack() as stack:
            if self._capability is not None:
                stack.enter_context(applied(inductor_on_card(self._capability)))
            yield

    def _calls_put_aside(self) -> Patch:
        """Put aside what sees modules begin, from when Dynamo watches frames until it does no more."""
        frames: Any = import_module("torch._dynamo.eval_frame")
        watch = frames._maybe_set_eval_frame
        put_again: list[Callable[[], None]] = []

        def watch_or_not(callback: Any) -> Any:
            if self._is_compiling:
                return watch(callback)
            if callable(callback) and not put_again:
                put_again.append(put_aside(nn.Module, "_call_impl"))
            before = watch(callback)
            if not callable(callback) and put_again:
                put_again.pop()()
            return before

        return Patch(frames, "_maybe_set_eval_frame", watch_or_not)


def _place_of(frame: Any) -> str:
    """Where the function begins that is compiled; of a module its forward."""
    module = frame.f_locals.get("self")
    is_call = isinstance(module, nn.Module) and frame.f_code.co_name in ("_wrapped_call_impl", "_call_impl")
    code = getattr(type(module).forward, "__code__", frame.f_code) if is_call else frame.f_code
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _is_of_card(graph: Any, inputs: Any) -> bool:
    devices = [value for node in graph.graph.nodes for value in node.kwargs.values()]
    return any(isinstance(tensor, torch.Tensor) and is_on_card(tensor) for tensor in inputs) or any(
        isinstance(device, torch.device) and device.type == "cuda" for device in devices
    )


def _as_traced(value: Any) -> Any:
    """An input as AOTAutograd makes it of a real tensor; that of torch 2.10 takes no fake one of another mode."""
    tracing: Any = torch._guards.TracingContext.try_get()
    mode = tracing and tracing.fake_mode
    if mode is None or not isinstance(value, FakeTensor) or value.fake_mode is mode:
        return value
    sizes = tracing.tensor_to_context.get(value)
    return mode.from_tensor(value, symbolic_context=sizes, source=sizes and sizes.tensor_source, trace=sizes is None)


def _boxed(graph: Any) -> Callable[[list[Any]], Any]:
    """Have a graph be called as AOTAutograd calls what was compiled: its inputs are handed over, not lent."""

    def run(inputs: list[Any]) -> Any:
        return torch.fx.Interpreter(graph).boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what torch says when it compiles: that TF32 is off, that a part of its own is outdated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        yield


@contextmanager
def _pushed(modes: list[Any]) -> Iterator[None]:
    """Have operators seen by these modes again."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            _pop_mode(getattr(mode, "_mode_key", None))


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Keep the modes that lead `cuda` to the card out of what Dynamo traces."""
    modes = _get_current_function_mode_stack()
    for _ in modes:
        torch._C._pop_torch_function_stack()
    try:
        yield
    finally:
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def _sizes_forgotten() -> Iterator[None]:
    """What Dynamo knows of sizes that a function was called with: another size of it makes a graph for any size."""
    profile: Any = import_module("torch._dynamo.pgo")
    names = [name for name in ("_CODE_STATE", "_INIT_CODE_STATE") if hasattr(profile, name)]
    before = {name: vars(profile)[name] for name in names}

    def put_back() -> None:
        vars(profile).update(before)

    with undone(put_back):
        vars(profile).update(dict.fromkeys(names))
        yield


def _refusing_graphs() -> Iterator[Patch]:
    compile_, compile_module = torch.compile, nn.Module.compile

    def compile_without_graphs(model: Any = None, **options: Any) -> Any:
        refuse_graphs(options)
        with _quiet():
            return compile_(model, **options)

    def compile_module_without_graphs(module: nn.Module, *args: Any, **options: Any) -> None:
        refuse_graphs(options)
        with _quiet():
            compile_module(module, *args, **options)

    yield Patch(torch, "compile", compile_without_graphs)
    yield Patch(nn.Module, "compile", compile_module_without_graphs)


def refuse_graphs(options: dict[str, Any]) -> None:
    """Refuse a model that is compiled with CUDA graphs: they keep pools of their own."""
    if options.get("mode") in _WITH_GRAPHS or (options.get("options") or {}).get("triton.cudagraphs"):
        raise CannotTraceError(
            "the model is compiled with CUDA graphs, whose memory pools of their own are not simulated.",
            remedy='torch.compile(model) without mode="reduce-overhead" or "max-autotune"',
        )
