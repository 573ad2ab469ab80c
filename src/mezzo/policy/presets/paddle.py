"""Op lists of PaddlePaddle 3.3.1: those of ``paddle.amp.auto_cast`` in eager mode.

For O1, O2 and OD. Where they do not fit a table of ops:

- ``conv2d`` with as many groups as channels is ``depthwise_conv2d`` there and in no list. It is
  ``conv2d`` here, and 16-bit.
- The bias of a convolution is added there by a separate op that promotes, so that a float32 bias
  makes the result float32. The bias is cast with the other inputs here. ``linear`` follows the CUDA
  builds, where it is one op (``linear_v2``).
- ``pow`` by a tensor is ``elementwise_pow`` there and in no list; ``norm`` with ``p`` other than
  ``"fro"`` is ``p_norm`` and in no list.
- ``max_pool2d`` with indices is 16-bit there and without them in no list. Both are one op here, in
  no list.
- The list of ``float16`` has four more fused and fake-quantization ops than that of ``bfloat16``.
  None has a counterpart.
"""

from __future__ import annotations

from functools import cache

import torch

from mezzo.policy.presets._tables import merge_disjoint, name_map, require_level, translate
from mezzo.policy.types import Entry, Level, OpLists, Rule

LEVELS = (Level.O1, Level.O2, Level.OD)
"""The levels of Paddle except O0."""

_UPSAMPLE_NEAREST = "interpolate upsample_nearest1d upsample_nearest2d upsample_nearest3d"

# Paddle's lists hold the older 'fluid' names of its ops, and so does this map; a few ops have both
# names.
NAMES = name_map(
    known={
        # White list.
        "linear_v2": "linear",
        "fused_gemm_epilogue": "linear",
        "matmul": "matmul mm inner",
        "matmul_v2": "matmul mm inner",
        "mul": "mm",
        "conv2d": "conv2d conv1d",
        "flash_attn": "scaled_dot_product_attention",
        # Black lists.
        "frobenius_norm": "norm linalg_norm linalg_matrix_norm",
        "huber_loss": "huber_loss smooth_l1_loss",
        "lookup_table": "embedding",
        "lookup_table_v2": "embedding",
        "mean": "mean",
        "reduce_mean": "mean",
        "reduce_prod": "prod",
        "reduce_sum": "sum",
        "scatter": "scatter index_copy",
        "sigmoid_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
        "softmax_with_cross_entropy": "cross_entropy",
        "tanh_shrink": "tanhshrink",
        "linear_interp_v2": "interpolate upsample_linear1d",
        "bilinear_interp_v2": "interpolate upsample_bilinear2d",
        "bicubic_interp_v2": "interpolate upsample_bicubic2d",
        "trilinear_interp_v2": "interpolate upsample_trilinear3d",
        "nearest_interp_v2": _UPSAMPLE_NEAREST,
        # In no list by default; custom lists may contain them.
        "elementwise_add": "add",
        "elementwise_sub": "sub",
        "elementwise_mul": "mul",
        "elementwise_div": "div",
        "elementwise_floordiv": "floor_divide",
        "elementwise_mod": "remainder",
        "elementwise_max": "maximum",
        "elementwise_min": "minimum",
        "elementwise_fmax": "fmax",
        "elementwise_fmin": "fmin",
        "elementwise_heaviside": "heaviside",
        "equal": "eq",
        "not_equal": "ne",
        "less_than": "lt",
        "less_equal": "le",
        "greater_than": "gt",
        "greater_equal": "ge",
        "reduce_all": "all",
        "reduce_any": "any",
        "reduce_amax": "amax",
        "reduce_amin": "amin",
        "reduce_max": "max",
        "reduce_min": "min",
        "arg_max": "argmax",
        "arg_min": "argmin",
        "p_norm": "linalg_vector_norm",
        "add_n": "add",
        "brelu": "hardtanh",
        "concat": "cat",
        "conv2d_transpose": "conv_transpose2d conv_transpose1d",
        "conv3d_transpose": "conv_transpose3d",
        "bce_loss": "binary_cross_entropy",
        "kldiv_loss": "kl_div",
        "determinant": "linalg_det",
        "slogdeterminant": "linalg_slogdet",
        "diag_v2": "diag",
        "expand_v2": "expand broadcast_to",
        "expand_as_v2": "expand_as",
        "flatten_contiguous_range": "flatten",
        "gather": "index_select",
        "grid_sampler": "grid_sample",
        "hard_shrink": "hardshrink",
        "hard_sigmoid": "hardsigmoid",
        "hard_swish": "hardswish",
        "isfinite_v2": "isfinite",
        "isinf_v2": "isinf",
        "isnan_v2": "isnan",
        "logsigmoid": "log_sigmoid",
        "one_hot_v2": "one_hot",
        "pool2d": "max_pool2d avg_pool2d",
        "pool3d": "max_pool3d avg_pool3d",
        "put_along_axis": "scatter",
        "reshape": "reshape view",
        "reshape2": "reshape view",
        "split_with_num": "chunk",
        "squeeze2": "squeeze",
        "tile": "tile repeat",
        "top_k": "topk",
        "top_k_v2": "topk",
        "transpose2": "permute transpose t",
        "unsqueeze2": "unsqueeze",
        "where_index": "nonzero",
        "bilinear_tensor_product": "bilinear",
        "sync_batch_norm": "batch_norm",
        "clip": "clamp",
        "elementwise_pow": "pow",
        "cross": "cross",
        "eigh": "linalg_eigh",
        "i0e": "special_i0e",
        "index_sample": "gather",
        "inverse": "linalg_inv",
        "cholesky": "cholesky linalg_cholesky",
        "lstsq": "linalg_lstsq",
        "matrix_power": "linalg_matrix_power",
        "max_pool3d_with_index": "max_pool3d",
        "multi_dot": "linalg_multi_dot",
        "pad3d": "pad",
        "qr": "linalg_qr",
        "rnn": "lstm gru rnn_tanh rnn_relu",
        "slice": "narrow select",
        "solve": "linalg_solve",
        "svd": "svd linalg_svd",
        "swish": "silu",
        "take_along_axis": "gather take_along_dim",
        "thresholded_relu": "threshold",
        "triangular_solve": "triangular_solve linalg_solve_triangular",
        "unstack": "unbind",
    },
    unknown={
        "fuses several ops that torch calls separately": (
            "fused_attention fused_feedforward fused_rotary_position_embedding"
        ),
        "computes the quantization scale, which is an argument of torch's fake_quantize": (
            "fake_quantize_dequantize_abs_max fake_quantize_dequantize_moving_average_abs_max"
        ),
        "splits the classes over the ranks of a process group": (
            "c_softmax_with_cross_entropy c_softmax_with_multi_label_cross_entropy"
            " margin_cross_entropy"
        ),
        "takes probabilities, and no public function calls it: Paddle's cross_entropy() is"
        " softmax_with_cross_entropy": "cross_entropy cross_entropy2",
        "adds an epsilon in the logarithm; torch's binary_cross_entropy, which is bce_loss in"
        " Paddle, clamps it": "log_loss",
        "matches no op of Paddle: the real name is hierarchical_sigmoid, which torch does not"
        " have": "hsigmoid_loss",
        "matches no op of Paddle: the real name is p_norm, which is in no list": "pnorm",
        "is conv2d here: the number of groups is an argument, not another op": "depthwise_conv2d",
        "is max_pool2d here: returning indices is an argument; without indices it is pool2d, in no"
        " list": "max_pool2d_with_index",
        "is a multiplication and an addition of numbers here": "scale",
        "is an explicit cast, which no policy changes": "cast",
        "copies a tensor unchanged": "assign",
        "matches no op of Paddle any more: tril and triu are separate ops": "tril_triu",
        "creates a tensor of an explicit dtype": "fill_any_like fill_constant",
        "reads the shape, not the values": "size",
    },
    same=(
        "einsum conv3d acos asin atanh cosh cumprod cumsum dist erfinv exp expm1 group_norm"
        " layer_norm log log10 log2 log_softmax nll_loss pow reciprocal renorm rsqrt sinh softmax"
        " softmin softplus square tan triplet_margin_loss abs acosh addmm asinh atan atan2"
        " batch_norm bmm ceil celu cos dot dropout elu erf floor gelu instance_norm leaky_relu lerp"
        " log1p logsumexp logit mish mv pixel_shuffle prelu relu relu6 rms_norm roll round selu"
        " sigmoid sign silu sin softshrink softsign sort split sqrt stack tanh trace tril triu"
        " unbind unfold where affine_grid angle argsort channel_shuffle cholesky_solve cummax"
        " cummin digamma flip fold i0 index_add index_select isclose kron kthvalue lgamma"
        " logcumsumexp masked_fill masked_select median mode nanmedian pixel_unshuffle"
        " repeat_interleave rrelu trunc"
    ),
)

_WHITE = {
    "a matrix product: tensor cores are fast in 16 bits and accumulate in float32": (
        "matmul matmul_v2 mul linear_v2 fused_gemm_epilogue einsum flash_attn fused_attention"
        " fused_feedforward"
    ),
    "a convolution: tensor cores are fast in 16 bits and accumulate in float32": "conv2d",
    "only selects and moves values: 16 bits halve the memory traffic": (
        "max_pool2d_with_index fused_rotary_position_embedding"
    ),
    "simulates quantization, which is coarser than 16 bits anyway": (
        "fake_quantize_dequantize_abs_max fake_quantize_dequantize_moving_average_abs_max"
    ),
}

_BLACK_O1 = {
    "grows exponentially: float16 overflows past 65504": "exp expm1 cosh sinh softplus",
    "sums exponentials: float16 overflows past 65504 and loses the small terms": (
        "softmax softmin log_softmax"
    ),
    "a loss with logarithms or exponentials: 16 bits lose the small differences": (
        "softmax_with_cross_entropy cross_entropy cross_entropy2 c_softmax_with_cross_entropy"
        " margin_cross_entropy c_softmax_with_multi_label_cross_entropy"
        " sigmoid_cross_entropy_with_logits log_loss nll_loss hsigmoid_loss"
    ),
    "a loss with sums of squares: float16 overflows past 65504": ("huber_loss triplet_margin_loss"),
    "a logarithm: float16 rounds small values to zero, where it is infinite": "log log2 log10",
    "steep at the edge of its domain: rounding the input changes the result much": (
        "acos asin atanh erfinv tan"
    ),
    "subtracts nearly equal numbers near zero: 16 bits leave no digits": "tanh_shrink",
    "a power or an inverse: results of small and large inputs exceed the range of float16": (
        "pow square reciprocal rsqrt"
    ),
    "sums many values: float16 overflows, or small terms are lost": (
        "reduce_sum reduce_mean mean cumsum"
    ),
    "multiplies many values: the product exceeds the range of float16": "reduce_prod cumprod",
    "sums powers: float16 overflows past 65504": "dist frobenius_norm pnorm renorm",
    "computes a mean and a variance, whose errors are in every output": "layer_norm group_norm",
}

_BLACK_ALWAYS = {
    "interpolates at fractional positions, which 16 bits cannot hold for large images": (
        "linear_interp_v2 bilinear_interp_v2 bicubic_interp_v2 trilinear_interp_v2"
        " nearest_interp_v2"
    ),
    "its backward sums many rows into one: small terms are lost in 16 bits": (
        "lookup_table lookup_table_v2 scatter"
    ),
}

# Several ops in Paddle, of which the last is in the black list of O1: the result is float32.
_COMPOSED_O1 = {
    "mse_loss": "square and mean",
    "l1_loss": "a mean",
    "kl_div": "a mean",
    "binary_cross_entropy": "a mean",
    "cosine_similarity": "sums of products",
}

_UNLISTED = {
    Level.O1: Entry(Rule.PROMOTE, "in no list of Paddle's O1: float32 if one input is"),
    Level.O2: Entry(Rule.PROMOTE, "in no list of Paddle's O2: float32 if one input is"),
    Level.OD: Entry(
        Rule.FULL, "Paddle's OD runs every op in float32 that is not in the white list"
    ),
}

_NORM_PARAMETERS = {
    "batch_norm": ("weight", "bias", "running_mean", "running_var"),
    "layer_norm": ("weight", "bias"),
}


@cache
# The lists of the two dtypes differ only in ops without a counterpart.
def lists(level: Level, dtype: torch.dtype) -> OpLists:
    """Return Paddle's op lists at a level."""
    require_level("paddle", level, LEVELS)
    white = translate(Rule.HALF, _WHITE, NAMES)
    black = {
        Level.OD: {},
        Level.O2: translate(Rule.FULL, _BLACK_ALWAYS, NAMES),
        Level.O1: translate(Rule.FULL, _BLACK_O1 | _BLACK_ALWAYS, NAMES) | _composed(),
    }[level]
    return OpLists(
        entries=merge_disjoint(white, black),
        default_rule=_UNLISTED[level],
        exempt_args=_NORM_PARAMETERS,
    )


def _composed() -> dict[str, Entry]:
    return {
        op: Entry(Rule.FULL, f"several ops in Paddle, of which {parts} must be float32")
        for op, parts in _COMPOSED_O1.items()
    }
