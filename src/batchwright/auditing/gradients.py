"""Gradients as values: taken, combined, compared.

Promises:
- a gradient is kept in fp64 on the CPU, whatever it was;
- a weight without a gradient counts as zero, so that a forgotten one shows; so does one that is named in only one of
  two gradients, because a loss froze or unfroze it in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchwright.accumulate.parallelism import unwrap
from batchwright.auditing.audit_result import ModuleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


@dataclass(frozen=True)
class Gradient:
    """The gradient of every weight, by name."""

    by_name: dict[str, torch.Tensor]
    loss: float | None = None
    """The value of the loss that it is the gradient of, where that is known."""

    @staticmethod
    def of(model: nn.Module) -> Gradient:
        """Take the gradients that a model holds now.

        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> Gradient.of(layer).norm
        1.0
        """
        taken = {}
        for name, weight in named_weights(model, frozen=True).items():
            # An optimizer steps what holds a gradient, also where it was frozen since.
            if not weight.requires_grad and weight.grad is None:
                continue
            taken[name] = zeros_of(weight) if weight.grad is None else to_fp64(weight.grad)
        return Gradient(taken)

    @property
    def is_finite(self) -> bool:
        """Whether no value is infinite or undefined."""
        return all(bool(value.isfinite().all()) for value in self.by_name.values())

    @property
    def norm(self) -> float:
        """The norm over all weights."""
        return float(sum(float(value.square().sum()) for value in self.by_name.values()) ** 0.5)

    def times(self, factor: float) -> Gradient:
        """Return so many times this."""
        return Gradient({name: value * factor for name, value in self.by_name.items()})

    def minus(self, other: Gradient) -> Gradient:
        """Return the difference."""
        return combine([self, other], [1.0, -1.0])

    def only(self, names: Iterable[str]) -> Gradient:
        """Return the part that some weights have in it."""
        return Gradient({name: self.by_name[name] for name in names if name in self.by_name})

    def dot(self, other: Gradient) -> float:
        """Return the inner product."""
        shared = [name for name in self.by_name if name in other.by_name]
        return float(sum(float((self.by_name[name] * other.by_name[name]).sum()) for name in shared))

    def error_to(self, reference: Gradient) -> float | None:
        """Return the norm of the difference over that of the reference; None if only the reference is 0."""
        difference, norm = self.minus(reference).norm, reference.norm
        return difference / norm if norm else (0.0 if difference == 0 else None)

    def ratio_to(self, reference: Gradient) -> float | None:
        """Return the ratio of norms."""
        return self.norm / reference.norm if reference.norm else None

    def is_rounded_to(self, dtype: torch.dtype) -> bool:
        """Whether every value is one that a narrower type can hold."""
        values = [value for value in self.by_name.values() if value.numel()]
        return self.norm > 0 and all(bool((value.to(dtype).double() == value).all()) for value in values)


def named_weights(model: nn.Module, *, frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights that are trained, by name; with those that are frozen, if wanted."""
    return {name: weight for name, weight in unwrap(model).named_parameters() if frozen or weight.requires_grad}


def to_fp64(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient as it is compared: dense, real, fp64, on the CPU.

    A complex number counts as two real ones, so that what is wrong with its imaginary part shows.
    """
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    real = torch.view_as_real(dense.detach().resolve_conj()) if dense.is_complex() else dense.detach()
    return real.to("cpu", torch.float64, copy=True)


def zeros_of(weight: torch.Tensor) -> torch.Tensor:
    """Return what a weight without a gradient counts as: zeros, in the form of `to_fp64`."""
    return to_fp64(torch.zeros_like(weight, requires_grad=False))


def comparison_dtype(model: nn.Module) -> str:
    """Return the format to compare a model's gradients in: fp64 where every weight is that wide, else fp32.

    >>> comparison_dtype(torch.nn.Linear(1, 1)), comparison_dtype(torch.nn.Linear(1, 1).double())
    ('fp32', 'fp64')
    """
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return "fp64" if kinds == {torch.float64} else "fp32"


def combine(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    """Return the weighted sum."""
    pairs = list(zip(gradients, weights, strict=True))
    names = dict.fromkeys(name for gradient in gradients for name in gradient.by_name)
    return Gradient(
        {name: sum((g.by_name[name] * w for g, w in pairs if name in g.by_name), torch.zeros(())) for name in names}
    )


def fit_weights(target: Gradient, gradients: Sequence[Gradient]) -> list[float]:
    """Return the weights whose sum comes nearest to the target: what each part really counts for."""
    products = torch.tensor([[a.dot(b) for b in gradients] for a in gradients], dtype=torch.float64)
    wanted = torch.tensor([a.dot(target) for a in gradients], dtype=torch.float64)
    solved: list[float] = torch.linalg.lstsq(products, wanted.unsqueeze(1), driver="gelsd").solution.flatten().tolist()
    return solved


def compare_modules(gradient: Gradient, reference: Gradient) -> tuple[ModuleError, ...]:
    """Compare module by module, the worst first."""
    owned: dict[str, list[str]] = {}
    for name in {**reference.by_name, **gradient.by_name}:
        owned.setdefault(name.rpartition(".")[0] or "(model)", []).append(name)
    errors = []
    for owner, inside in owned.items():
        mine, theirs = gradient.only(inside), reference.only(inside)
        errors.append(ModuleError(owner, mine.ratio_to(theirs), mine.error_to(theirs)))
    return tuple(sorted(errors, key=lambda error: (-(error.relative_error or 0.0), error.name)))
