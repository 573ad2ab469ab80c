"""`megengine.module`: torch's layers with MegEngine's arguments and initial values.

Layers are created on MegEngine's default device, and each is a `torch.nn.Module`.
"""

from torch import nn as _nn

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine.module import init
from mezzo.compat.megengine.module._base import Module
from mezzo.compat.megengine.module._layers import (
    GELU,
    AdaptiveAvgPool2d,
    AdaptiveMaxPool2d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Concat,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    GroupNorm,
    Identity,
    InstanceNorm,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool2d,
    PixelShuffle,
    PReLU,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    SyncBatchNorm,
)

__all__ = [
    "GELU",
    "AdaptiveAvgPool2d",
    "AdaptiveMaxPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Concat",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "Identity",
    "InstanceNorm",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "Module",
    "PReLU",
    "PixelShuffle",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SyncBatchNorm",
    "init",
]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=_nn)
