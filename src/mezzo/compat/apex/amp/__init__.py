"""`apex.amp`: `initialize`, `scale_loss`, their state, and the functions of O1."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.apex._substitutions import SUBSTITUTIONS
from mezzo.compat.apex.amp._amp_state import _amp_state, master_params
from mezzo.compat.apex.amp._casts import (
    disable_casts,
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from mezzo.compat.apex.amp._initialize import initialize, load_state_dict, state_dict
from mezzo.compat.apex.amp._scale_loss import scale_loss

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
