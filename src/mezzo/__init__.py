"""mezzo: automatic mixed precision for PyTorch."""

from mezzo._errors import CheckpointError, ConversionError, MezzoError, PolicyError, RefusedOpError, ScalerError, UnsupportedError
from mezzo._hardware import Hardware, hardware
from mezzo.autocasting.autocast import autocast, disable, enable
from mezzo.autocasting.custom_ops import register_op
from mezzo.autocasting.regions import cache_info, invalidate
from mezzo.autocasting.wrappers import carry
from mezzo.graph.convert import convert
from mezzo.graph.converted import Converted
from mezzo.optim.bound import grad_norm
from mezzo.optim.lamb import LAMB
from mezzo.optim.lion import Lion
from mezzo.policy.ops import ops
from mezzo.policy.policy import Policy
from mezzo.policy.types import NORMS
from mezzo.prepare.checkpoint import load_checkpoint, save_checkpoint
from mezzo.prepare.decorate import decorate, undecorate
from mezzo.prepare.ema import EMA
from mezzo.prepare.master_params import master_params
from mezzo.prepare.plan import Plan, plan
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.state import ScaleRule, ScaleState
from mezzo.step.evaluate import EvalStep
from mezzo.step.free import train_step
from mezzo.step.layout import channels_last
from mezzo.step.train import TrainStep

__all__ = [
    "EMA",
    "LAMB",
    "NORMS",
    "CheckpointError",
    "ConversionError",
    "Converted",
    "EvalStep",
    "GradScaler",
    "Hardware",
    "Lion",
    "MezzoError",
    "Plan",
    "Policy",
    "PolicyError",
    "RefusedOpError",
    "ScaleRule",
    "ScaleState",
    "ScalerError",
    "TrainStep",
    "UnsupportedError",
    "autocast",
    "cache_info",
    "carry",
    "channels_last",
    "convert",
    "decorate",
    "disable",
    "enable",
    "grad_norm",
    "hardware",
    "invalidate",
    "load_checkpoint",
    "master_params",
    "ops",
    "plan",
    "register_op",
    "save_checkpoint",
    "train_step",
    "undecorate",
]
