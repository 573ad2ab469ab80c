"""`mxnet.amp`: process-wide mixed precision, dynamic loss scaling, and conversion for inference."""

from mezzo.compat.mxnet.amp._convert import (
    convert_bucketing_module,
    convert_hybrid_block,
    convert_model,
)
from mezzo.compat.mxnet.amp._init import init, init_trainer, scale_loss, uninit, unscale
from mezzo.compat.mxnet.amp._lists import (
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
)

__all__ = [
    "convert_bucketing_module",
    "convert_hybrid_block",
    "convert_model",
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
