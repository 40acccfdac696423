"""The learning rate at the recommended batch, by a few short trainings: the user's own optimizer says what suits it.

Promises:
- it costs at most a fifth of the run, and at most the time for which the noise was trained, judging included; both are
  counted, not clocked; where that is too little to tell anything, nothing is trained, and the answer says so;
- all trainings begin at the same weights, see the same samples and are judged on the same ones;
- the first rate is that of the optimizer's rule; neighbours are tried by factors of the root of 2 until both sides of
  the best are known, or the time is used up, which widens the interval on the side that was not tried;
- a rate at which the loss does not come down is no answer: lower ones are tried, and if none brings it down, none is
  recommended.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchwright.device.device import open_device
from batchwright.noise.branch_training import BranchRequest, SeedBranches, smoothed
from batchwright.planning.time_to_loss import StepSeconds
from batchwright.state.untouched import untouched
from batchwright.tuning.choice import choose, pick_critical, plan_horizon, recommend_rate, seconds_to_horizon
from batchwright.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchwright.tuning.run_file import Measured, Section
    from batchwright.tuning.tune import TuneRequest
    from batchwright.workload import Workload

_SHARE_OF_RUN = 1 / 5
# On the tasks for constants one seed and few long trainings told more than several seeds, or more and shorter ones.
_MOST_TRAININGS, _LEAST_TRAININGS = 4, 3
_LEAST_STEPS = 8
_FACTOR = math.sqrt(2)
# The last ones of twenty are averaged; the first tells whether the loss came down at all.
_LOOKS, _LAST_LOOKS = 20, 5
_EVALUATE_SAMPLES = 256
# A forward alone, over a forward with its backward.
_JUDGING = 1 / 3


@dataclass(frozen=True)
class RateSweep:
    """The rates that were tried at one batch, and the best of them."""

    batch: int
    steps: int
    """Of each training."""
    losses: Mapping[float, float]
    """The held-out loss each rate came down to, by its factor of the workload's own rate."""

    @property
    def best(self) -> float | None:
        """The factor that came down farthest; None if none came down."""
        best = min(self.losses, key=lambda factor: (self.losses[factor], factor))
        return best if math.isfinite(self.losses[best]) else None

    @property
    def open_sides(self) -> tuple[bool, bool]:
        """Whether nothing lower, and nothing higher than the best was tried."""
        return self.best == min(self.losses), self.best == max(self.losses)

    @property
    def too_high(self) -> float | None:
        """The lowest factor at which the loss did not come down."""
        return min((factor for factor, loss in self.losses.items() if math.isinf(loss)), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the section `rate` of a run."""
        rows = [
            {"factor": factor, "loss": loss if math.isfinite(loss) else None}
            for factor, loss in sorted(self.losses.items())
        ]
        lower, higher = self.open_sides
        sides = {"is_lowest_tried": lower, "is_highest_tried": higher, "too_high_from": self.too_high}
        factor = {"learning_rate_factor": self.best}
        return {"schema": 1, "source": "measured", **asdict(self), "losses": rows, **factor, **sides}


def climb(first: float, most: int, loss_at: Callable[[float], float]) -> dict[float, float]:
    """Try a factor, and its neighbours until both sides of the best are known or so many were tried.

    >>> tried = climb(1.0, 4, lambda factor: (math.log2(factor) - 0.9) ** 2)
    >>> sorted(round(factor, 2) for factor in tried)
    [1.0, 1.41, 2.0, 2.83]

    While losses are infinite, factors are halved.

    >>> tried = climb(8.0, 4, lambda factor: factor if factor < 3 else math.inf)
    >>> sorted(round(factor, 2) for factor in tried)
    [2.0, 2.83, 4.0, 8.0]
    """
    losses: dict[int, float] = {}
    for _ in range(most):
        best = min(losses, key=lambda place: (losses[place], place), default=0)
        if losses and math.isinf(losses[best]):
            place: int | None = min(losses) - 2
        else:
            place = next((side for side in (best, best + 1, best - 1) if side not in losses), None)
        if place is None:
            break
        losses[place] = loss_at(first * _FACTOR**place)
    return {first * _FACTOR**place: loss for place, loss in losses.items()}


def sweep_rates(work: Workload, measured: Measured, request: TuneRequest, say: Callable[[str], None]) -> Section:
    """Tune the learning rate at the batch that is recommended, as the stage `rate` of a run."""
    if measured.branches is not None and measured.branches.factors:
        return {"skipped": "branches tuned the learning rate"}
    if measured.race is not None and measured.race.reaches_horizon:
        return {"skipped": "the race tuned the learning rate"}
    if measured.noise is None or measured.times is None:
        return {"skipped": "how long a training may be is told by the noise and the time of a step, and one is missing"}
    horizon, _ = plan_horizon(measured, request)
    used = pick_critical(measured, horizon, request.critical_batch)
    choice = choose(measured, used, devices=request.devices, effective_batch=request.effective_batch)
    if choice.likely is None and request.effective_batch is None:
        return {"skipped": "no batch is recommended, so there is none to tune the learning rate at"}
    batch = choice.plan.effective_batch
    step = StepSeconds(measured.times, request.devices, choice.plan.max_micro_batch)
    allowed = request.steps * step.at(measured.noise.effective_batch)
    whole = seconds_to_horizon(measured, choice, horizon, step)
    if whole is not None:
        allowed = min(allowed, _SHARE_OF_RUN * whole)
    judging = _JUDGING * (1 + _LAST_LOOKS) * _EVALUATE_SAMPLES * step.per_sample

    def steps_of(trainings: int) -> int:
        return int((allowed / trainings - judging) / step.at(batch))

    fitting = (number for number in range(_MOST_TRAININGS, 0, -1) if steps_of(number) >= _LEAST_STEPS)
    trainings = next(fitting, 0)
    if trainings < _LEAST_TRAININGS:
        may_take = f"as long as {counted(int(allowed / step.at(batch)), 'step')} of batch {batch:,}"
        return {"skipped": f"a sweep of rates may take {may_take} here, too few to tell rates apart"}
    guess = recommend_rate(measured, choice, batch)
    return train_at_rates(
        work,
        batch,
        steps=steps_of(trainings),
        trainings=trainings,
        first=1.0 if guess is None else guess.factor,
        largest=measured.micro_batch,
        on=request.on,
        shape=request.shape or None,
        seed=request.seed,
        progress=say,
    ).to_dict()


def train_at_rates(
    workload: Workload,
    batch: int,
    *,
    steps: int,
    trainings: int = _MOST_TRAININGS,
    first: float = 1.0,
    largest: int | None = None,
    on: str | None = None,
    shape: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> RateSweep:
    """Train a batch for some steps at a few learning rates, from the same weights.

    >>> import torch
    >>> from batchwright.workload import Workload
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     batch=lambda n: torch.randn(n, 4),
    ...     loss=lambda model, batch: (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean(),
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    ... )
    >>> train_at_rates(workload, 8, steps=20).best > 1
    True
    """
    device = open_device(on).torch_device
    with untouched(workload, accelerator=None if device.type == "cpu" else device):
        run = SeedBranches(workload, device, shape or {}, seed, _EVALUATE_SAMPLES, 0, largest)

        def loss_at(factor: float) -> float:
            progress(f"batch {batch:,}, learning rate x {factor:.3g}, {counted(steps, 'step')}")
            looked_from = steps - _LAST_LOOKS * max(steps // _LOOKS, 1)
            request = BranchRequest(batch, steps, steps, factor, looked_from=looked_from)
            curve = run.train(request, first_batch=batch)
            loss = smoothed(curve, _LAST_LOOKS)[-1][1] if curve[-1][0] == steps else math.inf
            return loss if loss < curve[0][1] else math.inf

        losses = climb(first, trainings, loss_at)
    return RateSweep(batch, steps, losses)
