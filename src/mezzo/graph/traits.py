"""What a graph's ops do with dtypes, beyond the rule that a policy has for them: which promote, which only move numbers, which merely look at a tensor's shape."""

from __future__ import annotations

from collections.abc import Mapping

from mezzo.policy.presets.torch_amp import lists, native
from mezzo.policy.types import Level, Rule

PROMOTING: frozenset[str] = frozenset(
    "add sub mul div pow maximum minimum fmax fmin fmod remainder floor_divide where eq ne lt le gt ge cat stack hstack vstack dstack "
    "logical_and logical_or logical_xor".split()
)
"""Ops whose kernels take float dtypes that differ and compute in the widest: where one input is float32, a 16-bit one beside it needs no cast.

Tried on a CPU; ops that torch's CUDA list promotes by hand (`atan2`, `addcmul`) are not here, for their kernels take one dtype."""

_MOVES = (
    "slice contiguous clone detach alias lift lift_fresh lift_fresh_copy unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk copy constant_pad_nd pad "
    "expand_copy view_copy repeat repeat_interleave tile flip fliplr flipud roll rot90 tril triu cat stack hstack vstack dstack index_select gather take "
    "take_along_dim embedding masked_fill masked_select where pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d "
    "upsample_nearest_exact2d upsample_nearest_exact3d select_scatter slice_scatter diagonal_scatter diag diag_embed block_diag meshgrid im2col col2im numpy_T mT matrix_H mH to"
)
_MONOTONE = (
    "relu relu6 hardtanh clamp clamp_min clamp_max threshold neg abs sign maximum minimum fmax fmin max_pool1d max_pool2d max_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d amax amin max min dropout feature_dropout alpha_dropout"
)

VIEWS: frozenset[str] = frozenset(
    name for name, entry in lists(Level.O3, "cuda").entries.items() if entry.rule is Rule.KEEP and not name.endswith("_like") and name != "coalesce"
)
"""Ops that share their input's memory."""

EXACT: frozenset[str] = frozenset((*_MOVES.split(), *_MONOTONE.split())) | VIEWS
"""Ops that give the same numbers whether their inputs or their results are rounded: rounding early loses nothing if all who read the result round it."""

GATHERS: frozenset[str] = frozenset({"embedding", "index_select"})
"""Ops that pick rows of a table by index and give their numbers unchanged."""

STRUCTURAL: frozenset[str] = frozenset(
    "slice contiguous clone detach alias lift lift_fresh lift_fresh_copy unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk constant_pad_nd "
    "expand_copy view_copy im2col col2im numpy_T mT matrix_H mH".split()
)
"""Ops that a graph holds and no policy has a rule for: they only move numbers."""

LOOKS: frozenset[str] = frozenset("sym_size size sym_stride stride sym_numel numel sym_storage_offset storage_offset dim is_floating_point is_complex".split())
"""Ops that read a tensor's shape, never its numbers."""

LOOKED_AT: Mapping[str, frozenset[str]] = dict.fromkeys(("expand_as", "view_as", "reshape_as"), frozenset({"other"}))
"""Arguments of other ops of which only the shape is read."""

CASTS: frozenset[str] = frozenset("to to_copy type_as float double half bfloat16".split())
"""The user's own conversions."""

FILLS: frozenset[str] = frozenset("zeros ones full scalar_tensor new_zeros new_ones new_full".split())
"""Ops that make a tensor of one number: made in 16 bits as well as in float32, if the number fits."""

MIXED_PARAMETERS: Mapping[str, frozenset[str]] = {name: frozenset(arguments) for name, arguments in lists(Level.O2, "cuda").exempt.items()}
"""Arguments that stay float32 beside a 16-bit input, which the kernels of CPUs and GPUs take: a batch norm's parameters and statistics."""

STATISTICS: frozenset[str] = frozenset({"running_mean", "running_var"})
"""Arguments that a norm in training writes, though its schema does not say so."""

CARRYING: frozenset[str] = frozenset({"gru", "gru_cell", "lstm_cell"})
"""Layers whose kernels carry a state from step to step in the dtype of their weights. On a CPU torch.autocast casts around the products inside, and the state stays
float32."""

ALIASING: frozenset[str] = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
"""Ops that may give back their input itself, though their schema does not say so."""

DELICATE: Mapping[str, str] = {name: entry.reason for name, entry in native("cuda").items() if entry.rule is Rule.FULL and name not in EXACT}
"""Ops that torch keeps in float32 on GPUs, with the reason: where a policy says nothing of them, they stay float32 everywhere."""
