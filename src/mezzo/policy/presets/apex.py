"""Op lists of NVIDIA Apex (e13873d): the functions that ``apex.amp`` patches at O1.

At O2 and O3 it casts the model instead and patches nothing.

Where Apex's lists do not fit a table of ops: it lists operators (``__add__``) and functions
(``add``) separately. They are one op here, and ``sub``, which is listed only as an operator there,
promotes in both forms.
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

LEVELS = (Level.O1, Level.O2, Level.O3)
"""The levels of Apex except O0."""

NAMES = name_map(
    known={
        "interpolate": (
            "interpolate upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d"
            " upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
        ),
        "__matmul__": "matmul",
        "__pow__": "pow",
        "__ipow__": "pow",
        "__rpow__": "pow",
        "__add__": "add",
        "__radd__": "add",
        "__iadd__": "add",
        "__sub__": "sub",
        "__rsub__": "sub",
        "__isub__": "sub",
        "__mul__": "mul",
        "__rmul__": "mul",
        "__imul__": "mul",
        "__div__": "div",
        "__rdiv__": "div",
        "__idiv__": "div",
        "__truediv__": "div",
        "__rtruediv__": "div",
        "__itruediv__": "div",
        "__eq__": "eq",
        "__ne__": "ne",
        "__lt__": "lt",
        "__le__": "le",
        "__gt__": "gt",
        "__ge__": "ge",
    },
    unknown={
        "moves a tensor to the CPU, which had no 16-bit kernels then; torch has them now": "cpu",
    },
    same=(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu"
        " addmm addmv addr matmul mm mv linear addbmm baddbmm bmm rnn_tanh rnn_relu lstm gru"
        " rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell acos asin cosh erfinv exp expm1 log log10"
        " log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std sum var renorm"
        " grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm"
        " local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss"
        " cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss"
        " multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss"
        " binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss"
        " ctc_loss binary_cross_entropy addcdiv addcmul atan2 cross bilinear dot add div mul eq"
        " equal ge gt le lt ne cat stack"
    ),
)

_HALF = {
    "a matrix product: tensor cores are fast in 16 bits and accumulate in float32": (
        "addmm addmv addr matmul mm mv linear addbmm baddbmm bmm __matmul__"
    ),
    "a convolution: tensor cores are fast in 16 bits and accumulate in float32": (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
    ),
    "one multiplication per element, usually after a convolution": "prelu",
    "matrix products at every step of the sequence": (
        "rnn_tanh rnn_relu lstm gru rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell"
    ),
}

_FULL = {
    "grows exponentially: float16 overflows past 65504": "exp expm1 cosh sinh softplus",
    "sums exponentials: float16 overflows past 65504 and loses the small terms": (
        "softmax softmin log_softmax"
    ),
    "a logarithm: float16 rounds small values to zero, where it is infinite": "log log2 log10",
    "steep at the edge of its domain: rounding the input changes the result much": (
        "acos asin erfinv tan"
    ),
    "a power or an inverse: results of small and large inputs exceed the range of float16": (
        "pow reciprocal rsqrt __pow__ __ipow__ __rpow__"
    ),
    "sums or multiplies many values: float16 overflows, or small terms are lost": (
        "sum cumsum prod cumprod"
    ),
    "sums powers: float16 overflows past 65504": (
        "dist norm renorm std var normalize cosine_similarity local_response_norm"
    ),
    "computes a mean and a variance, whose errors are in every output": "layer_norm group_norm",
    "contains an error function, whose tail 16 bits round to zero": "gelu",
    "interpolates at fractional positions, which 16 bits cannot hold for large images": (
        "interpolate grid_sample"
    ),
    "a loss: 16 bits lose the small differences that make up the gradient": (
        "poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss"
        " mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss"
        " multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss"
        " soft_margin_loss triplet_margin_loss ctc_loss"
    ),
    "moves a tensor to the CPU": "cpu",
}

_PROMOTE = {
    "needs all inputs in one dtype: the widest input decides": (
        "addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne __add__"
        " __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ __le__"
        " __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__"
        " __truediv__"
    ),
    "copies its inputs into one tensor: the widest input decides": "cat stack",
}

_UNSAFE_LOSS = (
    "takes the logarithm of a probability that 16 bits round to 0 or 1; use"
    " binary_cross_entropy_with_logits, or cast the probabilities to float32 first"
)
_REFUSE = {_UNSAFE_LOSS: "binary_cross_entropy"}

_UNLISTED = Entry(Rule.KEEP, "Apex does not patch it: runs in the dtype of its inputs")


@cache
# Apex supports only float16; its lists are used for bfloat16 as well.
def lists(level: Level, dtype: torch.dtype) -> OpLists:
    """Return the functions that Apex patches at a level, as op lists."""
    require_level("apex", level, LEVELS)
    if level is not Level.O1:
        return OpLists(entries={}, default_rule=_UNLISTED)
    entries = merge_disjoint(
        translate(Rule.HALF, _HALF, NAMES),
        translate(Rule.FULL, _FULL, NAMES),
        translate(Rule.PROMOTE, _PROMOTE, NAMES),
        translate(Rule.REFUSE, _REFUSE, NAMES),
    )
    return OpLists(
        entries=with_promotions(entries),
        default_rule=_UNLISTED,
        refused_in_half=frozenset({"binary_cross_entropy"}),
    )
