"""For Lightning: `BatchwrightCallback`, and `AuditFirstWindow`, which audits the first window of a run and leaves."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from batchwright.errors import InvalidInputError, import_extra
from batchwright.integrations.first_window import FirstWindow
from batchwright.integrations.lightning_callback import BatchwrightCallback
from batchwright.report.audit_text import summarize_audit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Callback

    from batchwright.accumulate.audit_result import Audit
else:
    Callback = import_extra("lightning.pytorch", extra="lightning", purpose="AuditFirstWindow").Callback

__all__ = ["AuditFirstWindow", "BatchwrightCallback"]


class AuditFirstWindow(Callback):
    """Compare the gradient of the first optimizer step with that of its samples as one batch.

    The verdict is in `.audit` and said once on stderr. `merge(batches)` makes one batch of several, where tensors with
    samples along dimension 0 are not all there is.
    """

    def __init__(
        self, *, merge: Callable[[list[Any]], Any] | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.audit: Audit | None = None
        self._merge = merge
        self._say = say or _to_stderr
        self._window: FirstWindow | None = None

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
                told = pl_module.training_step(batch, 0)
            return told["loss"] if isinstance(told, dict) else told

        self._window = FirstWindow(
            pl_module,
            loss,
            accumulation=trainer.accumulate_grad_batches,
            name=f"Lightning with {type(pl_module).__name__}",
            what=f"accumulate_grad_batches={trainer.accumulate_grad_batches}, in a real run",
            merge=self._merge,
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note a micro-batch of the first window."""
        if self._window is not None:
            self._window.see(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Judge at the first step, and look no further."""
        if self._window is not None:
            window, self._window = self._window, None
            self.audit = window.judge()
            self._say(summarize_audit(self.audit))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave also where no step came."""
        if self._window is not None:
            self._window.leave()
            self._window = None


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


def _to_stderr(text: str) -> None:
    import sys

    print(text, file=sys.stderr)
