"""`paddle.nn`: layers, losses, initializers and gradient clipping on torch's modules.

A name that is not here raises with what to use.
"""

from __future__ import annotations

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.nn import functional, initializer
from mezzo.compat.paddle.nn._clip import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
)
from mezzo.compat.paddle.nn._layer import Layer, LayerDict, LayerList, ParameterList, Sequential
from mezzo.compat.paddle.nn._layers import (
    GELU,
    AdaptiveAvgPool2D,
    AvgPool2D,
    BatchNorm,
    BatchNorm1D,
    BatchNorm2D,
    BatchNorm3D,
    Conv2D,
    Dropout,
    Embedding,
    Flatten,
    GroupNorm,
    Hardswish,
    Identity,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool2D,
    ReLU,
    ReLU6,
    Sigmoid,
    Silu,
    Softmax,
    Swish,
    Tanh,
)
from mezzo.compat.paddle.nn._losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    L1Loss,
    MSELoss,
    SmoothL1Loss,
)
from mezzo.compat.paddle.nn.initializer import ParamAttr

__all__ = [
    "GELU",
    "AdaptiveAvgPool2D",
    "AvgPool2D",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm",
    "BatchNorm1D",
    "BatchNorm2D",
    "BatchNorm3D",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "Conv2D",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "Hardswish",
    "Identity",
    "L1Loss",
    "Layer",
    "LayerDict",
    "LayerList",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MSELoss",
    "MaxPool2D",
    "ParamAttr",
    "ParameterList",
    "ReLU",
    "ReLU6",
    "Sequential",
    "Sigmoid",
    "Silu",
    "SmoothL1Loss",
    "Softmax",
    "Swish",
    "Tanh",
    "functional",
    "initializer",
]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.nn)
