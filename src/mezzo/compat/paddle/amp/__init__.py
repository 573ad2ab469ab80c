"""`paddle.amp`: autocast regions, 16-bit parameters and loss scaling."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.amp import debugging
from mezzo.compat.paddle.amp._auto_cast import (
    amp_guard,
    auto_cast,
    autocast,
    get_autocast_dtype,
    is_autocast_enabled,
)
from mezzo.compat.paddle.amp._decorate import decorate
from mezzo.compat.paddle.amp._grad_scaler import AmpScaler, GradScaler
from mezzo.compat.paddle.amp._support import is_bfloat16_supported, is_float16_supported

amp_decorate = decorate
"""The older name of `decorate`."""

__all__ = [
    "AmpScaler",
    "GradScaler",
    "amp_decorate",
    "amp_guard",
    "auto_cast",
    "autocast",
    "debugging",
    "decorate",
    "get_autocast_dtype",
    "is_autocast_enabled",
    "is_bfloat16_supported",
    "is_float16_supported",
]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
