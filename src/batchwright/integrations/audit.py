"""`bw.audit`: of a workload, or of a framework's own trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchwright.accumulate.audit import audit_workload
from batchwright.errors import InvalidInputError
from batchwright.units import shortened
from batchwright.workload import Workload

if TYPE_CHECKING:
    from batchwright.accumulate.audit_result import Audit


def audit(subject: Any, **options: Any) -> Audit:
    """Compare the accumulated gradient with that of the big batch.

    `subject` is a workload or a transformers Trainer. For a workload the options are `micro_batch`, `accumulation`,
    `splits`, `dtype` ("fp32" or "fp64"), `dropout` ("off" or "replayed") and `shape`. A Trainer is audited as it is
    configured, and left as it was.

    >>> import torch
    >>> workload = Workload(
    ...     model=lambda: torch.nn.Linear(8, 1),
    ...     batch=lambda n: torch.randn(n, 8),
    ...     loss=lambda model, batch: model(batch).pow(2).mean(),
    ...     optimizer=torch.optim.SGD,
    ... )
    >>> audit(workload, splits="4x2,1x8").exact
    True
    """
    if isinstance(subject, Workload):
        return audit_workload(subject, **options)
    if isinstance(subject, str):
        from batchwright.targets import load_workload

        return audit_workload(load_workload(subject), **options)
    if all(hasattr(subject, name) for name in ("training_step", "get_train_dataloader", "args", "accelerator")):
        if options:
            raise InvalidInputError(
                f"a trainer is audited as it is configured: {', '.join(options)} cannot be chosen.",
                remedy="set them in its TrainingArguments",
            )
        from batchwright.integrations.audit_trainer import audit_trainer

        return audit_trainer(subject)
    raise InvalidInputError(
        f"audit takes a Workload, a target, or a transformers Trainer; received {shortened(subject)}.",
        remedy="for accelerate and Lightning: batchwright.integrations.accelerate.audit_first_window, "
        "batchwright.integrations.lightning.AuditFirstWindow",
    )
