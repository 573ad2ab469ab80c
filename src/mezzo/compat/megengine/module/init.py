"""`megengine.module.init`: initialize tensors in place."""

from __future__ import annotations

import torch
from torch.nn import init as _init

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS

__all__ = [
    "calculate_correct_fan",
    "calculate_fan_in_and_fan_out",
    "calculate_gain",
    "fill_",
    "msra_normal_",
    "msra_uniform_",
    "normal_",
    "ones_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]

fill_, zeros_, ones_ = _init.constant_, _init.zeros_, _init.ones_
uniform_, normal_ = _init.uniform_, _init.normal_
xavier_uniform_, xavier_normal_ = _init.xavier_uniform_, _init.xavier_normal_
msra_uniform_, msra_normal_ = _init.kaiming_uniform_, _init.kaiming_normal_
calculate_gain = _init.calculate_gain


def calculate_fan_in_and_fan_out(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the numbers of inputs and outputs of one element of a weight.

    >>> calculate_fan_in_and_fan_out(torch.empty(8, 3, 5, 5))
    (75.0, 200.0)
    """
    if tensor.dim() == 1:
        return float(tensor.shape[0]), float(tensor.shape[0])
    window = tensor[0, 0].numel()
    return float(tensor.shape[1] * window), float(tensor.shape[0] * window)


def calculate_correct_fan(tensor: torch.Tensor, mode: str) -> float:
    """Return the fan of a mode, "fan_in" or "fan_out"."""
    fans = dict(zip(("fan_in", "fan_out"), calculate_fan_in_and_fan_out(tensor), strict=True))
    if mode.lower() not in fans:
        raise ValueError(f"Mode {mode} not supported, please use one of {list(fans)}")
    return fans[mode.lower()]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=_init)
