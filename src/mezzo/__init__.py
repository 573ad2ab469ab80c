"""mezzo: automatic mixed precision for PyTorch."""

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
from mezzo.advising.advice import Advice
from mezzo.advising.advise import advise
from mezzo.advising.estimate import Estimate, estimate
from mezzo.advising.findings import LintFinding, LintFindings
from mezzo.advising.lint import lint
from mezzo.advising.precision_loss import PrecisionLoss, find_precision_loss
from mezzo.autocasting.autocast import autocast, disable_autocast, enable_autocast
from mezzo.autocasting.custom_ops import register_op
from mezzo.autocasting.regions import clear_weight_cache, weight_cache_info
from mezzo.autocasting.wrappers import propagate_autocast
from mezzo.conversion.convert import convert
from mezzo.conversion.converted import Converted
from mezzo.observing.check_numerics import check_numerics
from mezzo.observing.compare_runs import RunDifference, compare_runs
from mezzo.observing.count_dtypes import count_dtypes
from mezzo.observing.log import read_log
from mezzo.observing.op_stats import op_stats
from mezzo.observing.recorded_values import record_values
from mezzo.observing.run import Run, observe
from mezzo.observing.shadow_errors import ShadowErrors, shadow
from mezzo.observing.trace_overflow import Overflow, trace_overflow
from mezzo.optim.grad_norm import grad_norm
from mezzo.optim.optimizers import LAMB, Lion
from mezzo.parallel.sharded_state import RunState
from mezzo.policy.ops import ops
from mezzo.policy.policy import Policy
from mezzo.policy.types import NORMS
from mezzo.prepare.checkpoint import load_checkpoint, save_checkpoint
from mezzo.prepare.decorate import decorate, undecorate
from mezzo.prepare.ema import EMA
from mezzo.prepare.latest_checkpoint import latest_checkpoint
from mezzo.prepare.master_params import master_params
from mezzo.prepare.plan import Plan, plan
from mezzo.reporting.page import write_report
from mezzo.scaling.scale_state import ScaleRule, ScaleState
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.step_result import StepResult
from mezzo.step.eval_step import EvalStep
from mezzo.step.function_step import train_step
from mezzo.step.memory_format import channels_last
from mezzo.step.metrics import StepMetrics
from mezzo.step.padding import pad_batch
from mezzo.step.train_step import TrainStep

__all__ = [
    "EMA",
    "LAMB",
    "NORMS",
    "Advice",
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
    "MezzoError",
    "NumericsError",
    "Overflow",
    "Plan",
    "Policy",
    "PolicyError",
    "PrecisionLoss",
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
    "TrainStep",
    "UnsupportedError",
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
    "find_precision_loss",
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
    "write_report",
]
