"""Paddle's names of the ops that run."""

from __future__ import annotations

from functools import cache

from mezzo.policy.presets.paddle import NAMES

_ATEN = {
    "_to_copy": "cast",
    "addmm": "linear_v2",
    "mm": "matmul_v2",
    "baddbmm": "matmul_v2",
    "convolution": "conv2d",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "native_dropout": "dropout",
    "cudnn_batch_norm": "batch_norm",
    "embedding": "lookup_table_v2",
    "embedding_dense": "lookup_table_v2",
    "nll_loss_forward": "nll_loss",
    "threshold": "relu",
    "max_pool2d_with_indices": "pool2d",
    "_adaptive_avg_pool2d": "pool2d",
    "copy_": "assign",
    "clone": "assign",
    "div": "elementwise_div",
    "full": "fill_constant",
    "ones_like": "fill_any_like",
    "zeros_like": "fill_any_like",
}
"""Names of ATen that differ from those of policies."""
_SHADOWED = frozenset({"matmul", "mul", "mean", "fused_gemm_epilogue", "lookup_table", "reshape"})
"""Older names of ops that have a newer one too."""


@cache
def _names_by_op() -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for paddle, ours in NAMES.known.items():
        for op in ours:
            names.setdefault(op, []).append(paddle)
    for found in names.values():
        found.sort(key=lambda name: (name in _SHADOWED, not name.startswith("elementwise_")))
    return names


def op_names(op: str, *, backward: bool = False) -> list[str]:
    """Return Paddle's names of an op, the usual one first; its own name if Paddle has none.

    >>> op_names("softmax"), op_names("pow", backward=True)
    (['softmax'], ['elementwise_pow_grad', 'pow_grad'])
    >>> op_names("_to_copy")
    ['cast']
    """
    names = _names_by_op().get(op) or [_ATEN.get(op, op)]
    return [f"{name}_grad" for name in names] if backward else names


def name_of_aten(aten: str) -> str:
    """Return Paddle's name of an ATen op.

    >>> name_of_aten("add_"), name_of_aten("native_layer_norm_backward"), name_of_aten("mm")
    ('elementwise_add', 'layer_norm_grad', 'matmul_v2')
    """
    base = aten.removesuffix("_data")
    is_gradient = base.endswith("_backward")
    base = base.removesuffix("_backward")
    if base.startswith("_scaled_dot_product_"):
        name = "flash_attn"
    elif base in _ATEN:
        name = _ATEN[base]
    else:
        name = op_names(base.strip("_"))[0]
    return f"{name}_grad" if is_gradient else name
