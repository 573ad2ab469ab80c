"""MXNet (b84609d): the op lists of ``mxnet.amp`` for float16 and bfloat16, which differ. The facts lie in ``data/mxnet.json``.

MXNet has several ops where there is one here (a form for equal shapes, one that broadcasts, one
with a number, NumPy's). The data give them in the order in which they are in use: the first that is
in a list decides. What a table of ops cannot say, and how it shows:

- ``Activation`` and ``LeakyReLU`` are float32 there for some values of ``act_type``; here each value is an op, with an entry of its own.
- A number divided by a tensor is float32 there, a tensor divided by one is not; here both are ``div``, and the widest input decides.
- A fused batch norm and ReLU keeps float32 parameters as batch norm does; torch has no such op.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from mezzo._dtypes import dtype_name
from mezzo.policy.presets._tables import require_level, with_promotions
from mezzo.policy.types import Entry, Level, OpLists, OpNames, Rule

LEVELS = (Level.O1,)
"""MXNet has no levels: its one way of working keeps float32 parameters, as O1 does."""

_FACTS: Mapping[str, Any] = json.loads(
    (files(__package__) / "data" / "mxnet.json").read_text(encoding="utf-8")
)


def _names(facts: Mapping[str, Any]) -> OpNames:
    known: dict[str, tuple[str, ...]] = {}
    for ours, theirs in facts["names"].items():
        for name in theirs.split():
            known[name] = (*known.get(name, ()), ours)
    unknown = {
        name: reason
        for reason, lines in facts["without_counterpart"].items()
        for line in lines
        for name in line.split()
    }
    return OpNames(known, unknown)


NAMES = _names(_FACTS)

_WHY_FLOAT32 = {
    "grows exponentially: float16 overflows past 65504": (
        "exp expm1 cosh sinh softplus elu selu ldexp logaddexp"
    ),
    "sums exponentials: float16 overflows past 65504 and loses the small terms": (
        "softmax softmin log_softmax"
    ),
    "a logarithm: infinite at zero, to which small float16 values are rounded": (
        "log log2 log10 log1p lgamma digamma"
    ),
    "steep near the edge of its domain: an input rounded to 16 bits lands far away": (
        "acos asin atanh erfinv tan"
    ),
    "a power or an inverse: small and large inputs leave the range of float16": (
        "pow square reciprocal rsqrt"
    ),
    "adds up or multiplies many values: the result leaves the range of float16, or stops growing": (
        "sum nansum cumsum mean prod std var var_mean trace fft_fft norm linalg_norm"
        " linalg_vector_norm normalize local_response_norm"
    ),
    "means and variances over many values: their error is in every output": (
        "layer_norm group_norm instance_norm"
    ),
    "a loss: 16 bits lose the differences that make the gradient": (
        "cross_entropy smooth_l1_loss ctc_loss"
    ),
    "solves or factors a matrix: rounding errors grow with its condition": (
        "linalg_cholesky cholesky_inverse linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh"
        " linalg_lstsq linalg_matrix_rank linalg_pinv linalg_qr linalg_solve linalg_svd"
        " linalg_tensorinv linalg_tensorsolve linalg_solve_triangular linalg_inv linalg_det"
        " linalg_slogdet diag_embed"
    ),
    "orders values: rounding to 16 bits makes different ones equal": "argsort topk",
}
_REASONS = {op: reason for reason, ops in _WHY_FLOAT32.items() for op in ops.split()}

_BY_RULE = {
    Rule.HALF: "matrix products: tensor cores are fast in 16 bits and accumulate in float32",
    Rule.KEEP: "MXNet's kernel takes both dtypes: runs in the one it is given",
    Rule.PROMOTE: "takes several tensors of one dtype: the widest decides",
    Rule.FULL: "MXNet has no 16-bit kernel for it",
}

_UNLISTED = Entry(Rule.KEEP, "in none of MXNet's lists: runs in the dtype it is given")

# BF16_USE_FP32_PARAMS there, in torch's words; with float16 the kernel itself keeps the parameters
# float32.
_EXEMPT = {"batch_norm": ("running_mean", "running_var", "weight", "bias")}


def listed_as(rule: str, dtype: torch.dtype) -> list[str]:
    """MXNet's own names for the ops under a rule, in its order.

    >>> listed_as("half", torch.bfloat16)
    ['Convolution', 'Deconvolution', 'FullyConnected']
    """
    return [theirs for line in _FACTS["lists"][dtype_name(dtype)][rule] for theirs in line.split()]


def conditional_ops(dtype: torch.dtype) -> list[str]:
    """The ops here that are float32 because of a parameter's value there.

    >>> conditional_ops(torch.bfloat16)
    ['selu']
    """
    return " ".join(_FACTS["conditional"][dtype_name(dtype)].values()).split()


@cache
def lists(level: Level, dtype: torch.dtype) -> OpLists:
    """MXNet's op lists for a 16-bit dtype, in our names."""
    require_level("mxnet", level, LEVELS)
    rules = {
        theirs: Rule(rule)
        for rule in _FACTS["lists"][dtype_name(dtype)]
        for theirs in listed_as(rule, dtype)
    }
    entries = {
        ours: entry
        for ours, theirs in _FACTS["names"].items()
        if (entry := _entry(ours, theirs.split(), rules))
    }
    return OpLists(
        with_promotions(entries) | {op: _because(Rule.FULL, op) for op in conditional_ops(dtype)},
        _UNLISTED,
        _EXEMPT,
    )


def _entry(ours: str, theirs: list[str], rules: Mapping[str, Rule]) -> Entry | None:
    listed = [rules[name] for name in theirs if name in rules]
    return _because(listed[0], ours) if listed else None


def _because(rule: Rule, op: str) -> Entry:
    return Entry(rule, _REASONS.get(op, _BY_RULE[rule]) if rule is Rule.FULL else _BY_RULE[rule])
