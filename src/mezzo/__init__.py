"""mezzo: automatic mixed precision for PyTorch."""

from mezzo._errors import MezzoError, PolicyError, RefusedOpError, ScalerError, UnsupportedError
from mezzo._hardware import Hardware, hardware
from mezzo.eager.autocast import autocast, disable, enable
from mezzo.eager.custom import register_op
from mezzo.eager.region import cache_info, carry, invalidate
from mezzo.policy.listing import ops
from mezzo.policy.policy import Policy
from mezzo.policy.selector import NORMS
from mezzo.scaling.scaler import GradScaler
from mezzo.scaling.state import ScaleRule, ScaleState

__all__ = [
    "NORMS",
    "GradScaler",
    "Hardware",
    "MezzoError",
    "Policy",
    "PolicyError",
    "RefusedOpError",
    "ScaleRule",
    "ScaleState",
    "ScalerError",
    "UnsupportedError",
    "autocast",
    "cache_info",
    "carry",
    "disable",
    "enable",
    "hardware",
    "invalidate",
    "ops",
    "register_op",
]
