"""Apex's `fp16_utils`: `FP16_Optimizer`, and what makes a model 16-bit by hand. `amp.initialize(..., opt_level="O2")` does both."""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from mezzo.compat.apex.fp16_utils._by_hand import master_params_to_model_params, model_grads_to_master_grads, prep_param_lists
from mezzo.compat.apex.fp16_utils._loss_scalers import DynamicLossScaler, LossScaler
from mezzo.compat.apex.fp16_utils._network import BN_convert_float, FP16Model, convert_module, convert_network, network_to_half, to_python_float, tofp16
from mezzo.compat.apex.fp16_utils._optimizer import FP16_Optimizer

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
