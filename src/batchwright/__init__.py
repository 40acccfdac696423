"""Choose the batch size: what it costs, what fits, how to split it, and what to type.

>>> import batchwright as bw
>>> bw.plan(1024, micro_batch=48, devices=4)
Plan(micro_batch=43, accumulation=6, devices=4, effective_batch=1032)

This is the front door: every public name is here, and each loads its part when it is first used, so that
`import batchwright` costs nothing and never imports torch; where torch is not installed, what needs it says so. Only
these names, `batchwright.integrations.*` and the command are public; every other module is private, whatever its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright import integrations as integrations
    from batchwright.accumulate.accumulator import Accumulator
    from batchwright.accumulate.cached_loss import CachedLoss
    from batchwright.accumulate.micro_batches import LossTerm
    from batchwright.auditing.audit_result import Audit
    from batchwright.errors import BatchwrightError, NothingFitsError
    from batchwright.fitting.find_batch_size import find_batch_size
    from batchwright.fitting.fit import fit
    from batchwright.fitting.fit_result import Fit
    from batchwright.integrations.live_run import audit
    from batchwright.memory.estimate import estimate
    from batchwright.memory.estimate_result import Estimate
    from batchwright.memory.formulas import estimate_named
    from batchwright.memory.on_card import record_run
    from batchwright.memory.recommend import Recommendation, recommend
    from batchwright.noise.measure_critical_batch import measure_critical_batch
    from batchwright.noise.noise_scale import NoiseScale
    from batchwright.noise.ramp import BatchRamp
    from batchwright.planning.advice import Advice, advise
    from batchwright.planning.best_batch import best_batch
    from batchwright.planning.config_check import ConfigCheck, check_config
    from batchwright.planning.critical_batch import CriticalBatch
    from batchwright.planning.plan import Plan, plan
    from batchwright.sampler.cost import BatchCost
    from batchwright.sampler.pack import pack
    from batchwright.sampler.token_batch_sampler import TokenBatchSampler
    from batchwright.scripts.script import Script
    from batchwright.tuning.tune import Tuned, tune
    from batchwright.workload import Workload

__version__ = "0.2.0"

__all__ = [
    "Accumulator",
    "Advice",
    "Audit",
    "BatchCost",
    "BatchRamp",
    "BatchwrightError",
    "CachedLoss",
    "ConfigCheck",
    "CriticalBatch",
    "Estimate",
    "Fit",
    "LossTerm",
    "NoiseScale",
    "NothingFitsError",
    "Plan",
    "Recommendation",
    "Script",
    "TokenBatchSampler",
    "Tuned",
    "Workload",
    "advise",
    "audit",
    "best_batch",
    "check_config",
    "estimate",
    "estimate_named",
    "find_batch_size",
    "fit",
    "measure_critical_batch",
    "pack",
    "plan",
    "recommend",
    "record_run",
    "tune",
]

_HOMES = {
    "Accumulator": "accumulate.accumulator",
    "Advice": "planning.advice",
    "Audit": "auditing.audit_result",
    "BatchCost": "sampler.cost",
    "BatchRamp": "noise.ramp",
    "BatchwrightError": "errors",
    "CachedLoss": "accumulate.cached_loss",
    "ConfigCheck": "planning.config_check",
    "CriticalBatch": "planning.critical_batch",
    "Estimate": "memory.estimate_result",
    "Fit": "fitting.fit_result",
    "LossTerm": "accumulate.micro_batches",
    "NoiseScale": "noise.noise_scale",
    "NothingFitsError": "errors",
    "Plan": "planning.plan",
    "Recommendation": "memory.recommend",
    "Script": "scripts.script",
    "TokenBatchSampler": "sampler.token_batch_sampler",
    "Tuned": "tuning.tune",
    "Workload": "workload",
    "advise": "planning.advice",
    "audit": "integrations.live_run",
    "best_batch": "planning.best_batch",
    "check_config": "planning.config_check",
    "estimate": "memory.estimate",
    "estimate_named": "memory.formulas",
    "find_batch_size": "fitting.find_batch_size",
    "fit": "fitting.fit",
    "measure_critical_batch": "noise.measure_critical_batch",
    "pack": "sampler.pack",
    "plan": "planning.plan",
    "recommend": "memory.recommend",
    "record_run": "memory.on_card",
    "tune": "tuning.tune",
}

# What answers without torch and numpy; the calculator of the site is made of these.
_WITHOUT_TORCH = ("advise", "best_batch", "check_config", "estimate_named", "plan", "recommend")


def __getattr__(name: str) -> object:
    import importlib

    if name == "integrations":
        return importlib.import_module("batchwright.integrations")
    if name not in _HOMES:
        raise AttributeError(f"module 'batchwright' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"batchwright.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        from batchwright.errors import MissingExtraError

        raise MissingExtraError(
            f"bw.{name} needs {error.name}, which is not installed.",
            details=[f"without it work {', '.join(f'bw.{other}' for other in _WITHOUT_TORCH)}"],
            remedy=f"pip install {error.name}",
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
