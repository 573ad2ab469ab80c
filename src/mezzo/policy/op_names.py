"""Canonical op names and their aliases.

The name of an op is that of the public Python function if there is one, and the ATen base name
otherwise. All other spellings are aliases.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.torch_version import TorchVersion


def _aliases(table: Mapping[str, str]) -> dict[str, str]:
    return {alias: name for name, aliases in table.items() for alias in aliases.split()}


DUNDERS: Mapping[str, str] = _aliases(
    {
        "add": "__add__ __radd__ __iadd__",
        "sub": "__sub__ __rsub__ __isub__ rsub",
        "mul": "__mul__ __rmul__ __imul__",
        "div": "__div__ __rdiv__ __idiv__ __truediv__ __rtruediv__ __itruediv__",
        "floor_divide": "__floordiv__ __rfloordiv__ __ifloordiv__",
        "remainder": "__mod__ __rmod__ __imod__",
        "pow": "__pow__ __rpow__ __ipow__",
        "matmul": "__matmul__ __rmatmul__ __imatmul__",
        "neg": "__neg__",
        "abs": "__abs__",
        "eq": "__eq__",
        "ne": "__ne__",
        "lt": "__lt__",
        "le": "__le__",
        "gt": "__gt__",
        "ge": "__ge__",
    }
)
"""Methods that Python's operators call, and their ops."""

ALIASES: Mapping[str, str] = _aliases(
    {
        # Spellings of NumPy and the array API.
        "abs": "absolute",
        "acos": "arccos",
        "acosh": "arccosh",
        "asin": "arcsin",
        "asinh": "arcsinh",
        "atan": "arctan",
        "atan2": "arctan2",
        "atanh": "arctanh",
        "cat": "concat concatenate",
        "clamp": "clip",
        "div": "divide true_divide",
        "ge": "greater_equal",
        "gt": "greater",
        "le": "less_equal",
        "lt": "less",
        "movedim": "moveaxis",
        "mul": "multiply",
        "ne": "not_equal",
        "neg": "negative",
        "sub": "subtract",
        "trunc": "fix",
        "trapezoid": "trapz",
        "vstack": "row_stack",
        "transpose": "swapaxes swapdims",
        # Ops that ATen names differently than the public function.
        "batch_norm": (
            "native_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training"
            " batch_norm_impl_index cudnn_batch_norm miopen_batch_norm batch_norm_with_update"
            " batch_norm_no_update native_batch_norm_legit_functional"
        ),
        "convolution": "cudnn_convolution cudnn_convolution_transpose",
        "cross_entropy": "cross_entropy_loss",
        "dropout": "native_dropout fused_dropout",
        "grid_sample": "grid_sampler grid_sampler_2d grid_sampler_3d grid_sampler_2d_cpu_fallback",
        "group_norm": "native_group_norm",
        "kl_div": "kl_div_loss",
        "layer_norm": "native_layer_norm",
        "nll_loss": "nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward",
        "rms_norm": "fused_rms_norm",
        "scaled_dot_product_attention": (
            "sdpa scaled_dot_product_attention_math scaled_dot_product_flash_attention"
            " scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention"
            " scaled_dot_product_flash_attention_for_cpu"
            " scaled_dot_product_fused_attention_overrideable"
            " scaled_dot_product_attention_math_for_mps"
        ),
        "adaptive_max_pool1d": "adaptive_max_pool1d_with_indices",
        "adaptive_max_pool2d": "adaptive_max_pool2d_with_indices",
        "adaptive_max_pool3d": "adaptive_max_pool3d_with_indices",
        "fractional_max_pool2d": "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d": "fractional_max_pool3d_with_indices",
        "max_pool1d": "max_pool1d_with_indices",
        "max_pool2d": "max_pool2d_with_indices",
        "max_pool3d": "max_pool3d_with_indices",
        "multilabel_margin_loss": "multilabel_margin_loss_forward",
        "log_sigmoid": "logsigmoid log_sigmoid_forward",
        "embedding_bag": "embedding_bag_forward_only",
        # Names in torch.special of ops that exist without it; the others keep their prefix.
        "i0": "special_i0",
        "igamma": "special_gammainc",
        "igammac": "special_gammaincc",
        "digamma": "special_digamma special_psi",
        "erf": "special_erf",
        "erfc": "special_erfc",
        "erfinv": "special_erfinv",
        "exp2": "special_exp2",
        "expm1": "special_expm1",
        "lgamma": "special_gammaln",
        "log1p": "special_log1p",
        "log_softmax": "special_log_softmax",
        "logit": "special_logit",
        "logsumexp": "special_logsumexp",
        "mvlgamma": "special_multigammaln",
        "polygamma": "special_polygamma",
        "round": "special_round",
        "sigmoid": "special_expit",
        "sinc": "special_sinc",
        "softmax": "special_softmax",
        "xlogy": "special_xlogy",
        # Names in torch.linalg of ops that exist without it.
        "cross": "linalg_cross",
        "matmul": "linalg_matmul",
        "diagonal": "linalg_diagonal",
        "linalg_inv": "inverse linalg_inv_ex",
        "linalg_cholesky": "linalg_cholesky_ex",
        "linalg_det": "det",
        "linalg_slogdet": "slogdet",
        "linalg_matrix_power": "matrix_power",
        "linalg_householder_product": "orgqr",
        "linalg_multi_dot": "multi_dot",
        "outer": "ger",
        "bilinear": "trilinear",
        "linalg_matrix_exp": "matrix_exp",
        # One builtin with several names: torch.dsmm == torch.mm.
        "mm": "dsmm spmm",
        "hspmm": "hsmm",
        "sspaddmm": "saddmm",
    }
)

NOT_OPS: frozenset[str] = frozenset(
    """
    to type type_as float double half bfloat16 int long short char byte bool cfloat cdouble chalf
    cpu cuda xpu ipu mtia to_copy
    apply autocast backward grad requires_grad register_hook register_post_accumulate_grad_hook
    retain_grad retains_grad module_load reinforce
    size sym_size stride sym_stride dim ndimension numel sym_numel nelement element_size
    storage_offset sym_storage_offset dim_order data_ptr const_data_ptr
    item local_scalar_dense tolist numpy array array_wrap len iter hash dir repr format deepcopy
    reduce_ex reversed contains
    dlpack dlpack_device setstate setitem getitem index_scalar float_power_scalar
    storage storage_type untyped_storage typed_storage share_memory is_shared pin_memory is_pinned
    set resize resize_as
    as_subclass make_subclass detach clone contiguous alias lift lift_fresh data grad_fn version
    output_nr
    is_floating_point is_complex is_contiguous is_conj is_neg is_inference is_nonzero is_same_size
    is_set_to is_signed is_sparse is_coalesced
    is_distributed is_leaf is_tensor is_storage is_vulkan_available is_autocast_enabled get_device
    result_type can_cast promote_types
    new new_empty new_empty_strided new_full new_ones new_tensor new_zeros tensor as_tensor
    from_numpy from_file empty empty_strided empty_permuted
    zeros ones full arange range linspace logspace eye rand randn randint randperm scalar_tensor
    save wait str pos values indices nnz qscheme dimI dimV dense_dim sparse_dim coalesced
    lazy_clone neg_view hash_tensor
    map map2 names has_names rename refine_names align_as align_to manual_seed seed initial_seed
    compile vmap
    sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum sym_sqrt unravel_index record_stream
    bool float int long invert
    and or xor iand ior ixor rand ror rxor lshift rshift ilshift irshift rlshift rrshift copy fill
    zero random uniform normal bernoulli
    """.split()
)
"""Functions that carry, describe, create or explicitly convert a tensor: no rule applies to them.
Writing in place has no rule either, which depends on the call and not on the name."""


_REMOVED: Mapping[str, str] = {"cholesky": "2.14", "qr": "2.14"}
"""Ops that torch has removed, with the first version without them."""


def is_removed(name: str, version: str = torch.__version__) -> bool:
    """Return whether an op was removed from torch in this version or before.

    >>> is_removed("qr", "2.13.0"), is_removed("qr", "2.14.0")
    (False, True)
    """
    return name in _REMOVED and TorchVersion(version) >= _REMOVED[name]


def canonical(name: str) -> str:
    """Return the canonical name for a dunder, an in-place or private spelling, or an alias.

    >>> canonical("__radd__"), canonical("add_"), canonical("_softmax"), canonical("true_divide")
    ('add', 'add', 'softmax', 'div')
    """
    if name in DUNDERS:
        return DUNDERS[name]
    stripped = name.strip("_")
    return ALIASES.get(stripped, DUNDERS.get(stripped, stripped))


# Predicates, and internal functions in torch's public namespaces.
_NOT_OP_PREFIXES = (
    "is_",
    "get_",
    "sym_",
    "nested_",
    "fbgemm_",
    "quantized_",
    "q_",
    "cudnn_",
    "miopen_",
    "mkldnn_re",
    "choose_",
    "empty_",
    "autocast_",
    "clear_",
    "to_",
)


def is_op(name: str) -> bool:
    """Return whether a rule can apply to a canonical name."""
    return (
        bool(name)
        and name not in NOT_OPS
        and not name.startswith(_NOT_OP_PREFIXES)
        and "backward" not in name
    )
