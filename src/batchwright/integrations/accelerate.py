"""For accelerate: `watch` a loop, `audit_first_window` of one, `prepare_loader` of a `TokenBatchSampler`.

Promises:
- the loop stays as it is: hooks on what `accelerator.prepare` returned see it, and change nothing;
- metrics go to `accelerator.log` and to `tracker`, from the main process; all processes have the same answer.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError
from batchwright.integrations.live_run import FirstWindow, LiveBatch, ShowsLiveBatch
from batchwright.integrations.trackers import Tracker, tracker_for
from batchwright.integrations.transformers.token_batches import prepare_loader
from batchwright.units import shortened, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    import torch

    from batchwright.auditing.audit_result import Audit

__all__ = ["AcceleratorWatch", "Watched", "audit_first_window", "prepare_loader", "watch"]


def watch(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    *,
    micro_batch: int | None = None,
    loader: Any = None,
    tracker: Any = None,
    log_every: int = 10,
    every: int = 1,
    window: float | None = None,
    population: int | None = None,
    say: Callable[[str], None] | None = None,
) -> AcceleratorWatch:
    """Measure the critical batch of an accelerate loop; call it after `accelerator.prepare`, before the loop.

    `model` and `optimizer` are what `prepare` returned, `micro_batch` the samples of one forward on one process. Every
    `log_every` optimizer steps the `batch/*` metrics go to `accelerator.log` and to `tracker`; with 0 never. `loader`
    is the prepared one, where a `TokenBatchSampler` makes its batches: they have no one size, so their padding is told,
    and no critical batch. `every`, `window` and `population` are those of `NoiseScale`. Use it as a context, or call
    `close()`, to take the hooks away.
    """
    live = LiveBatch(tracker=tracker, every=every, window=window, population=population, say=say)
    live.look_at_sampler(loader)
    return AcceleratorWatch(
        accelerator,
        model,
        optimizer,
        live=live,
        micro_batch=None if live.is_by_budget else whole_number(micro_batch, "micro_batch"),
        log_every=whole_number(log_every, "log_every", least=0),
    )


class AcceleratorWatch(ShowsLiveBatch):
    """What `watch` returns: the answer so far, and the way to end it."""

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        *,
        live: LiveBatch,
        micro_batch: int | None,
        log_every: int,
    ) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if not hasattr(accelerator, "gradient_accumulation_steps") or not hasattr(inner, "register_step_post_hook"):
            raise InvalidInputError(
                f"watch takes an Accelerator, and the model and the optimizer that its prepare returned; "
                f"received {shortened(accelerator)} and {shortened(optimizer)}."
            )
        self._accelerator, self._live, self._log_every = accelerator, live, log_every
        self._own = _AcceleratorLog(accelerator)
        self.steps = 0
        """Optimizer steps seen."""
        live.devices = accelerator.num_processes
        live.measure(model, inner, micro_batch=micro_batch, scaler=accelerator.scaler)
        # After NoiseScale's own hook, which looks before the step.
        self._handle = inner.register_step_post_hook(self._stepped)

    @property
    def metrics(self) -> dict[str, float]:
        """The `batch/*` metrics as they stand."""
        self._live.accumulation = self._accelerator.gradient_accumulation_steps
        return super().metrics

    def close(self) -> None:
        """Take every hook away; the answers stay."""
        self._handle.remove()
        self._live.stop()

    def __enter__(self) -> AcceleratorWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        if self._log_every and self.steps % self._log_every == 0 and self._accelerator.is_main_process:
            self._live.tell(self.metrics, self.steps, *([self._own] if self._accelerator.trackers else []))


class _AcceleratorLog(Tracker):
    """The trackers that an accelerator was made with."""

    name = "accelerator.log"

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.target.log(metrics, step=step)

    def _write(self, name: str, text: str) -> None:
        for tracker in self.target.trackers:
            held = getattr(tracker, "tracker", None)
            if held is not None and tracker.name in ("tensorboard", "wandb", "trackio", "mlflow"):
                tracker_for(held).write(name, text)


class Watched:
    """A loop whose first window is looked at; the verdict is in `.audit` from its first optimizer step on."""

    def __init__(self, window: FirstWindow) -> None:
        self._window = window

    @property
    def audit(self) -> Audit | None:
        """The verdict; None before the first optimizer step."""
        return self._window.audit

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches, noting those of the first window."""
        for batch in loader:
            self._window.see(batch)
            yield batch


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
    window = FirstWindow(
        plain,
        lambda batch: loss(model, batch),
        accumulation=accelerator.gradient_accumulation_steps,
        name=f"accelerate with {type(plain).__name__}",
        what=f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, in a real run",
        merge=merge,
    )
    clip = accelerator.clip_grad_norm_

    def take_and_clip(*arguments: Any, **options: Any) -> Any:
        if accelerator.sync_gradients:
            window.take()
        return clip(*arguments, **options)

    accelerator.clip_grad_norm_ = take_and_clip
    inner = getattr(optimizer, "optimizer", optimizer)
    handle = inner.register_step_pre_hook(lambda *_: window.judge())
    try:
        yield Watched(window)
    finally:
        del accelerator.clip_grad_norm_
        handle.remove()
        window.leave()
