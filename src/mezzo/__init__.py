"""mezzo: automatic mixed precision for PyTorch."""

import importlib
import typing

from mezzo._errors import (
    CheckpointError,
    ConversionError,
    MezzoError,
    NumericsError,
    PolicyError,
    RefusedOpError,
    ScalerError,
    UnsupportedError,
)
from mezzo._hardware import Hardware, hardware
from mezzo.autocasting.autocast import autocast, disable_autocast, enable_autocast
from mezzo.autocasting.custom_ops import register_op
from mezzo.autocasting.regions import clear_weight_cache, weight_cache_info
from mezzo.autocasting.wrappers import propagate_autocast
from mezzo.policy.ops import ops
from mezzo.policy.policy import Policy
from mezzo.policy.types import NORMS
from mezzo.scaling.scale_state import ScaleRule, ScaleState
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.step_result import StepResult

if typing.TYPE_CHECKING:
    from mezzo.advising.advice import Advice
    from mezzo.advising.advise import advise
    from mezzo.advising.estimate import Estimate, estimate
    from mezzo.advising.findings import LintFinding, LintFindings
    from mezzo.advising.lint import lint
    from mezzo.conversion.convert import convert
    from mezzo.conversion.converted import Converted
    from mezzo.observing.check_numerics import check_numerics
    from mezzo.observing.compare_runs import RunDifference, compare_runs
    from mezzo.observing.count_dtypes import count_dtypes
    from mezzo.observing.log import read_log
    from mezzo.observing.loggers import Logger
    from mezzo.observing.op_stats import op_stats
    from mezzo.observing.recorded_values import record_values
    from mezzo.observing.run import Run, observe
    from mezzo.observing.shadow_errors import ShadowErrors, shadow
    from mezzo.observing.trace_overflow import Overflow, trace_overflow
    from mezzo.optim.grad_norm import grad_norm
    from mezzo.optim.optimizers import LAMB, Lion
    from mezzo.prepare.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
    from mezzo.prepare.decorate import decorate, undecorate
    from mezzo.prepare.ema import EMA
    from mezzo.prepare.master_params import master_params
    from mezzo.prepare.plan import Plan, plan
    from mezzo.prepare.run_state import RunState
    from mezzo.reporting.loggers import CSVLogger, WandbLogger, write_log
    from mezzo.reporting.page import write_report
    from mezzo.reporting.tensorboard import TensorBoardLogger
    from mezzo.step.eval_step import EvalStep
    from mezzo.step.function_step import train_step
    from mezzo.step.memory_format import channels_last
    from mezzo.step.metrics import StepMetrics
    from mezzo.step.padding import pad_batch
    from mezzo.step.train_step import TrainStep

__version__ = "0.1.0"

_LAZY_IMPORTS = {
    "Advice": "mezzo.advising.advice",
    "advise": "mezzo.advising.advise",
    "Estimate": "mezzo.advising.estimate",
    "estimate": "mezzo.advising.estimate",
    "LintFinding": "mezzo.advising.findings",
    "LintFindings": "mezzo.advising.findings",
    "lint": "mezzo.advising.lint",
    "convert": "mezzo.conversion.convert",
    "Converted": "mezzo.conversion.converted",
    "check_numerics": "mezzo.observing.check_numerics",
    "RunDifference": "mezzo.observing.compare_runs",
    "compare_runs": "mezzo.observing.compare_runs",
    "count_dtypes": "mezzo.observing.count_dtypes",
    "read_log": "mezzo.observing.log",
    "Logger": "mezzo.observing.loggers",
    "op_stats": "mezzo.observing.op_stats",
    "record_values": "mezzo.observing.recorded_values",
    "Run": "mezzo.observing.run",
    "observe": "mezzo.observing.run",
    "ShadowErrors": "mezzo.observing.shadow_errors",
    "shadow": "mezzo.observing.shadow_errors",
    "Overflow": "mezzo.observing.trace_overflow",
    "trace_overflow": "mezzo.observing.trace_overflow",
    "grad_norm": "mezzo.optim.grad_norm",
    "LAMB": "mezzo.optim.optimizers",
    "Lion": "mezzo.optim.optimizers",
    "latest_checkpoint": "mezzo.prepare.checkpoint",
    "load_checkpoint": "mezzo.prepare.checkpoint",
    "save_checkpoint": "mezzo.prepare.checkpoint",
    "decorate": "mezzo.prepare.decorate",
    "undecorate": "mezzo.prepare.decorate",
    "EMA": "mezzo.prepare.ema",
    "master_params": "mezzo.prepare.master_params",
    "Plan": "mezzo.prepare.plan",
    "plan": "mezzo.prepare.plan",
    "RunState": "mezzo.prepare.run_state",
    "CSVLogger": "mezzo.reporting.loggers",
    "WandbLogger": "mezzo.reporting.loggers",
    "write_log": "mezzo.reporting.loggers",
    "write_report": "mezzo.reporting.page",
    "TensorBoardLogger": "mezzo.reporting.tensorboard",
    "EvalStep": "mezzo.step.eval_step",
    "train_step": "mezzo.step.function_step",
    "channels_last": "mezzo.step.memory_format",
    "StepMetrics": "mezzo.step.metrics",
    "pad_batch": "mezzo.step.padding",
    "TrainStep": "mezzo.step.train_step",
}
"""Public names by module. These are imported when they are first used: together they would double
the time of `import mezzo`."""

__all__ = [
    "EMA",
    "LAMB",
    "NORMS",
    "Advice",
    "CSVLogger",
    "CheckpointError",
    "ConversionError",
    "Converted",
    "Estimate",
    "EvalStep",
    "GradScaler",
    "Hardware",
    "LintFinding",
    "LintFindings",
    "Lion",
    "Logger",
    "MezzoError",
    "NumericsError",
    "Overflow",
    "Plan",
    "Policy",
    "PolicyError",
    "RefusedOpError",
    "Run",
    "RunDifference",
    "RunState",
    "ScaleRule",
    "ScaleState",
    "ScalerError",
    "ShadowErrors",
    "StepMetrics",
    "StepResult",
    "TensorBoardLogger",
    "TrainStep",
    "UnsupportedError",
    "WandbLogger",
    "advise",
    "autocast",
    "channels_last",
    "check_numerics",
    "clear_weight_cache",
    "compare_runs",
    "convert",
    "count_dtypes",
    "decorate",
    "disable_autocast",
    "enable_autocast",
    "estimate",
    "grad_norm",
    "hardware",
    "latest_checkpoint",
    "lint",
    "load_checkpoint",
    "master_params",
    "observe",
    "op_stats",
    "ops",
    "pad_batch",
    "plan",
    "propagate_autocast",
    "read_log",
    "record_values",
    "register_op",
    "save_checkpoint",
    "shadow",
    "trace_overflow",
    "train_step",
    "undecorate",
    "weight_cache_info",
    "write_log",
    "write_report",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_IMPORTS})
