"""Op lists of OneFlow (25c8978): the lists of its ``autocast`` and of mixed ``nn.Graph``.

They are called white, black, gray and clear list. Where they do not fit a table of ops:

- Only ``conv2d`` is in the white list: convolutions in one or three dimensions and transposed ones
  run in float32 there, and here.
- ``pow`` by a tensor is in no list there, by a number it is gray. Both are ``pow`` here, and gray.
- ``mean`` is a sum and a multiplication by a number there, both gray.
"""

from __future__ import annotations

from functools import cache

import torch

from mezzo.policy.presets._tables import merge_disjoint, name_map, require_level, translate
from mezzo.policy.types import Conditional, Entry, Level, OpLists, Rule

LEVELS = (Level.O1,)
"""OneFlow has no levels: it keeps float32 parameters, as O1 does."""

NAMES = name_map(
    known={
        "matmul": "matmul mm",
        "batch_matmul": "bmm",
        "broadcast_matmul": "matmul",
        "fused_matmul_bias": "linear",
        "tf_prelu": "prelu",
        "fused_multi_head_attention_inference": "scaled_dot_product_attention",
        "binary_cross_entropy_with_logits_reduce_mean": "binary_cross_entropy_with_logits",
        "add_n": "add",
        "bias_add": "add",
        "scalar_add": "add",
        "broadcast_add": "add",
        "broadcast_sub": "sub",
        "scalar_mul": "mul",
        "scalar_mul_by_tensor": "mul",
        "broadcast_mul": "mul",
        "scalar_div": "div",
        "broadcast_div": "div",
        "scalar_pow": "pow",
        "reduce_sum": "sum mean",
        "avg_pool_1d": "avg_pool1d",
        "avg_pool_2d": "avg_pool2d",
        "avg_pool_3d": "avg_pool3d",
        "tf_avg_pool_1d": "avg_pool1d",
        "tf_avg_pool_2d": "avg_pool2d",
        "tf_avg_pool_3d": "avg_pool3d",
        "max_pool_1d": "max_pool1d",
        "max_pool_2d": "max_pool2d",
        "max_pool_3d": "max_pool3d",
        "tf_max_pool_1d": "max_pool1d",
        "tf_max_pool_2d": "max_pool2d",
        "tf_max_pool_3d": "max_pool3d",
        "normalization": "batch_norm",
        "fast_gelu": "gelu",
        "sparse_softmax_cross_entropy": "cross_entropy",
        "nll": "nll_loss",
        "broadcast_like": "expand_as broadcast_to",
        "gather": "index_select",
        "reshape": "reshape view flatten unflatten",
        "reshape_like": "reshape_as view_as",
        "transpose": "transpose permute t",
        "narrow": "narrow select split chunk unbind",
        "expand_dims": "unsqueeze",
        "upsample_nearest_2d": "interpolate upsample_nearest2d",
    },
    unknown={
        "a gradient: torch's autograd runs a backward op in the dtype of its forward": (
            "conv_data_grad conv_filter_grad conv_bias_grad broadcast_matmul_grad_b"
            " fused_self_attention_query_mul_key_and_value_grad prelu_grad tf_prelu_grad"
            " cublas_fused_mlp_grad cublas_bias_add_relu_matmul_grad fused_glu_without_linear_grad"
            " fused_relu_dropout_grad fused_dot_feature_interaction_grad"
            " one_embedding_fused_lookup_grad binary_cross_entropy_with_logits_reduce_mean_grad"
            " fused_cross_feature_interaction_v1_grad fused_cross_feature_interaction_v2_grad"
            " tf_avg_pool_1d_grad tf_avg_pool_2d_grad tf_avg_pool_3d_grad avg_pool_1d_grad"
            " avg_pool_2d_grad avg_pool_3d_grad sigmoid_grad tanh_grad sqrt_grad"
            " layer_norm_param_grad layer_norm_grad fuse_layer_norm_grad rms_norm_grad"
            " rms_norm_param_grad dropout_grad softmax_grad log_softmax_grad gelu_grad"
            " fast_gelu_grad normalization_grad normalization_add_relu_grad"
            " sparse_softmax_cross_entropy_grad nll_grad fused_tril_scale_softmax_mask_scale_grad"
            " fused_scale_mask_softmax_dropout_grad fused_scale_mask_softmax_grad"
            " fused_bias_add_gelu_grad fused_fast_gelu_mul_grad group_norm_param_grad"
            " group_norm_grad silu_grad reduce_sum_like tf_max_pool_1d_grad tf_max_pool_2d_grad"
            " tf_max_pool_3d_grad max_pool_1d_grad max_pool_2d_grad max_pool_3d_grad relu_grad"
            " split_like same_padding_grad slice_grad embedding_grad narrow_grad"
        ),
        "fuses several ops that torch calls separately": (
            "fused_self_attention_query_mul_key_and_value cublas_fused_mlp fused_glu"
            " fused_matmul_bias_add_relu_dropout fused_dot_feature_interaction"
            " one_embedding_fused_lookup fused_cross_feature_interaction grouped_matmul_bias"
            " skip_layer_norm normalization_add_relu fused_tril_scale_softmax_mask_scale"
            " fused_scale_mask_softmax_dropout fused_scale_mask_softmax"
            " fused_bias_add_scale_mask_softmax_dropout fused_bias_add_gelu"
            " fused_bias_add_mask_scale fused_fast_gelu_mul fused_weighted_sum fused_scale_tril"
        ),
        "marks a position in OneFlow's graph for one of its passes": (
            "amp_white_identity amp_black_identity nvtx_start nvtx_end pinned_identity"
        ),
        "moves a tensor between the ranks or stages of OneFlow's graph": (
            "parallel_cast hierarchical_parallel_cast hierarchical_parallel_cast_like"
            " cast_to_static_shape pack unpack acc"
        ),
        "torch has no such op": (
            "reciprocal_no_nan gather_nd scatter_nd scatter_nd_like unsorted_segment_sum_like"
            " random_mask_like same_padding"
        ),
        "copies a tensor or a part of it unchanged": "identity copy to_contiguous slice",
        "changes a tensor in place, which no policy casts": "fill_",
    },
    same=(
        "conv2d prelu tanh sqrt layer_norm rms_norm dropout softmax log_softmax gelu reciprocal"
        " group_norm silu relu cat pad tril squeeze embedding expand repeat ones_like where"
    ),
)

_WHITE = {
    "a matrix product: tensor cores are fast in 16 bits and accumulate in float32": (
        "matmul batch_matmul broadcast_matmul fused_matmul_bias"
        " fused_multi_head_attention_inference"
    ),
    "a convolution: tensor cores are fast in 16 bits and accumulate in float32": "conv2d",
    "one multiplication per element, usually after a convolution": "prelu tf_prelu",
    "its kernel accepts 16-bit logits and reduces them in float32": (
        "binary_cross_entropy_with_logits_reduce_mean"
    ),
}

_GRAY = {
    "safe in 16 bits if its inputs come from an op that is": (
        "add_n bias_add scalar_add scalar_mul scalar_mul_by_tensor scalar_div scalar_pow"
        " broadcast_add broadcast_sub broadcast_mul broadcast_div tanh sqrt reciprocal gelu"
        " fast_gelu silu dropout"
    ),
    "averages or sums; its kernel accumulates in float32": (
        "reduce_sum avg_pool_1d avg_pool_2d avg_pool_3d tf_avg_pool_1d tf_avg_pool_2d"
        " tf_avg_pool_3d"
    ),
    "its kernel accepts 16-bit inputs and keeps sums and statistics in float32": (
        "layer_norm rms_norm group_norm normalization softmax log_softmax"
        " sparse_softmax_cross_entropy nll"
    ),
}

_CLEAR = {
    "only selects and moves values: the dtype of its inputs does not matter": (
        "broadcast_like gather tf_max_pool_1d tf_max_pool_2d tf_max_pool_3d max_pool_1d max_pool_2d"
        " max_pool_3d reshape reshape_like relu transpose cat pad tril slice identity squeeze"
        " embedding expand expand_dims repeat narrow ones_like to_contiguous copy where"
        " upsample_nearest_2d"
    ),
}

_ONLY_NEAREST = "only nearest interpolation is in a list; other modes run in float32"
_ONLY_MEAN = "only the averaged loss is in a list"
_CONDITIONAL = (
    Conditional(
        "interpolate",
        "mode",
        ("linear", "bilinear", "bicubic", "trilinear", "area", "nearest-exact"),
        _ONLY_NEAREST,
    ),
    Conditional("binary_cross_entropy_with_logits", "reduction", ("none", "sum"), _ONLY_MEAN),
)

# OneFlow exempts the parameters and statistics of batch norm; its other exceptions are for
# gradients and fused ops.
_EXEMPT = {"batch_norm": ("running_mean", "running_var", "weight", "bias")}

_UNLISTED = Entry(Rule.FULL, "in none of OneFlow's lists: runs in float32")


@cache
# OneFlow has the same lists for both dtypes.
def lists(level: Level, dtype: torch.dtype) -> OpLists:
    """Return OneFlow's op lists."""
    require_level("oneflow", level, LEVELS)
    entries = merge_disjoint(
        translate(Rule.HALF, _WHITE, NAMES),
        translate(Rule.PROMOTE, _GRAY, NAMES),
        translate(Rule.PROMOTE, _CLEAR, NAMES),
    )
    return OpLists(
        entries=entries, default_rule=_UNLISTED, exempt_args=_EXEMPT, conditional=_CONDITIONAL
    )
