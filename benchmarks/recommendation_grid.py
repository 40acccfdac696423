"""Steps to a loss at every batch of a grid, with tuned learning rates: what benchmarks/recommendation.py judges by.

Models of all learning rates and seeds of one batch are trained as one (torch.func), so that a grid takes minutes.

Promises:
- a seed has the same weights and the same order of samples at every batch and learning rate;
- the updates are those of torch's own optimizers (checked by `python benchmarks/recommendation_grid.py`);
- a learning rate is the best only if both its neighbours were tried.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from recommendation_tasks import HELD_OUT, loss_of
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from recommendation_tasks import Data, Task

SEEDS = 4
RATES = 6
"""Learning rates that are tried at once, by factors of sqrt(2)."""
SPACING, SMOOTHED = 1.06, 5

Weights = dict[str, Tensor]


# --- optimizers over stacked weights: `rates` has one number per model


def _by_model(rates: Tensor, weight: Tensor) -> Tensor:
    return rates.view(-1, *[1] * (weight.dim() - 1))


def _sgd(weights: Weights, gradients: Weights, state: Any, rates: Tensor, number: int, momentum: float = 0.0) -> None:
    for name, weight in weights.items():
        update = gradients[name]
        if momentum:
            state[name] = update if number == 1 else momentum * state[name] + update
            update = state[name]
        weight.sub_(_by_model(rates, weight) * update)


def _adamw(weights: Weights, gradients: Weights, state: Any, rates: Tensor, number: int) -> None:
    for name, weight in weights.items():
        gradient = gradients[name]
        mean, square = state.setdefault(name, (torch.zeros_like(weight), torch.zeros_like(weight)))
        mean.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        rate = _by_model(rates, weight)
        weight.mul_(1 - 0.01 * rate)
        weight.sub_(rate / (1 - 0.9**number) * mean / ((square / (1 - 0.999**number)).sqrt() + 1e-8))


def is_for_muon(name: str, weight: Tensor) -> bool:
    """Whether a weight is a hidden matrix; embeddings, biases and the last layer go to AdamW."""
    return weight.dim() == 2 and not any(part in name for part in ("characters", "places", "head", "last"))


def _muon(weights: Weights, gradients: Weights, state: Any, rates: Tensor, number: int) -> None:
    hidden = {name: weight for name, weight in weights.items() if is_for_muon(name, weight[0])}
    _adamw({name: w for name, w in weights.items() if name not in hidden}, gradients, state, rates, number)
    for name, weight in hidden.items():
        momentum = state.setdefault(name, torch.zeros_like(weight))
        momentum.lerp_(gradients[name], 0.05)
        update = gradients[name].lerp(momentum, 0.95)
        is_tall = update.shape[-2] > update.shape[-1]
        flat = update.transpose(-1, -2) if is_tall else update
        flat = flat / flat.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        for _ in range(5):
            gram = flat @ flat.transpose(-1, -2)
            flat = 3.4445 * flat + (-4.775 * gram + 2.0315 * gram @ gram) @ flat
        update = flat.transpose(-1, -2) if is_tall else flat
        rate = _by_model(rates, weight)
        weight.mul_(1 - 0.01 * rate)
        weight.sub_(rate * 0.2 * math.sqrt(max(weight.shape[-2:])) * update)


_UPDATES: dict[str, Callable[..., None]] = {
    "sgd": _sgd,
    "momentum": lambda weights, gradients, state, rates, number: _sgd(weights, gradients, state, rates, number, 0.9),
    "adamw": _adamw,
    "muon": _muon,
}


def torch_optimizers(task: Task, model: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a user would write."""
    if task.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=rate)]
    if task.optimizer != "muon":
        return [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if task.optimizer == "momentum" else 0.0)]
    named = dict(model.named_parameters())
    hidden = [weight for name, weight in named.items() if is_for_muon(name, weight)]
    rest = [weight for name, weight in named.items() if not is_for_muon(name, weight)]
    muon = torch.optim.Muon(hidden, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=rate)]


# --- training


def looks() -> Iterator[int]:
    """The steps after which the loss is taken: 6 % apart."""
    place, last = 8.0, 0
    while True:
        if round(place) > last:
            last = round(place)
            yield last
        place *= SPACING


class Stack:
    """The models of some rates and of all seeds of one batch, trained as one."""

    def __init__(self, task: Task, batch: int, rates: Sequence[float], seeds: Sequence[int] = range(SEEDS)) -> None:
        models = []
        for seed in seeds:
            torch.manual_seed(seed)
            models.append(task.model())
        self._base = models[0].to("cpu")
        stacked, _ = stack_module_state(models)
        number = len(rates)
        self.weights = {
            name: weight.detach().repeat(number, *[1] * (weight.dim() - 1)) for name, weight in stacked.items()
        }
        self.rates = torch.tensor(rates).repeat_interleave(len(seeds))
        self.task, self.batch, self.num_rates, self.num_seeds = task, batch, number, len(seeds)
        self._generators = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
        self._state: Any = {}
        self._update = _UPDATES[task.optimizer]

        def loss(weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
            return loss_of(functional_call(self._base, weights, (inputs,)), targets)

        self._gradient = vmap(grad(loss))
        self._losses = vmap(loss, in_dims=(0, None, None))
        self.number = 0

    def step(self, data: Data) -> None:
        """Train all models by one step."""
        places = [torch.randint(data.num_training, (self.batch,), generator=each) for each in self._generators]
        drawn = torch.stack(places).repeat(self.num_rates, 1)
        gradients = self._gradient(self.weights, data.inputs[drawn], data.targets[drawn])
        self.number += 1
        with torch.no_grad():
            self._update(self.weights, gradients, self._state, self.rates, self.number)

    def losses(self, data: Data) -> Tensor:
        """Return the held-out loss of every rate and seed."""
        with torch.no_grad():
            losses = self._losses(self.weights, data.inputs[-HELD_OUT:], data.targets[-HELD_OUT:])
        return losses.view(self.num_rates, self.num_seeds)


def curve_of(
    task: Task, batch: int, rates: Sequence[float], until: Callable[[list[int], Tensor], bool]
) -> tuple[list[int], list[list[list[float]]]]:
    """Train until told to stop, by the loss of each rate, averaged over seeds and five looks.

    Returns the steps of the looks, and the losses there, by rate and seed.
    """
    data, stack = task.data(), Stack(task, batch, rates)
    steps: list[int] = []
    losses: list[Tensor] = []
    for look in looks():
        while stack.number < look:
            stack.step(data)
        steps.append(look)
        losses.append(stack.losses(data))
        if len(losses) >= SMOOTHED and until(steps, torch.stack(losses[-SMOOTHED:]).mean((0, 2))):
            return steps, torch.stack(losses).permute(1, 2, 0).tolist()
    raise AssertionError("there are always further looks")


def steps_to(target: float, steps: Sequence[int], losses: Sequence[float]) -> float | None:
    """Return the step at which the loss, averaged over five looks, crosses the target; None if it does not."""
    before = math.inf
    for place in range(SMOOTHED, len(steps) + 1):
        smoothed = sum(losses[place - SMOOTHED : place]) / SMOOTHED
        if smoothed <= target:
            after, start = math.log(steps[place - 1 - SMOOTHED // 2]), math.log(steps[place - 2 - SMOOTHED // 2])
            share = (before - target) / (before - smoothed) if math.isfinite(before) else 1.0
            return math.exp(start + (after - start) * share)
        before = smoothed
    return None


def mean_of(losses: Sequence[Sequence[float]]) -> list[float]:
    """Return the average of several curves."""
    return [sum(values) / len(losses) for values in zip(*losses, strict=True)]


def smoothed_loss(losses: Sequence[float]) -> float:
    """Return the average of the last looks."""
    return sum(losses[-SMOOTHED:]) / SMOOTHED


def _check() -> None:
    """Compare the stacked updates with torch's own optimizers, step by step."""
    from recommendation_tasks import JUDGED

    for task in JUDGED:
        stack = Stack(task, 16, [task.first_rate], seeds=[3])
        torch.manual_seed(3)
        model = task.model()
        optimizers, data = torch_optimizers(task, model, task.first_rate), task.data()
        generator, begin = torch.Generator().manual_seed(1003), time.process_time()
        for _ in range(20):
            stack.step(data)
            drawn = torch.randint(data.num_training, (16,), generator=generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(loss_of(model(data.inputs[drawn]), data.targets[drawn]))
            for optimizer in optimizers:
                optimizer.step()
        off = max(
            float((weight - stack.weights[name][0]).norm() / weight.norm().clamp(min=1e-3))
            for name, weight in model.state_dict().items()
        )
        print(f"{task.name}: weights differ by {off:.1e} after 20 steps ({time.process_time() - begin:.1f} s)")


if __name__ == "__main__":
    _check()
