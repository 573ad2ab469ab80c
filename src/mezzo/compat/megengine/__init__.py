"""MegEngine's mixed precision on torch: `amp`, `GradManager`, optimizers whose calls chain, and losses that take int32 labels.

>>> import torch
>>> import mezzo.compat.megengine as mge
>>> from mezzo.compat.megengine import amp
>>> with amp.autocast():
...     (mge.tensor([[1.0]]) @ mge.tensor([[2.0]])).dtype
torch.float16
"""

from mezzo.compat.megengine import amp, autodiff, functional, optimizer
from mezzo.compat.megengine.tensors import tensor

__all__ = ["amp", "autodiff", "functional", "optimizer", "tensor"]
