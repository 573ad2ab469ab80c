"""MegEngine's mixed precision on mezzo, with its layers, functions, tensors and local hub.

>>> import mezzo.compat.megengine as mge
>>> import mezzo.compat.megengine.functional as F
>>> F.relu(mge.tensor([-1.0, 1.0])).numpy().tolist()
[0.0, 1.0]
"""

from __future__ import annotations

import torch as _torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine import (
    amp,
    autodiff,
    device,
    distributed,
    functional,
    hub,
    module,
    optimizer,
    random,
    serialization,
)
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine._tensor import Parameter, Tensor, tensor
from mezzo.compat.megengine.device import (
    get_default_device,
    get_device_count,
    is_cuda_available,
    set_default_device,
)
from mezzo.compat.megengine.serialization import load, save

__all__ = [
    "Parameter",
    "Tensor",
    "amp",
    "autodiff",
    "device",
    "distributed",
    "functional",
    "get_default_device",
    "get_device_count",
    "hub",
    "is_cuda_available",
    "load",
    "module",
    "optimizer",
    "random",
    "save",
    "serialization",
    "set_default_device",
    "tensor",
]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=_torch)
