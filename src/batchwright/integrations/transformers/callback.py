"""`BatchwrightCallback` for transformers: the critical batch and an audit of the accumulation, in a real `train()`.

Promises:
- losses, weights and random numbers of the run are bit for bit what they are without it;
- what it finds is in the Trainer's own logs, so that whatever the Trainer reports to has it, from rank 0;
- what cannot be measured or audited is in `notes`, and the run goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from batchwright.auditing.overrides import without_autocast
from batchwright.errors import import_extra
from batchwright.integrations.live_run import LiveBatch, ShowsLiveBatch, check_flag
from batchwright.integrations.trackers import tracker_for
from batchwright.integrations.transformers.trainer import audit_trainer

# From the callback over the handler's two methods to the Trainer's own are four.
_MOST_FRAMES = 6


class BatchwrightCallback(ShowsLiveBatch, TrainerCallback):
    """Measure the critical batch of a Trainer's run, and audit its accumulation once, before the first step.

    `Trainer(..., callbacks=[BatchwrightCallback()])`. The `batch/*` metrics stand beside the loss wherever the Trainer
    logs one; `tracker` gets them under the same names as well. `audit=False` leaves the audit out, which runs the first
    window a few times on a copy of the model. `every`, `window` and `population` are those of `NoiseScale`.
    """

    def __init__(
        self,
        *,
        tracker: Any = None,
        audit: bool = True,
        every: int = 1,
        window: float | None = None,
        population: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._live = LiveBatch(tracker=tracker, every=every, window=window, population=population, say=say)
        self._audits = check_flag(audit, "audit")
        self._trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Audit, then begin to measure."""
        live, trainer = self._live, _trainer_that_calls(self)
        self._trainer = trainer
        if trainer is None:
            live.note("no transformers Trainer calls this callback: nothing is measured")
            return
        live.forget()
        live.accumulation, live.devices = args.gradient_accumulation_steps, args.world_size
        # Hooks of a measurement would see the audit's passes, so it comes first.
        if self._audits and live.audit is None:
            self._audit(trainer)
        self._be_first(trainer.callback_handler.callbacks)
        live.look_at_sampler(given.get("train_dataloader"))
        live.measure(
            trainer.model_wrapped,
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            micro_batch=state.train_batch_size or args.train_batch_size,
            scaler=trainer.accelerator.scaler,
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Put the metrics beside a loss that is logged."""
        if self._trainer is None or logs is None or "loss" not in logs:
            return
        metrics = self.metrics
        logs.update(metrics)
        # The Trainer kept a copy before it called anybody.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)
        if state.is_world_process_zero:
            self._live.tell(metrics, state.global_step)
            for callback in self._trainer.callback_handler.callbacks:
                # The Trainer's own TensorBoard takes numbers only from logs.
                if getattr(callback, "tb_writer", None) is not None:
                    self._live.describe(tracker_for(callback.tb_writer))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take every hook away; the answers stay."""
        self._live.stop()
        self._trainer = None

    def _audit(self, trainer: Any) -> None:
        reason = _why_no_audit(trainer)
        if reason:
            self._live.note(f"the accumulation was not audited: {reason}")
        else:
            # The model is prepared by now: in 16 bits rounding alone would look like an error.
            with without_autocast():
                self._live.judge(lambda: audit_trainer(trainer))

    def _be_first(self, callbacks: list[Any]) -> None:
        """Be called before those that report, so that they find the metrics in the logs."""
        # The handler goes through this very list now: one taken out and put in before the place it is at skips nobody.
        if callbacks[0] is not self:
            callbacks.remove(self)
            callbacks.insert(0, self)


def _trainer_that_calls(callback: Any) -> Any:
    """Return the Trainer whose method called a callback: it hands over its parts, but neither itself nor its wrapping.

    None where nobody of that kind is among the nearest callers.
    """
    trainer = import_extra("transformers", extra="transformers", purpose="BatchwrightCallback").Trainer
    frame: FrameType | None = sys._getframe(1)
    # Not further up: to ask a frame for its variables keeps them alive as long as it lasts, and there are the user's.
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        caller = frame.f_locals.get("self")
        if isinstance(caller, trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None


def _why_no_audit(trainer: Any) -> str:
    """Say why an audit would find nothing, or could change the run; empty where neither is so."""
    if trainer.args.gradient_accumulation_steps == 1:
        return "gradient_accumulation_steps is 1, so there is nothing to add up"
    if trainer.args.world_size > 1:
        return "it compares gradients of one process; run it without torchrun"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "the model is not whole in this process"
    if isinstance(trainer.train_dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__getitem__"):
        return "the data is a stream, and samples read for an audit would be missing in the run"
    return ""
