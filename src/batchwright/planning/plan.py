"""`plan`: from the batch that is wanted to micro-batch x accumulation x devices.

Promises:
- the micro-batch never exceeds the one that fits;
- the effective batch that is reached, and its difference from the one asked for, are always stated;
- the answer costs the same for 32 samples and for 10^9.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.planning.batch_sampler import PlanBatchSampler
from batchwright.planning.epoch import Epoch, count_epoch
from batchwright.planning.reasons import give_notes, give_reason
from batchwright.planning.split import POLICIES, Policy, Split, Weight, choose_split
from batchwright.planning.table import Row, compare_splits
from batchwright.planning.times import ASSUMED, TimeModel, Times, fit_times
from batchwright.printed_result import PrintedResult
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class Plan(PrintedResult):
    """How one optimizer step is split, what an epoch then costs, and why.

    >>> plan(80, micro_batch=4, devices=5)
    Plan(micro_batch=4, accumulation=4, devices=5, effective_batch=80)
    """

    in_repr = ("micro_batch", "accumulation", "devices", "effective_batch")

    requested_batch: int
    max_micro_batch: int
    policy: Policy
    split: Split
    reason: str
    samples: int | None = None
    drop_last: bool = False
    eval_micro_batch: int | None = None
    workers: int = 0
    epoch: Epoch | None = None
    times: TimeModel = ASSUMED
    table: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def micro_batch(self) -> int:
        """Samples in the largest micro-batch on any device."""
        return self.split.largest

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on one device."""
        return self.split.accumulation

    @property
    def devices(self) -> int:
        """Data-parallel ranks."""
        return self.split.devices

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step over all devices."""
        return self.split.samples

    @property
    def difference(self) -> int:
        """Effective batch reached less the one asked for."""
        return self.effective_batch - self.requested_batch

    @property
    def weights(self) -> tuple[Weight, ...]:
        """What each micro-batch's mean counts for in the mean of the step; over all micro-batches they sum to one."""
        return self.split.weights

    @property
    def forwards_per_epoch(self) -> int | None:
        """Forward passes on each device in one epoch; None where the number of samples is not known."""
        return self.epoch.forwards if self.epoch else None

    @property
    def updates_per_epoch(self) -> int | None:
        """Optimizer steps in one epoch; None where the number of samples is not known."""
        return self.epoch.updates if self.epoch else None

    def batch_sampler(
        self, rank: int = 0, *, samples: int | None = None, seed: int = 0, shuffle: bool = True
    ) -> PlanBatchSampler:
        """Return the `batch_sampler` that runs this plan on one rank, uneven micro-batches and all.

        >>> sampler = plan(10, micro_batch=4, devices=2, policy="exact").batch_sampler(0, samples=20, shuffle=False)
        >>> list(sampler)
        [[0, 1], [2, 3, 4], [10, 11], [12, 13, 14]]
        """
        size = self.samples if samples is None else samples
        if size is None:
            raise InvalidInputError(
                "a batch sampler needs the number of samples in the dataset, and this plan was made without it.",
                remedy="plan.batch_sampler(rank, samples=len(dataset))",
            )
        return PlanBatchSampler(
            self.split,
            whole_number(rank, "rank", least=0),
            whole_number(size, "samples"),
            drop_last=self.drop_last,
            seed=whole_number(seed, "seed", least=0),
            shuffle=shuffle,
        )

    def to(self, framework: str) -> dict[str, Any]:
        """Return the plan as the settings of a framework.

        >>> plan(1024, micro_batch=48, devices=4).to("deepspeed")
        {'train_batch_size': 1032, 'train_micro_batch_size_per_gpu': 43, 'gradient_accumulation_steps': 6}
        """
        from batchwright.planning.dialects.registry import find_dialect

        return find_dialect(framework).settings(self)

    def snippet(self, framework: str, *, learning_rate: float | None = None) -> str:
        """Return the plan as text to paste into a framework's script or config, with a learning rate that goes with it.

        >>> print(plan(80, micro_batch=4, devices=5).snippet("torchtitan").splitlines()[0])
        # micro-batch 4 x accumulation 4 x devices 5 = effective batch 80
        """
        from batchwright.planning.dialects.registry import find_dialect, snippet_with_rate

        if learning_rate is not None:
            return snippet_with_rate(self, framework, learning_rate)
        return find_dialect(framework).snippet(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, the same as `batchwright plan --json` prints."""
        return {
            "schema": 1,
            "source": "formula",
            "requested_batch": self.requested_batch,
            "effective_batch": self.effective_batch,
            "difference": self.difference,
            "policy": self.policy,
            "micro_batch": self.micro_batch,
            "smallest_micro_batch": self.split.smallest,
            "max_micro_batch": self.max_micro_batch,
            "accumulation": self.accumulation,
            "devices": self.devices,
            "weights": [asdict(weight) for weight in self.weights],
            "samples": self.samples,
            "drop_last": self.drop_last,
            "forwards_per_epoch": self.forwards_per_epoch,
            "updates_per_epoch": self.updates_per_epoch,
            "dropped_samples": self.epoch.dropped if self.epoch else None,
            "last_window": asdict(self.epoch.last_window) if self.epoch and self.epoch.last_window else None,
            "eval_micro_batch": self.eval_micro_batch,
            "workers": self.workers,
            "time_model": self.times.to_dict(),
            "table": [row.to_dict() for row in self.table],
            "reason": self.reason,
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        from batchwright.report.plan_text import draw_plan

        return draw_plan(self)

    def _repr_html_(self) -> str:
        from batchwright.report.html import table_to_html
        from batchwright.report.plan_text import plan_columns, plan_remarks, summarize_plan

        return table_to_html(summarize_plan(self), plan_columns(self), plan_remarks(self))


def plan(
    effective_batch: int,
    *,
    micro_batch: int,
    devices: int = 1,
    samples: int | None = None,
    drop_last: bool = False,
    eval_micro_batch: int | None = None,
    workers: int = 0,
    policy: str = "nearest",
    times: Times | None = None,
    estimate: Callable[[int], int] | None = None,
) -> Plan:
    """Split an effective batch into accumulation steps.

    >>> plan(1024, micro_batch=48, devices=4)
    Plan(micro_batch=43, accumulation=6, devices=4, effective_batch=1032)
    >>> plan(1024, micro_batch=48, devices=4, policy="exact").weights
    (Weight(micro_batch=43, count=16, weight=0.0419921875), Weight(micro_batch=42, count=8, weight=0.041015625))

    `micro_batch` is the largest that fits. The accumulation count is fixed first (fewest steps that fit), then
    the micro-batch is evened out, so no device runs a nearly empty last step. `policy` says which way a target
    that does not divide is rounded: "nearest", "at-least", "at-most", or "exact" (uneven micro-batches).

    `samples` in the dataset give forwards and updates per epoch. `times` are measured seconds: `{4: 0.11}` for one pass
    of 4 samples, `{(4, 8): 0.95}` for a whole step of 8 of them. `estimate` maps a micro-batch to peak bytes. Both fill
    a column of the comparison table.
    """
    requested = whole_number(effective_batch, "effective batch")
    cap = whole_number(micro_batch, "micro-batch")
    num_devices = whole_number(devices, "devices")
    num_samples = None if samples is None else whole_number(samples, "samples")
    if not isinstance(drop_last, bool):
        raise InvalidInputError(f"drop_last must be True or False; received {shortened(drop_last)}.")
    if estimate is not None and not callable(estimate):
        raise InvalidInputError(
            f"estimate must be a function from micro-batch to bytes; received {shortened(estimate)}."
        )
    chosen_policy = _policy(policy)
    model = ASSUMED if times is None else fit_times(times)
    split = choose_split(requested, max_micro_batch=cap, devices=num_devices, policy=chosen_policy)
    answer = Plan(
        requested_batch=requested,
        max_micro_batch=cap,
        policy=chosen_policy,
        split=split,
        reason=give_reason(requested, cap, split, chosen_policy),
        samples=num_samples,
        drop_last=drop_last,
        eval_micro_batch=None if eval_micro_batch is None else whole_number(eval_micro_batch, "eval micro-batch"),
        workers=whole_number(workers, "workers", least=0),
        epoch=None if num_samples is None else count_epoch(num_samples, split, drop_last=drop_last),
        times=model,
        table=compare_splits(
            requested,
            chosen=split,
            policy=chosen_policy,
            samples=num_samples,
            drop_last=drop_last,
            times=model,
            peak_bytes=estimate,
        ),
    )
    return replace(answer, notes=tuple(give_notes(answer)))


def _policy(policy: object) -> Policy:
    for known in POLICIES:
        if isinstance(policy, str) and policy.lower() == known:
            return known
    raise InvalidInputError(f"policy must be one of {', '.join(POLICIES)}; received {shortened(policy)}.")
