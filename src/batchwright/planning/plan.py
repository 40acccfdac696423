"""`plan`: from the batch that is wanted to micro-batch x accumulation x devices.

Promises:
- the micro-batch never exceeds the one that fits;
- the effective batch that is reached, and its difference from the one asked for, are always stated;
- the comparison table shows every sensible split of the same effective batch;
- the answer costs the same for 32 samples and for 10^9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from batchwright.errors import InvalidInputError
from batchwright.planning.split import (
    POLICIES,
    Epoch,
    PlanBatchSampler,
    Policy,
    Split,
    Weight,
    choose_split,
    count_epoch,
    largest_divisor,
    least_accumulation,
)
from batchwright.planning.times import ASSUMED, TimeModel, Times, fit_times
from batchwright.printed_result import PrintedResult
from batchwright.units import counted, one_of, shortened, whole_number

_ROUNDING = {
    "nearest": "comes nearest",
    "at-least": "is the least that reaches it",
    "at-most": "is the most that stays within",
}


def give_reason(requested: int, max_micro_batch: int, split: Split, policy: Policy) -> str:
    """Say how the split follows from what was asked.

    >>> give_reason(1024, 48, Split(1032, 6, 4), "nearest")
    '1,024 samples over 4 devices, at most 48 at a time: 6 micro-batches per step; 43 each comes nearest'
    """
    least = least_accumulation(requested, max_micro_batch=max_micro_batch, devices=split.devices)
    over = f" over {counted(split.devices, 'device')}" if split.devices > 1 else ""
    wanted = f"{counted(requested, 'sample')}{over}, at most {max_micro_batch:,} at a time"
    if split.accumulation < least:
        return f"{wanted}: {least:,} passes would exceed it, so {split.accumulation:,} per step"
    passes = f"{wanted}: {counted(least, 'micro-batch')} per step"
    if split.samples != requested:
        return f"{passes}; {split.largest:,} each {_ROUNDING[policy]}"
    if split.is_even:
        return f"{passes}, {counted(split.largest, 'sample')} each"
    return f"{passes}, of {split.smallest:,} and {split.largest:,} samples, which sum to it exactly"


def give_notes(plan: Plan) -> Iterator[str]:
    """Say what else is worth knowing about a plan."""
    if plan.difference and plan.requested_batch >= plan.devices:
        least = least_accumulation(plan.requested_batch, max_micro_batch=plan.max_micro_batch, devices=plan.devices)
        exact = Split(plan.requested_batch, least, plan.devices)
        sizes = f"{exact.smallest:,} and {exact.largest:,}"
        yield f"policy 'exact' reaches {plan.requested_batch:,} with micro-batches of {sizes}"
    if plan.split.smallest == 0:
        empty = counted(plan.weights[-1].count, "micro-batch")
        yield f"{empty} of 0 samples at weight 0, so that every device runs as many passes"
    if plan.epoch and plan.epoch.updates == 0:
        have = counted(plan.epoch.samples, "sample")
        yield f"no update in an epoch: {have} do not fill one micro-batch on every device"


# Halving reaches single samples from 2,048 in as many rows; a longer table is not read any more.
MOST_ROWS = 12


@dataclass(frozen=True)
class Row:
    """One split, with what it costs next to the first row."""

    micro_batch: int
    smallest_micro_batch: int
    accumulation: int
    effective_batch: int
    forwards_per_epoch: int | None
    updates_per_epoch: int | None
    relative_time: float
    relative_activations: float
    peak_bytes: int | None
    is_extrapolated: bool


def compare_splits(
    effective_batch: int,
    *,
    chosen: Split,
    policy: Policy,
    samples: int | None,
    drop_last: bool,
    times: TimeModel,
    peak_bytes: Callable[[int], int] | None = None,
) -> tuple[Row, ...]:
    """Lay the chosen split and its smaller micro-batches side by side.

    The other rows are what `plan` answers if only a half, a quarter, ... of the micro-batch fits, down to single
    samples. If the plan misses the target or is uneven, the largest split into equal micro-batches that reaches it
    exactly is there too.

    >>> from batchwright.planning.split import Split
    >>> from batchwright.planning.times import ASSUMED
    >>> rows = compare_splits(
    ...     32, chosen=Split(32, 1, 1), policy="nearest", samples=10_000, drop_last=True, times=ASSUMED
    ... )
    >>> [(row.micro_batch, row.accumulation, row.forwards_per_epoch) for row in rows[:4]]
    [(32, 1, 312), (16, 2, 625), (8, 4, 1250), (4, 8, 2500)]
    """
    seconds_per_sample = times.step_seconds(chosen) / chosen.samples
    rows = []
    for split in _smaller_and_smaller(effective_batch, chosen, policy):
        epoch = count_epoch(samples, split, drop_last=drop_last) if samples else None
        rows.append(
            Row(
                micro_batch=split.largest,
                smallest_micro_batch=split.smallest,
                accumulation=split.accumulation,
                effective_batch=split.samples,
                forwards_per_epoch=epoch.forwards if epoch else None,
                updates_per_epoch=epoch.updates if epoch else None,
                relative_time=times.step_seconds(split) / split.samples / seconds_per_sample,
                relative_activations=split.largest / chosen.largest,
                peak_bytes=whole_number(peak_bytes(split.largest), "what estimate returns") if peak_bytes else None,
                is_extrapolated=bool(times.points) and not times.covers(split.largest),
            )
        )
    return tuple(rows)


def _smaller_and_smaller(effective_batch: int, chosen: Split, policy: Policy) -> Iterator[Split]:
    splits = {chosen}
    cap = chosen.largest // 2
    while cap >= 1 and len(splits) < MOST_ROWS:
        splits.add(choose_split(effective_batch, max_micro_batch=cap, devices=chosen.devices, policy=policy))
        cap //= 2
    per_device, remainder = divmod(effective_batch, chosen.devices)
    equal = None if remainder else largest_divisor(per_device, at_most=chosen.largest)
    if equal:
        splits.add(Split(effective_batch, per_device // equal, chosen.devices))
    yield from sorted(splits, key=lambda split: (split != chosen, -split.largest, split.accumulation))


@dataclass(frozen=True, repr=False)
class Plan(PrintedResult):
    """How one optimizer step is split, what an epoch then costs, and why.

    >>> plan(80, micro_batch=4, devices=5)
    Plan(micro_batch=4, accumulation=4, devices=5, effective_batch=80)
    """

    in_repr = ("micro_batch", "accumulation", "devices", "effective_batch")
    drawn_by = "plan_text.draw_plan"

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
        """Forward passes on each device in one epoch; None if the number of samples is not known."""
        return self.epoch.forwards if self.epoch else None

    @property
    def updates_per_epoch(self) -> int | None:
        """Optimizer steps in one epoch; None if the number of samples is not known."""
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
        from batchwright.planning.dialects import find_dialect

        return find_dialect(framework).settings(self)

    def snippet(self, framework: str, *, learning_rate: float | None = None) -> str:
        """Return the plan as text to paste into a framework's script or config, with a learning rate that goes with it.

        >>> print(plan(80, micro_batch=4, devices=5).snippet("torchtitan").splitlines()[0])
        # micro-batch 4 x accumulation 4 x devices 5 = effective batch 80
        """
        from batchwright.planning.dialects import write_snippet

        return write_snippet(self, framework, learning_rate)

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
            "table": [asdict(row) for row in self.table],
            "reason": self.reason,
            "notes": list(self.notes),
        }


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

    The accumulation count is fixed first (fewest steps that fit), then the micro-batch is evened out, so no device runs
    a nearly empty last step.

    - `micro_batch`: the largest that fits.
    - `devices`: data-parallel ranks.
    - `samples`: those of the dataset; they give forwards and updates per epoch. `drop_last` leaves an incomplete
      micro-batch out.
    - `eval_micro_batch`, `workers`: for the settings of a framework.
    - `policy`: how to round a target that does not divide: "nearest", "at-least", "at-most", or "exact" (uneven
      micro-batches).
    - `times`: measured seconds: `{4: 0.11}` for one pass of 4 samples, `{(4, 8): 0.95}` for a whole step of 8 of them.
    - `estimate`: a function from a micro-batch to peak bytes, for a column of the comparison table.
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
    chosen_policy = cast("Policy", one_of("policy", policy, POLICIES))
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
