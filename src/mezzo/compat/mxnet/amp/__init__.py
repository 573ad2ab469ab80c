"""`mxnet.amp`: mixed precision of a thread, dynamic loss scaling, and conversion for inference."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet.amp._convert import (
    convert_bucketing_module,
    convert_hybrid_block,
    convert_model,
    convert_symbol,
)
from mezzo.compat.mxnet.amp._init import init, uninit
from mezzo.compat.mxnet.amp._lists import (
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
)
from mezzo.compat.mxnet.amp._scaling import init_trainer, scale_loss, unscale

__all__ = [
    "convert_bucketing_module",
    "convert_hybrid_block",
    "convert_model",
    "convert_symbol",
    "init",
    "init_trainer",
    "list_conditional_fp32_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
    "scale_loss",
    "uninit",
    "unscale",
]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
