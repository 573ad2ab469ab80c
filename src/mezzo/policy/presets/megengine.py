"""Op lists of MegEngine (01040cf): the dtype rules that ``megengine.amp.autocast`` applies.

Where its rules do not fit a table of ops:

- MegEngine casts the parameters of batch norm to float32. They are not cast here, which is the
  same unless the model was cast.
- Softmax, pooling, resizing, losses and others have no rule: they run in the dtype of their inputs.
- Assigning into a tensor casts the value to the tensor's dtype, as torch's indexing does.
"""

from __future__ import annotations

from functools import cache

import torch

from mezzo.policy.presets._tables import (
    merge_disjoint,
    name_map,
    require_level,
    translate,
    with_promotions,
)
from mezzo.policy.types import Entry, Level, OpLists, Rule

LEVELS = (Level.O1,)
"""MegEngine has no levels: it keeps float32 parameters, as O1 does."""

# MegEngine writes elementwise modes in capitals and other ops in camel case.
NAMES = name_map(
    known={
        "Convolution": "conv1d conv2d",
        "ConvolutionBackwardData": "conv_transpose1d conv_transpose2d",
        "Convolution3D": "conv3d",
        "Convolution3DBackwardData": "conv_transpose3d",
        "MatrixMul": "matmul mm mv linear",
        "BatchedMatrixMul": "bmm",
        "BatchNorm": "batch_norm",
        "LayerNorm": "layer_norm",
        "GroupNorm": "group_norm",
        "Concat": "cat",
        "Stack": "stack",
        "Where": "where",
        "Reduce.MEAN": "mean",
        "TRUE_DIV": "div",
        "EXP": "exp",
        "POW": "pow",
        "LOG": "log",
        "EXPM1": "expm1",
        "LOG1P": "log1p",
        "ACOS": "acos",
        "ASIN": "asin",
        "ATAN2": "atan2",
        "COS": "cos",
        "SIN": "sin",
        "LOG_SUM_EXP": "logaddexp",
        "TAN": "tan",
        "ASINH": "asinh",
        "ACOSH": "acosh",
        "ATANH": "atanh",
        "SINH": "sinh",
        "COSH": "cosh",
        "SOFTPLUS": "softplus",
        "HSIGMOID": "hardsigmoid",
        "LOGSIGMOID": "log_sigmoid",
        "SQRT": "sqrt",
        "ADD": "add",
        "SUB": "sub",
        "MUL": "mul",
        "MAX": "maximum",
        "MIN": "minimum",
        "MOD": "remainder",
        "FLOOR_DIV": "floor_divide",
        "EQ": "eq",
        "NEQ": "ne",
        "LT": "lt gt",
        "LEQ": "le ge",
    },
    unknown={
        "a convolution with a different kernel at each position; torch has none": "GroupLocal",
        "assigns into a tensor, for which torch's indexing casts the value already": (
            "SetSubtensor IndexingSetMultiAxisVec"
        ),
    },
)

_HALF = {
    "a convolution: fast in 16 bits, accumulated in float32": "Convolution ConvolutionBackwardData",
    "a matrix product: fast in 16 bits, accumulated in float32": "MatrixMul BatchedMatrixMul",
    "its kernel accepts a 16-bit input with float32 parameters and statistics": "BatchNorm",
}

_FULL = {
    "computes a mean and a variance, whose errors are in every output": "LayerNorm GroupNorm",
    "sums many values: float16 overflows, or small terms are lost": "Reduce.MEAN",
    "grows exponentially: float16 overflows past 65504": "EXP EXPM1 SINH COSH SOFTPLUS LOG_SUM_EXP",
    "a logarithm: float16 rounds small values to zero, where it is infinite": (
        "LOG LOG1P LOGSIGMOID"
    ),
    "a power or a quotient, which exceeds the range of float16": "POW TRUE_DIV SQRT",
    "depends on digits of the angle that 16 bits cannot hold": ("SIN COS TAN ASIN ACOS ATAN2"),
    "steep at the edge of its domain, or a logarithm of nearly equal numbers": (
        "ASINH ACOSH ATANH"
    ),
    "divides after clamping: MegEngine treats it like a quotient": "HSIGMOID",
}

_PROMOTE = {
    "elementwise: the widest input decides": "ADD SUB MUL MAX MIN MOD FLOOR_DIV EQ NEQ LT LEQ",
    "copies its inputs into one tensor: the widest input decides": "Concat Stack Where GroupLocal",
    "a convolution for which MegEngine has no 16-bit rule": (
        "Convolution3D Convolution3DBackwardData"
    ),
}

_EXEMPT = {"batch_norm": ("running_mean", "running_var", "weight", "bias")}

_UNLISTED = Entry(Rule.KEEP, "MegEngine has no rule for it: runs in the dtype of its inputs")


@cache
# MegEngine has the same rules for both dtypes.
def lists(level: Level, dtype: torch.dtype) -> OpLists:
    """Return MegEngine's dtype rules as op lists."""
    require_level("megengine", level, LEVELS)
    entries = merge_disjoint(
        translate(Rule.HALF, _HALF, NAMES),
        translate(Rule.FULL, _FULL, NAMES),
        translate(Rule.PROMOTE, _PROMOTE, NAMES),
    )
    return OpLists(entries=with_promotions(entries), default_rule=_UNLISTED, exempt_args=_EXEMPT)
