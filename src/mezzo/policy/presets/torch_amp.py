"""torch's autocast op lists as data, with reasons, and mezzo's lists for its other levels.

Source: ATen/autocast_mode.h (CUDA) and autocast_mode.cpp (CPU) of torch 2.11 to 2.15. A test sends
every op that has an autocast kernel through torch's autocast and compares its casts with these
lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch.torch_version import TorchVersion

from mezzo._errors import PolicyError, choices
from mezzo.policy.op_names import is_removed
from mezzo.policy.types import Entry, Level, OpLists, Rule

Groups = tuple[tuple[Rule, str, str], ...]
"""Rule, reason, and the names of the ops."""

_PRODUCTS = "a matrix product: tensor cores are fast in 16 bits and accumulate in float32"
_CONVOLUTIONS = "a convolution: computed as matrix products that accumulate in float32"
_CELLS = "a recurrent cell: matrix products with a bounded activation"
_RANGE = "exceeds the range of float16 for ordinary inputs, or loses most of its digits"
_SUMS = "adds many terms: a 16-bit result overflows or stops growing"
_EXPONENTIALS = "sums exponentials: float16 overflows past 65504"
_LOSSES = "a loss: its rounding error is in every gradient"
_NORMS = "computes a mean and a variance: small differences of large sums"
_DISTANCES = "sums squared differences: float16 overflows past 65504"
_RESAMPLES = "interpolates at coordinates that need more than 11 bits"
_WIDEST = "its kernel needs all inputs in one dtype: the widest input decides"
_NO_KERNEL = "torch has no 16-bit kernel for it on CPU"
_UNSAFE = (
    "takes logarithms of probabilities that float16 rounds to 0 or 1: use"
    " binary_cross_entropy_with_logits, which includes the sigmoid and is safe"
)

_CUDA: Groups = (
    (
        Rule.HALF,
        _CONVOLUTIONS,
        (
            "convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d"
            " conv_transpose3d"
        ),
    ),
    (
        Rule.HALF,
        _PRODUCTS,
        (
            "addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm"
            " chain_matmul linalg_multi_dot scaled_dot_product_attention"
        ),
    ),
    (
        Rule.HALF,
        _CELLS,
        "thnn_fused_lstm_cell thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
    (Rule.HALF, "one multiplication per element", "prelu"),
    (
        Rule.FULL,
        _RANGE,
        (
            "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow"
            " softplus"
        ),
    ),
    (Rule.FULL, _NORMS, "layer_norm rms_norm group_norm"),
    (
        Rule.FULL,
        _SUMS,
        (
            "frobenius_norm nuclear_norm norm linalg_vector_norm linalg_matrix_norm prod cumprod"
            " cumsum sum"
        ),
    ),
    (Rule.FULL, _EXPONENTIALS, "softmax log_softmax logsumexp"),
    (Rule.FULL, _DISTANCES, "cosine_similarity dist pdist cdist"),
    (Rule.FULL, _SUMS, "renorm"),
    (Rule.FULL, "takes square roots of eigenvalues: " + _RANGE, "linalg_matrix_sqrth"),
    (
        Rule.FULL,
        _LOSSES,
        (
            "poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss"
            " smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss"
            " soft_margin_loss triplet_margin_loss multi_margin_loss"
            " binary_cross_entropy_with_logits"
        ),
    ),
    (
        Rule.FULL,
        _RESAMPLES,
        (
            "upsample_nearest1d upsample_nearest_exact1d upsample_nearest2d"
            " upsample_nearest_exact2d upsample_nearest3d upsample_nearest_exact3d"
            " upsample_linear1d upsample_bilinear2d upsample_bilinear2d_aa upsample_trilinear3d"
            " upsample_bicubic2d upsample_bicubic2d_aa"
        ),
    ),
    (
        Rule.PROMOTE,
        _WIDEST,
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add",
    ),
    (Rule.REFUSE, _UNSAFE, "binary_cross_entropy"),
)

_CPU: Groups = (
    (
        Rule.HALF,
        _CONVOLUTIONS,
        (
            "convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d"
            " conv_transpose3d"
        ),
    ),
    (
        Rule.HALF,
        _PRODUCTS,
        (
            "bmm mm linalg_vecdot baddbmm addmm addmm_activation addbmm linear matmul"
            " scaled_dot_product_attention native_multi_head_attention"
        ),
    ),
    (Rule.HALF, _CELLS, "mkldnn_rnn_layer"),
    (Rule.HALF, "one multiplication per element", "prelu"),
    (
        Rule.FULL,
        _LOSSES,
        (
            "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss"
            " cross_entropy ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss"
            " margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss"
            " poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss"
        ),
    ),
    (Rule.FULL, _RESAMPLES, "grid_sample"),
    (Rule.FULL, _DISTANCES, "cdist"),
    (Rule.FULL, _SUMS, "prod trace quantile nanquantile"),
    (
        Rule.FULL,
        "a Fourier transform sums many terms, and " + _NO_KERNEL,
        (
            "stft fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft"
            " fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft"
        ),
    ),
    (
        Rule.FULL,
        "factorizes or inverts a matrix: " + _NO_KERNEL,
        (
            "cholesky cholesky_inverse cholesky_solve geqrf lu_with_info lu_solve"
            " linalg_householder_product ormqr pinverse qr svd triangular_solve linalg_cholesky"
            " linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv"
            " linalg_lstsq linalg_matrix_rank linalg_matrix_sqrth linalg_qr linalg_solve linalg_svd"
            " linalg_svdvals linalg_tensorinv linalg_tensorsolve"
        ),
    ),
    (
        Rule.FULL,
        _NO_KERNEL,
        (
            "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d max_unpool2d"
            " max_unpool3d fractional_max_pool2d fractional_max_pool3d"
            " fake_quantize_per_tensor_affine polar view_as_complex reflection_pad1d"
            " reflection_pad2d replication_pad1d replication_pad2d replication_pad3d"
        ),
    ),
    (Rule.PROMOTE, _WIDEST, "stack cat index_copy"),
)

_SINCE: Mapping[str, str] = {"rms_norm": "2.12", "linalg_matrix_sqrth": "2.14"}
"""First version of torch with the op in its lists, if later than 2.11."""

_UNLISTED = Entry(
    Rule.KEEP, "in no list: runs in the dtype of its inputs; torch promotes mixed dtypes"
)

_VIEWS = (
    "view view_as reshape reshape_as expand expand_as permute transpose t squeeze unsqueeze select"
    " narrow split split_with_sizes chunk unbind flatten unflatten diagonal movedim atleast_1d"
    " atleast_2d atleast_3d as_strided adjoint real imag ravel tensor_split unfold broadcast_to"
    " broadcast_tensors index hsplit vsplit dsplit positive conj resolve_conj resolve_neg"
    " view_as_real view_as_complex slice_inverse coalesce crow_indices col_indices ccol_indices"
    " row_indices"
)

_KEPT: Groups = (
    (Rule.KEEP, "a view: a cast would break the sharing of memory with its input", _VIEWS),
    (
        Rule.KEEP,
        "creates a tensor like its input",
        "zeros_like ones_like full_like rand_like randn_like randint_like",
    ),
)

_STATISTICS = {
    "batch_norm": ("weight", "bias", "running_mean", "running_var"),
    "instance_norm": ("weight", "bias", "running_mean", "running_var"),
}

DEVICES: Mapping[str, Groups] = {"cuda": _CUDA, "cpu": _CPU}
"""torch's lists by device type."""


AUTOCAST_KEYS: Mapping[str, str] = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "privateuseone": "AutocastPrivateUse1",
}
"""Dispatch keys of torch's autocast kernels, by device type."""


@cache
def torch_entries(device: str) -> Mapping[str, Entry]:
    """Return the op list of the installed torch for a device.

    Accelerators without a list here get the CUDA one, which they follow.
    """
    return {
        name: entry
        for name, entry in _entries(DEVICES.get(device, _CUDA)).items()
        if is_listed(name, torch.__version__)
    }


def is_listed(name: str, version: str) -> bool:
    """Return whether an op of this module is in the lists of a version of torch.

    >>> is_listed("rms_norm", "2.11.0"), is_listed("rms_norm", "2.12.0")
    (False, True)
    >>> is_listed("qr", "2.15.0+cu132")
    False
    """
    return TorchVersion(version) >= _SINCE.get(name, "0") and not is_removed(name, version)


@cache
def level_lists(level: Level, device: str) -> OpLists:
    """Return the op lists of a level on a device.

    >>> level_lists(Level.O1, "cuda").entries["softmax"].reason
    'sums exponentials: float16 overflows past 65504'
    """
    match level:
        case Level.O1 | Level.O2:
            return OpLists(torch_entries(device), _UNLISTED)
        case Level.OD:
            half = {
                name: entry
                for name, entry in torch_entries(device).items()
                if entry.rule in (Rule.HALF, Rule.REFUSE)
            }
            return OpLists(
                half, Entry(Rule.FULL, "level OD: ops that are not listed half run in float32")
            )
        case Level.O3:
            return OpLists(
                _entries(_KEPT) | _no_kernels(device),
                Entry(Rule.HALF, "level O3: every op is 16-bit"),
                _STATISTICS,
            )
        case Level.O0:
            return OpLists({}, Entry(Rule.KEEP, "level O0: nothing is cast"))
    raise PolicyError(
        f"The torch preset has no level {level!r}. {choices(level_.value for level_ in Level)}"
    )


def _no_kernels(device: str) -> dict[str, Entry]:
    return {
        name: entry for name, entry in torch_entries(device).items() if _NO_KERNEL in entry.reason
    }


def _entries(groups: Groups) -> dict[str, Entry]:
    return {name: Entry(rule, reason) for rule, reason, names in groups for name in names.split()}
