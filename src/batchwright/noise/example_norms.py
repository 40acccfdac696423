"""The squared norms of per-example gradients, in the backward pass of the whole batch.

Promises:
- no per-example gradient of a matrix is kept, and none is formed where it can be done without;
- a pass in which the known layers do not account for the whole gradient is given up with a reason, never guessed;
- the model, its gradients and the random state stay as they are; `stop` leaves no hook behind.

The inputs of the layers are held until their gradients are there. That costs nothing where autograd holds them as
well, but activation checkpointing frees them, so part of what it saves is lost while the norms are taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchwright.noise.example_squares import columns_of, squares_of_uses
from batchwright.noise.example_uses import Form, UnknownModuleError, Use, UseLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["ExampleNorms", "UnknownModuleError"]

# A layer that bypasses its module does so in every pass of the kind; a look at a few, then now and then, finds it.
FIRST_CHECKS, CHECK_EVERY = 3, 16


class ExampleNorms:
    """Takes the squared norm of each sample's share of the gradient, weight by weight.

    >>> from torch import nn
    >>> model, x = nn.Linear(2, 1), torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    >>> norms = ExampleNorms(model, [model.weight])
    >>> norms.start()
    >>> hook = model.weight.register_hook(lambda gradient: print(norms.squares_of(model.weight, gradient)))
    >>> model(x).sum().backward()
    tensor([ 25., 100.], dtype=torch.float64)
    >>> norms.stop()

    The shares of the samples add up to the gradient: with a mean loss over B samples each is a B-th of the gradient
    of that sample's loss. A gradient that is not finite has squares that are not.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._log = UseLog(model, parameters)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._done: set[nn.Parameter] = set()
        self._pass_of_done = 0
        # Its own, so that the random numbers of the training stay as they are.
        self._generator = torch.Generator().manual_seed(0)

    @property
    def num_samples(self) -> int | None:
        """The number of samples of the running pass, None before the first."""
        return self._log.num_samples

    @property
    def failure(self) -> str | None:
        """Why the running pass cannot be used; None as long as it can. Each forward of the model begins anew."""
        return self._log.failure

    def start(self) -> None:
        """Install the hooks; passes from here on are followed."""
        self.stop()
        self._log.install()

    def stop(self) -> None:
        """Remove every hook, and drop what is held."""
        self._log.remove()

    @torch.no_grad()
    def squares_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the squared norm of each sample's share of a gradient that just arrived; None after a failure.

        To be called from a hook of the weight, once in each pass.
        """
        uses, samples = self._log.taken(parameter), self._log.num_samples
        self._expect_one_gradient(parameter)
        if samples is None:
            self._log.fail("how many samples: the model was not called, or nothing in its inputs tells")
        if self._log.failure or samples is None:
            return None
        resolved = self._resolved(parameter, uses, samples)
        if not resolved:
            return None
        is_checked = self._log.num_passes <= FIRST_CHECKS or self._log.num_passes % CHECK_EVERY == 0
        # A backward inside an autocast block would round the norms to 16 bits.
        with torch.autocast(gradient.device.type, enabled=False):
            signs = self._signs_for(gradient) if is_checked else None
            squares, unexplained = squares_of_uses(resolved, gradient, samples=samples, signs=signs)
        if unexplained is not None and float(unexplained) > tolerance(gradient, resolved):
            rest = f"{float(unexplained):.2g} of its gradient is not accounted for by its layers"
            self._log.fail(f"{self._names[parameter]}: {rest}: it is used elsewhere as well")
            return None
        return squares

    def _expect_one_gradient(self, parameter: nn.Parameter) -> None:
        if self._pass_of_done != self._log.num_passes:
            self._done, self._pass_of_done = set(), self._log.num_passes
        if parameter in self._done:
            # Norms of two parts do not add up to that of their sum.
            self._log.fail(f"{self._names[parameter]}: its gradient came in several parts")
        self._done.add(parameter)

    def _resolved(self, parameter: nn.Parameter, uses: list[tuple[Form, Use]], samples: int) -> list[tuple[Form, Use]]:
        if not uses:
            self._log.fail(f"{self._names[parameter]}: a gradient, but its layer was not called: it is used elsewhere")
        resolved = [(form, row_per_sample(use, samples)) for form, use in uses]
        known = [(form, use) for form, use in resolved if use is not None]
        if len(known) < len(uses):
            where = "and where it is added to theirs is not seen"
            self._log.fail(f"{self._names[parameter]}: one output for all samples, {where}")
            return []
        return known

    def _signs_for(self, gradient: torch.Tensor) -> torch.Tensor:
        bits = torch.randint(0, 2, (columns_of(gradient),), generator=self._generator)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return (2 * bits - 1).to(device=gradient.device, dtype=wide)


def row_per_sample(use: Use, samples: int) -> Use | None:
    """Return a use with one row for each sample, or None where a shared output does not tell whose row is whose.

    >>> positions, arrival = torch.arange(3), torch.ones(2, 3, 4)
    >>> shared = Use(torch.nn.Embedding(3, 4), positions, True, torch.ones(3, 4), arrivals=[arrival])
    >>> row_per_sample(shared, 2).input
    tensor([[0, 1, 2],
            [0, 1, 2]])
    """
    if not use.is_shared or use.gradient is None:
        return use
    ids, shape = use.input, use.gradient.shape
    if use.arrivals and all(arrival.numel() == samples * shape.numel() for arrival in use.arrivals):
        rows = [arrival.reshape(samples, -1, shape[-1]) for arrival in use.arrivals]
        total = torch.stack(rows).sum(0) if len(rows) > 1 else rows[0]
        return Use(use.module, ids.reshape(1, -1).expand(samples, -1), gradient=total)
    # As many positions as samples, and no broadcast after all.
    has_rows = ids.shape[0] == samples and {arrival.shape for arrival in use.arrivals} == {shape}
    return Use(use.module, ids, gradient=use.gradient) if has_rows else None


def tolerance(gradient: torch.Tensor, uses: Sequence[tuple[Form, Use]]) -> float:
    """Return what rounding may leave unexplained of a gradient, relative to the length of the samples' shares.

    >>> tolerance(torch.zeros(1), []), tolerance(torch.zeros(1, dtype=torch.bfloat16), [])
    (0.001, 0.05)
    """
    met = {gradient.dtype}
    for form, use in uses:
        met |= {tensor.dtype for tensor in (use.input, use.gradient) if tensor is not None}
        if form is Form.RMS_NORM:
            met.add(torch.float32)  # Those of transformers compute in it, also on float64.
    coarsest = max(torch.finfo(dtype).eps for dtype in met if dtype.is_floating_point)
    if coarsest > torch.finfo(torch.float32).eps:
        return 5e-2
    return 1e-3 if coarsest > torch.finfo(torch.float64).eps else 1e-8
