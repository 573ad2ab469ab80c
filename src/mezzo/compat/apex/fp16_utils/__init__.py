"""Apex's `fp16_utils`: `FP16_Optimizer`, and what makes a model 16-bit by hand. `amp.initialize(..., opt_level="O2")` does both."""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from mezzo.compat.apex.fp16_utils._network import BN_convert_float, FP16Model, convert_network, network_to_half, to_python_float, tofp16
from mezzo.compat.apex.fp16_utils._optimizer import FP16_Optimizer

__all__ = ["BN_convert_float", "FP16Model", "FP16_Optimizer", "clip_grad_norm", "convert_network", "network_to_half", "to_python_float", "tofp16"]
