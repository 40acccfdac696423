"""For Lightning: `BatchwrightCallback`, and `AuditFirstWindow`, which audits the first window of a run and leaves.

Promises of the callback:
- losses, weights and random numbers of the run are bit for bit what they are without it;
- it begins when training does, so that what `BatchSizeFinder` tries before is not seen, and the size it finds is;
- what it finds goes to the Trainer's loggers, from rank 0; what cannot be measured is in `notes`, and the run goes on.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from torch import nn

from batchwright.auditing.overrides import without_dropout
from batchwright.device.batches import clear_num_samples
from batchwright.errors import InvalidInputError
from batchwright.integrations.live_run import FirstWindow, LiveBatch, ShowsLiveBatch, check_flag
from batchwright.integrations.trackers import tracker_for
from batchwright.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchwright.auditing.audit_result import Audit


_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)


class BatchwrightCallback(ShowsLiveBatch, Callback):
    """Measure the critical batch of a Lightning run, and audit the accumulation of its first window.

    `Trainer(callbacks=[BatchwrightCallback()])`. The `batch/*` metrics go to the Trainer's loggers every
    `log_every_n_steps` optimizer steps, and to `tracker`. The first window is audited where that changes nothing: one
    process, no dropout, full precision. `micro_batch` is the number of samples of a batch, by default dimension 0 of
    its first tensor. `every`, `window` and `population` are those of `NoiseScale`.
    """

    def __init__(
        self,
        *,
        tracker: Any = None,
        audit: bool = True,
        micro_batch: int | None = None,
        every: int = 1,
        window: float | None = None,
        population: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._live = LiveBatch(tracker=tracker, every=every, window=window, population=population, say=say)
        self._audits = check_flag(audit, "audit")
        self._given = None if micro_batch is None else whole_number(micro_batch, "micro_batch")
        self._auditor: AuditFirstWindow | None = None
        self._watched: _Watched | None = None
        self._is_new_epoch = False
        self._logged_at = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Be ready for the first batch."""
        live = self._live
        live.forget()
        live.devices = trainer.world_size
        live.look_at_sampler(trainer.train_dataloader)
        self._watched = None
        if self._audits and live.audit is None:
            reason = _why_no_audit(trainer, pl_module)
            if reason:
                live.note(f"the accumulation was not audited: {reason}")
            else:
                self._auditor = AuditFirstWindow(say=lambda _: None)
                self._auditor.on_train_start(trainer, _double(pl_module))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Look again how large batches are: a finder may run between epochs."""
        self._is_new_epoch = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the size of a batch; at the first of an epoch begin to measure, or go on with another size."""
        self._live.accumulation = trainer.accumulate_grad_batches
        if self._auditor is not None:
            self._auditor.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        is_first, self._is_new_epoch = self._is_new_epoch, False
        if is_first:
            size = None if self._live.is_by_budget else self._given or clear_num_samples(batch)
            if self._watched is None or size != self._live.micro_batch:
                self._measure(trainer, size)
        if self._watched is not None:
            # Who names a size knows that the batch itself does not tell it.
            self._watched.see(batch if self._given is None else torch.empty(self._given))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Judge the first window; end a window of the measurement, now that all of its backwards are done."""
        if self._auditor is not None:
            auditor, self._auditor = self._auditor, None
            self._live.judge(lambda: _verdict(auditor, trainer, pl_module, optimizer))
            # The audit's own passes are not to be measured.
            if self._live.micro_batch is not None:
                self._measure(trainer, self._live.micro_batch)
        elif self._watched is not None:
            self._watched.steps.end_window()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log where a step was made that is to be logged."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if trainer.is_global_zero and every and step and step % every == 0 and step != self._logged_at:
            self._logged_at = step
            # Lightning counts from 0 where it logs, so that these stand beside its own.
            self._live.tell(self.metrics, step - 1, *map(tracker_for, trainer.loggers))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave a run that ends otherwise as well."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take every hook away; the answers stay."""
        self._live.stop()
        if self._auditor is not None:
            self._auditor.teardown(trainer, pl_module, stage)
            self._auditor = None

    def _measure(self, trainer: Any, size: int | None) -> None:
        live = self._live
        if len(trainer.optimizers) != 1:
            live.micro_batch = size
            live.note(f"the run has {len(trainer.optimizers)} optimizers: the critical batch is not measured")
            return
        self._watched = _Watched(trainer.strategy.model, trainer.optimizers[0])
        live.measure(
            self._watched,
            self._watched.steps,
            micro_batch=size,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
        )


class _Watched(nn.Module):
    """Stands for the module that trains: it is called with every batch, whatever the module's own step calls."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module = module
        self.steps = _Steps(optimizer)

    def forward(self, batch: Any) -> None:
        """Do nothing: hooks see the batch."""

    def see(self, batch: Any) -> None:
        """Have the hooks see a batch that is about to run."""
        with torch.enable_grad():
            self(batch)


class _Steps:
    """Stands for the optimizer: Lightning's runs the last backward of a window inside its step, too late for hooks."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        # A plain dict cannot be referred to weakly, as a handle does.
        self._hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Call a hook at the end of every window."""
        handle = torch.utils.hooks.RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Keep no hook: a window has ended before the step."""
        return torch.utils.hooks.RemovableHandle(OrderedDict())

    def end_window(self) -> None:
        """Call the hooks."""
        for hook in list(self._hooks.values()):
            hook(self._optimizer, (), {})


def _double(module: Any) -> Any:
    """Return another module of the same weights, whose steps leave no trace in the attributes of the first."""
    double = object.__new__(type(module))
    kept = {name: copy.copy(value) if type(value) in _CONTAINERS else value for name, value in vars(module).items()}
    vars(double).update(kept)
    return double


def _verdict(auditor: AuditFirstWindow, trainer: Any, module: Any, optimizer: Any) -> Audit:
    auditor.on_before_optimizer_step(trainer, module, optimizer)
    assert auditor.audit is not None
    return auditor.audit


def _why_no_audit(trainer: Any, module: Any) -> str:
    """Say why an audit would find nothing, or could change the run; empty where neither is so."""
    if not module.automatic_optimization:
        return "the module steps by itself"
    if trainer.accumulate_grad_batches == 1:
        return "accumulate_grad_batches is 1, so there is nothing to add up"
    if trainer.world_size > 1:
        return f"it compares gradients of one process, and this run has {trainer.world_size} ranks"
    if str(trainer.precision) not in ("32-true", "64-true"):
        return f"precision {trainer.precision}: two runs of one step would differ"
    with without_dropout(module) as places:
        if places:
            return f"dropout is on ({places[0]}); AuditFirstWindow turns it off for that window"
    if any(hasattr(part, "compute") and hasattr(part, "reset") for part in module.modules()):
        return "metrics in the module would count the samples of the first window twice"
    return ""


__all__ = ["AuditFirstWindow", "BatchwrightCallback"]


class AuditFirstWindow(Callback):
    """Compare the gradient of the first optimizer step with that of its samples as one batch.

    The verdict is in `.audit` and said once on stderr. `merge(batches)` makes one batch of several, where tensors with
    samples along dimension 0 are not all there is.
    """

    def __init__(
        self, *, merge: Callable[[list[Any]], Any] | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._merge, self._say = merge, say
        self._window: FirstWindow | None = None

    @property
    def audit(self) -> Audit | None:
        """The verdict; None before the first optimizer step."""
        return None if self._window is None else self._window.audit

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to look."""
        if not pl_module.automatic_optimization:
            raise InvalidInputError(
                "AuditFirstWindow follows Lightning's own accumulation; this module steps by itself.",
                remedy="hand your loop to bw.audit as Workload(window=...)",
            )
        if trainer.world_size > 1:
            raise InvalidInputError(f"AuditFirstWindow works in one process; this run has {trainer.world_size} ranks.")

        def loss(batch: Any) -> Any:
            with _without_logging(pl_module):
                output = pl_module.training_step(batch, 0)
            return output["loss"] if isinstance(output, dict) else output

        self._window = FirstWindow(
            pl_module,
            loss,
            accumulation=trainer.accumulate_grad_batches,
            name=f"Lightning with {type(pl_module).__name__}",
            what=f"accumulate_grad_batches={trainer.accumulate_grad_batches}, in a real run",
            merge=self._merge,
            say=self._say,
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note a micro-batch of the first window."""
        if self._window is not None:
            self._window.see(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Judge at the first step, and look no further."""
        if self._window is not None:
            self._window.judge()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave also where no step came."""
        if self._window is not None:
            self._window.leave()


@contextmanager
def _without_logging(module: Any) -> Iterator[None]:
    """Have `self.log` do nothing: a second run of the step is not one to be logged."""
    for name in ("log", "log_dict"):
        vars(module)[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del vars(module)[name]
