"""For accelerate: `watch`, and `audit_first_window`, which audits the first window of a loop and leaves."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.integrations.accelerate_watch import AcceleratorWatch, watch
from batchwright.integrations.first_window import FirstWindow
from batchwright.report.audit_text import summarize_audit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from batchwright.accumulate.audit_result import Audit

__all__ = ["AcceleratorWatch", "Watched", "audit_first_window", "watch"]


class Watched:
    """A loop whose first window is looked at; the verdict is in `.audit` from its first optimizer step on."""

    def __init__(self, window: FirstWindow) -> None:
        self.audit: Audit | None = None
        self._window: FirstWindow | None = window

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches, noting those of the first window."""
        for batch in loader:
            if self._window is not None:
                self._window.see(batch)
            yield batch

    def take(self) -> None:
        """Take the gradient before it is clipped."""
        if self._window is not None:
            self._window.take()

    def judge(self) -> None:
        """Judge at the first step, and look no further."""
        if self._window is not None:
            window, self._window = self._window, None
            self.audit = window.judge()
            print(summarize_audit(self.audit), file=sys.stderr)

    def leave(self) -> None:
        """Leave also where no step came."""
        if self._window is not None:
            self._window.leave()


@contextmanager
def audit_first_window(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    merge: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Watched]:
    """Compare the gradient of the first optimizer step with that of its samples as one batch.

    Around the training loop, with the objects that `accelerator.prepare` returned; the loop runs over
    `watched.batches(loader)`, and `loss(model, batch)` is the loss that it takes. `merge(batches)` makes one batch of
    several, where tensors with samples along dimension 0 are not all there is.
    """
    if accelerator.num_processes > 1:
        raise InvalidInputError(f"audit_first_window works in one process; this run has {accelerator.num_processes}.")
    plain = accelerator.unwrap_model(model)
    watched = Watched(
        FirstWindow(
            plain,
            lambda batch: loss(model, batch),
            accumulation=accelerator.gradient_accumulation_steps,
            name=f"accelerate with {type(plain).__name__}",
            what=f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, in a real run",
            merge=merge,
        )
    )
    clip = accelerator.clip_grad_norm_

    def take_and_clip(*arguments: Any, **options: Any) -> Any:
        if accelerator.sync_gradients:
            watched.take()
        return clip(*arguments, **options)

    accelerator.clip_grad_norm_ = take_and_clip
    inner = getattr(optimizer, "optimizer", optimizer)
    handle = inner.register_step_pre_hook(lambda *_: watched.judge())
    try:
        yield watched
    finally:
        del accelerator.clip_grad_norm_
        handle.remove()
        watched.leave()
