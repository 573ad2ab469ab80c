"""The ATen ops that a saved program may call: those that check their arguments.

A file chooses the arguments of every op, and many ops of torch do not check them: `_reshape_alias`
takes any strides, `native_batch_norm` reads as many statistics as the input has channels. With
wrong arguments they read and write beyond a buffer. The list has the ops that torch.export writes
for torch.nn, torch.nn.functional, the methods of tensors and the models of transformers and
torchvision, without those that crashed when called with invalid arguments.

A name allows all overloads that do not write to `out=`; a name with a dot allows only that
overload. Except in the group of shapes, a name also allows the in-place op: `add` allows `add_`.
(`as_strided_` does not check what `as_strided` checks.) Names that a version of torch does not have
are harmless.
"""

from __future__ import annotations

_ARITHMETIC = """
abs absolute add addcdiv addcmul bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clip copysign deg2rad div
divide.Scalar divide.Tensor fix float_power floor floor_divide fmax fmin fmod frac frexp gcd
heaviside hypot ldexp lerp maximum minimum mul multiply nan_to_num neg negative nextafter positive
pow rad2deg reciprocal remainder round rsub sgn sign signbit sqrt square rsqrt sub subtract
true_divide trunc
__and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
"""

_COMPARISONS = """
eq equal ge greater greater_equal gt isclose isfinite isin isinf isnan isneginf isposinf isreal le
less less_equal logical_and logical_not logical_or logical_xor lt ne not_equal where _is_all_true
"""

_FUNCTIONS = """
acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh
cos cosh digamma erf erfc erfinv exp exp2 expm1 i0 igamma igammac lgamma log log10 log1p log2
logaddexp logaddexp2 logit mvlgamma polygamma sigmoid sin sinc sinh tan tanh xlogy
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_entr special_erf special_erfc special_erfcx special_erfinv
special_exp2 special_expit special_expm1 special_gammaln special_hermite_polynomial_h
special_hermite_polynomial_he special_i0 special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p special_log_ndtr
special_log_softmax special_logit special_logsumexp special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtr
special_ndtri special_polygamma special_psi special_round special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w special_sinc special_softmax special_spherical_bessel_j0
special_xlog1py special_xlogy special_zeta
"""

_COMPLEX = """
_conj adjoint chalf complex conj conj_physical imag mH matrix_H polar real resolve_conj resolve_neg
view_as_complex view_as_real
bartlett_window blackman_window hamming_window hann_window istft kaiser_window stft
fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2
fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft
fft_rfft2 fft_rfftfreq fft_rfftn
"""

_REDUCTIONS = """
all amax amin aminmax any argmax argmin bincount count_nonzero cummax cummin cumprod cumsum
cumulative_trapezoid diff dist gradient histc histogram kthvalue logcumsumexp logsumexp max mean
median min mode nanmean nanmedian nanquantile nansum norm prod quantile std std_mean sum sum_to_size
trapezoid trapz var var_mean
argsort msort sort topk _unique2 unique_consecutive unique_dim
"""

_SHAPES = """
alias as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to
cartesian_prod cat channel_shuffle chunk clone column_stack combinations concat concatenate
contiguous detach diag diag_embed diagflat diagonal dsplit dstack expand expand_as flatten flip
fliplr flipud hsplit hstack kron lift_fresh_copy mT meshgrid movedim moveaxis narrow numpy_T permute
pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave reshape reshape_as roll rot90 row_stack
select slice split split_with_sizes squeeze stack swapaxes swapdims t tensor_split tile to _to_copy
transpose tril triu type_as unbind unflatten unfold unsafe_chunk unsafe_split
unsafe_split_with_sizes unsqueeze view view_as vsplit vstack
detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ tril_ triu_ unsqueeze_
alias_copy as_strided_copy diagonal_copy expand_copy narrow_copy permute_copy split_with_sizes_copy
squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy
"""

_INDEXING = """
argwhere as_strided_scatter bucketize copy diagonal_scatter embedding embedding_bag.padding_idx
embedding_renorm_ gather index index_add index_copy index_fill index_put index_reduce index_select
masked_fill masked_scatter masked_select nonzero nonzero_numpy nonzero_static one_hot put scatter
scatter_add scatter_reduce searchsorted select_scatter slice_scatter take take_along_dim
"""

_NEW_TENSORS = """
arange empty empty_like empty_permuted empty_strided eye fill full full_like linspace logspace
new_empty new_empty_strided new_full new_ones new_zeros ones ones_like range scalar_tensor
tril_indices triu_indices zero_ zeros zeros_like
bernoulli cauchy_ exponential_ geometric_ log_normal_ multinomial normal poisson rand rand_like
randint randint_like randn randn_like random_ randperm uniform_
"""

_PRODUCTS = """
addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul cross dot einsum ger inner linear matmul
mm mv outer scaled_dot_product_attention tensordot trace vdot
cholesky cholesky_inverse cholesky_solve det geqrf inverse linalg_cholesky linalg_cholesky_ex
linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvalsh
linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex
linalg_ldl_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matmul
linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv
linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd
linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot linalg_vector_norm
logdet lu_solve _lu_with_info matrix_exp matrix_power ormqr orgqr pinverse qr renorm slogdet svd
triangular_solve
"""

_LAYERS = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
gru.input gru_cell lstm.input lstm_cell rnn_relu.input rnn_relu_cell rnn_tanh.input rnn_tanh_cell
batch_norm group_norm instance_norm layer_norm rms_norm _weight_norm
alpha_dropout dropout feature_alpha_dropout feature_dropout
celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_softmax mish
prelu relu relu6 rrelu rrelu_with_noise _safe_softmax selu silu softmax softplus softshrink
threshold
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d fractional_max_pool2d fractional_max_pool3d
max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
max_pool3d_with_indices max_unpool2d max_unpool3d
affine_grid_generator col2im constant_pad_nd grid_sampler grid_sampler_2d grid_sampler_3d im2col pad
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d
upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec
upsample_nearest2d.vec upsample_nearest3d.vec upsample_trilinear3d.vec _upsample_bicubic2d_aa.vec
_upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec
_upsample_nearest_exact3d.vec
fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
"""

_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits cdist cosine_embedding_loss cosine_similarity
cross_entropy_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd pairwise_distance pdist
poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""

_NUMBERS_AND_ASSERTIONS = """
_assert_async _assert_scalar _assert_tensor_metadata item sym_constrain_range
sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
"""

_IN_PLACE_TOO = frozenset(
    "".join(
        (
            *(_ARITHMETIC, _COMPARISONS, _FUNCTIONS, _COMPLEX, _REDUCTIONS, _INDEXING),
            *(_NEW_TENSORS, _PRODUCTS, _LAYERS, _LOSSES, _NUMBERS_AND_ASSERTIONS),
        )
    ).split()
)
ALLOWED = _IN_PLACE_TOO.union(_SHAPES.split())
"""All names on the list."""


def is_allowed(op: str, overload: str) -> bool:
    """Return whether a saved program may call an overload of an ATen op.

    >>> is_allowed("relu_", "default"), is_allowed("_reshape_alias", "default")
    (True, False)
    >>> is_allowed("lstm", "input"), is_allowed("lstm", "data")
    (True, False)
    """
    return (
        op in ALLOWED
        or f"{op}.{overload}" in ALLOWED
        or (op.endswith("_") and op[:-1] in _IN_PLACE_TOO)
    )
