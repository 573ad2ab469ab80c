"""OneFlow's mixed precision on torch: `nn.Graph`, `amp` and `autocast`.

Every other name is torch's of the same name: `flow.randn`, `flow.optim`, `flow.int64`.

>>> import mezzo.compat.oneflow as flow
>>> flow.ones(2, 1, dtype=flow.int64).shape
torch.Size([2, 1])
"""

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.oneflow import amp, env, nn, optim
from mezzo.compat.oneflow._substitutions import SUBSTITUTIONS
from mezzo.compat.oneflow.amp import autocast

__all__ = ["amp", "autocast", "env", "nn", "optim"]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, fallback=torch)
