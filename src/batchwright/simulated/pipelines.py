"""Pipeline stages on a simulated card: torch.distributed.pipelining's own schedules, one rank after another.

A rank runs its schedule as it is, and what it receives has no values anyway. Only what stages tell each other before
the first step has to be known: the shapes of what they hand on. So ranks are run in turn, each until it waits for a
message that has not been sent; messages are kept, and it is run again once there are new ones.

Replaces: how schedules send and receive; PipelineStage._send_meta, _recv_meta, and the vote before them; what a stage
does with one micro-batch (to tell forward from backward).

Promises:
- what is sent lives until it is waited for, as with NCCL and gloo;
- every rank of the pipeline is run: which one holds the most is not guessed;
- ranks that wait for each other end in an error that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from batchwright.errors import CannotTraceError
from batchwright.simulated.torch_patches.patches import Patch, refusing

T = TypeVar("T")

_PARTS = "PipelineStage over a part of the model that you name yourself"
_NEAREST = (
    "estimate one stage as a model of its own, whose loss runs as many micro-batches as the stage holds before it "
    "frees one: under 1F1B the number of stages after it, and one"
)


_ALONE = (
    "PipelineStage(..., input_args=..., output_args=...), so that shapes need not be told; or a bw.Workload whose "
    "wrap= returns the schedule: every rank of it is run"
)


class MissingMessageError(Exception):
    """A rank waits for what another one has not sent yet."""

    def __init__(self, sender: int) -> None:
        super().__init__(f"waits for rank {sender}")
        self.sender = sender


@dataclass
class Pipeline:
    """What the ranks of one pipeline have in common: who they are, and what they told each other."""

    ranks: Sequence[int] = ()
    """The ranks of the group that the stages are spread over, if any stage was made."""
    num_stages: int = 0
    spoken: str = ""
    """The schedule, in words."""
    note: Callable[[str], object] | None = None
    """Of a program, which is run as its first rank alone: whom to tell that."""
    _sent: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    _at: dict[tuple[int, int], int] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a run of one rank: what it sends and receives is counted from the start."""
        self._at.clear()

    @property
    def num_sent(self) -> int:
        """How many messages there are."""
        return sum(map(len, self._sent.values()))

    def send(self, sender: int, receiver: int, message: Any) -> None:
        """Keep a message; a rank that is run again sends the same ones again."""
        number = self._next(sender, receiver)
        messages = self._sent.setdefault((sender, receiver), [])
        if number == len(messages):
            messages.append(message)

    def receive(self, sender: int, receiver: int) -> Any:
        """Return the next message, or stop the run."""
        number = self._next(sender, receiver)
        messages = self._sent.get((sender, receiver), [])
        if number >= len(messages):
            if self.note is not None:
                raise CannotTraceError(
                    f"a stage waits for shapes from rank {sender}, and a program runs as rank 0 alone.", remedy=_ALONE
                )
            raise MissingMessageError(sender)
        return messages[number]

    def _next(self, sender: int, receiver: int) -> int:
        number = self._at.get((sender, receiver), 0)
        self._at[sender, receiver] = number + 1
        return number


def run_every_rank(run: Callable[[int, Pipeline], T]) -> tuple[Pipeline, dict[int, T]]:
    """Run rank 0, and if it is one of a pipeline all the others of it; return what each run returned.

    >>> def run(rank, pipeline):
    ...     pipeline.ranks = (0, 1)
    ...     pipeline.send(rank, 1 - rank, "a shape")
    ...     return pipeline.receive(1 - rank, rank)
    >>> run_every_rank(run)[1]
    {1: 'a shape', 0: 'a shape'}
    """
    pipeline = Pipeline()
    results: dict[int, T] = {}
    blocked: dict[int, int] = {}
    order: Sequence[int] = (0,)
    while order:
        before = pipeline.num_sent, len(results), len(pipeline.ranks)
        for rank in order:
            pipeline.begin()
            try:
                results[rank] = run(rank, pipeline)
            except MissingMessageError as error:
                blocked[rank] = error.sender
        if (pipeline.num_sent, len(results), len(pipeline.ranks)) == before:
            waits = ", ".join(f"rank {rank} for rank {blocked[rank]}" for rank in sorted(order))
            raise CannotTraceError(
                f"the ranks of the pipeline wait for each other: {waits}.",
                remedy="every stage, on one rank; stage_index_to_group_rank as the schedule has it",
            )
        # Shapes travel from the first stage to the last, and those of gradients back.
        order = [rank for rank in sorted(pipeline.ranks, reverse=order[0] == 0) if rank not in results]
    return pipeline, results


class _Sent:
    """A tensor on its way: alive until somebody waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def wait(self, *_: Any) -> bool:
        self._tensor = None
        return True

    def is_completed(self) -> bool:
        return True


def running_stages(pipeline: Pipeline | None, enter: Callable[[str], None]) -> Iterator[Patch]:
    """Let stages be made and schedules run; `enter` is told when a stage begins a forward or a backward."""
    schedules: Any = import_module("torch.distributed.pipelining.schedules")
    stages: Any = import_module("torch.distributed.pipelining.stage")
    base, manual = stages._PipelineStageBase, stages.PipelineStage
    # torch.export looks at real tensors from C++, which ends the process over those of a simulated card.
    parting: Any = import_module("torch.distributed.pipelining._IR").Pipe
    by_export = "a model that pipeline() parts by torch.export is not simulated."
    yield Patch(parting, "from_tracing", refusing(by_export, _PARTS))
    if pipeline is None or not hasattr(manual, "_send_meta"):
        where = "here" if pipeline is None else f"with torch {torch.__version__}, but with newer ones"
        yield Patch(base, "__init__", refusing(f"pipeline stages are not simulated {where}.", _NEAREST))
        return
    make, begin_schedule = base.__init__, schedules._PipelineSchedule.__init__

    def note_group(stage: Any, *args: Any, **kwargs: Any) -> None:
        make(stage, *args, **kwargs)
        pipeline.ranks = dist.get_process_group_ranks(stage.group or dist.distributed_c10d._get_default_group())
        pipeline.num_stages = stage.num_stages

    def send(stage: Any, message: Any, to_stage: int) -> None:
        pipeline.send(dist.get_rank(), stage._resolve_peer_global_rank(to_stage), message)

    def receive(stage: Any, from_stage: int) -> Any:
        return pipeline.receive(stage._resolve_peer_global_rank(from_stage), dist.get_rank())

    def note_schedule(schedule: Any, *args: Any, **kwargs: Any) -> None:
        begin_schedule(schedule, *args, **kwargs)
        pipeline.spoken = f"{type(schedule).__name__} with {schedule._n_microbatches} micro-batches"
        if pipeline.note is not None:
            pipeline.note(
                f"pipeline of {pipeline.num_stages} stages on {len(pipeline.ranks)} ranks, {pipeline.spoken}; this is "
                "rank 0, and others may hold more: the last has the head and its logits"
            )

    yield Patch(base, "__init__", note_group)
    yield Patch(schedules._PipelineSchedule, "__init__", note_schedule)
    yield Patch(manual, "_send_meta", send)
    yield Patch(manual, "_recv_meta", receive)
    yield Patch(schedules._PipelineSchedule, "_warmup_p2p", _vote_alone)
    yield Patch(schedules, "_batch_p2p", lambda operations, desc=None: [_Sent(one.tensor) for one in operations])
    for name, phase in (
        ("forward_one_chunk", "forward"),
        ("backward_one_chunk", "backward"),
        ("backward_weight_one_chunk", "backward"),
        ("perform_reduce_grad", "backward"),
    ):
        yield Patch(base, name, _entering(enter, phase, getattr(base, name)))
    for name, phase in (("_prepare_forward_infra", "forward"), ("_prepare_backward_infra", "backward")):
        yield Patch(manual, name, _entering(enter, phase, getattr(manual, name)))


def _entering(enter: Callable[[str], None], phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        enter(phase)
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # A stage puts whatever is raised in it, out-of-memory too, into an error of its own.
            raise error.__cause__ from None

    return run


def stages_of_program(enter: Callable[[str], None], note: Callable[[str], object]) -> Iterator[Patch]:
    """Let the first rank of a pipeline run by itself, if its stages say what they take and give."""
    return running_stages(Pipeline(note=note), enter)


def _vote_alone(_: Any, stages: Sequence[Any], has_backward: bool, __: bool) -> None:
    """Decide whether shapes have to be found out; on real ranks all of them vote, and these stages stand for all."""
    mode: Any = import_module("torch.distributed.pipelining._utils").InferenceMode
    manual: Any = import_module("torch.distributed.pipelining.stage").PipelineStage
    own = [stage for stage in stages if isinstance(stage, manual)]
    is_dynamic = any(mode.needs_dynamic(stage._user_meta, has_backward) for stage in own)
    for stage in own:
        stage._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC
