"""Optimizers as the sources ran them, where torch's own of today allocate something else.

They hold and make what the originals do; the numbers they compute are not meant to train.
"""

from __future__ import annotations

from typing import Any

import torch


class _OneByOne(torch.optim.Optimizer):
    """Updates one parameter after the other, as most optimizers did before multi-tensor kernels."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.update(parameter, self.state[parameter])

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to zero, in place: what torch did before 2.0 unless asked otherwise."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.detach_()
            parameter.grad.zero_()


class TransformersAdamW(_OneByOne):
    """The AdamW that transformers' Trainer used until 2023: one temporary, as large as the parameter."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=0.1)
        state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        denominator = state["exp_avg_sq"].sqrt().add_(1e-8)
        parameter.addcdiv_(state["exp_avg"], denominator, value=-1e-5)


class EightBitAdamOf2022(_OneByOne):
    """bitsandbytes' block-wise Adam with its blocks of 2,048; tensors below 4,096 elements keep float moments."""

    BLOCK = 2048
    SMALLEST = 4096

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter: a fused kernel, without temporaries."""
        for moment in () if state else ("first", "second"):
            if parameter.numel() < self.SMALLEST:
                state[moment] = torch.zeros_like(parameter, dtype=torch.float32)
                continue
            state[moment] = torch.zeros_like(parameter, dtype=torch.uint8)
            blocks = -(-parameter.numel() // self.BLOCK)
            state[f"{moment}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=0.0)


class AdamOfFewBits(torch.optim.Optimizer):
    """Moments of 8 or 4 bits with a float for each block of them, updated one by one by kernels without temporaries.

    Parameters below 4,096 elements keep moments like themselves. With `scales_by_rank_one` the second moment has a
    float for each row and column instead (lpmm's rank-1 normalization), and a step makes it whole before it is used.
    """

    SMALLEST = 4096

    def __init__(self, params: Any, bits: int, block: int, *, scales_by_rank_one: bool = False) -> None:
        super().__init__(params, {})
        self.bits, self.block, self.scales_by_rank_one = bits, block, scales_by_rank_one

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                self._make(parameter, state)
            if self.scales_by_rank_one and parameter.numel() >= self.SMALLEST:
                whole = torch.empty_like(parameter), torch.empty_like(parameter)
                parameter.addcdiv_(*whole, value=0.0)
                del whole
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=0.0)

    def _make(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        for moment in ("first", "second"):
            if parameter.numel() < self.SMALLEST:
                state[moment] = torch.zeros_like(parameter)
                continue
            num_bytes, blocks = -(-parameter.numel() * self.bits // 8), -(-parameter.numel() // self.block)
            by_rank_one = self.scales_by_rank_one and moment == "second" and parameter.dim() > 1
            state[moment] = torch.zeros(num_bytes, dtype=torch.uint8, device=parameter.device)
            state[f"{moment}_scale"] = torch.zeros(
                sum(parameter.shape) if by_rank_one else blocks, device=parameter.device
            )


class TransformersAdafactor(torch.optim.Optimizer):
    """transformers' Adafactor without momentum: factored second moments, up to three temporaries at a time.

    Its own class reads the root mean square of a parameter as a number, which a traced tensor does not have. The name
    `update` outlives its parameter, as it does there.
    """

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            grad, state = parameter.grad, self.state[parameter]
            factored = grad.dim() >= 2
            if not state:
                if factored:
                    state["row"] = torch.zeros_like(grad[..., 0])
                    state["column"] = torch.zeros_like(grad[..., 0, :])
                else:
                    state["square"] = torch.zeros_like(grad)
            scale = (parameter.norm(2) / parameter.numel() ** 0.5).clamp(min=1e-3)
            update = (grad**2) + 1e-30
            if factored:
                state["row"].mul_(0.99).add_(update.mean(dim=-1), alpha=0.01)
                state["column"].mul_(0.99).add_(update.mean(dim=-2), alpha=0.01)
                row = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                update = torch.mul(row, state["column"].unsqueeze(-2).rsqrt())
                update.mul_(grad)
            else:
                state["square"].mul_(0.99).add_(update, alpha=0.01)
                update = state["square"].rsqrt().mul_(grad)
            update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0))
            update.mul_(scale * 1e-3)
            parameter.add_(-update)


class StateElsewhere(torch.optim.Optimizer):
    """Moments that are not in the card's own memory: offloaded to the host, or paged by the driver."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Overwrite the parameters in place."""
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.add_(parameter.grad, alpha=0.0)


def zeroing_in_place(kind: Any) -> Any:
    """Make an optimizer class that never gives its gradients back: torch's default before 2.0."""

    class Zeroing(kind):  # type: ignore[misc]
        zero_grad = _OneByOne.zero_grad

    return Zeroing


def keeping_gradients_until_backward(kind: Any) -> Any:
    """Make an optimizer class whose gradients live on through the next forward.

    With `forget_gradients`, called when backward begins: `zero_grad()` between forward and backward.
    """

    class Keeping(kind):  # type: ignore[misc]
        def zero_grad(self, set_to_none: bool = True) -> None:
            """Keep them."""

    return Keeping


def forget_gradients(model: torch.nn.Module) -> None:
    """Drop every gradient of a model."""
    for parameter in model.parameters():
        parameter.grad = None


class SteppedInBackward(torch.optim.Optimizer):
    """An optimizer of its own for every parameter, stepped as soon as the gradient is there, which is then dropped."""

    def __init__(self, params: Any, kind: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.optimizers = {parameter: kind([parameter]) for parameter in params}
        for parameter in params:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: torch.Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: all is done."""
