"""Op lists of MXNet (b84609d): ``mxnet.amp`` has different ones for float16 and bfloat16.

The lists are in ``data/mxnet.json``. MXNet has several ops where there is one here (for equal
shapes, for broadcasting, with a number, NumPy's). The data list them in order of use, and the first
one that is in a list decides.

Where MXNet's lists do not fit a table of ops:

- ``Activation`` and ``LeakyReLU`` are float32 for some values of ``act_type``. Each value is an op
  here, with its own entry.
- A number divided by a tensor is float32, a tensor divided by a number is not. Both are ``div``
  here, and the widest input decides.
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
"""MXNet has no levels: it keeps float32 parameters, as O1 does."""

_FACTS: Mapping[str, Any] = json.loads(
    (files(__package__) / "data" / "mxnet.json").read_text(encoding="utf-8")
)


def _names(facts: Mapping[str, Any]) -> OpNames:
    known: dict[str, tuple[str, ...]] = {}
    for ours, foreign in facts["names"].items():
        for name in foreign.split():
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
    "a logarithm: float16 rounds small values to zero, where it is infinite": (
        "log log2 log10 log1p lgamma digamma"
    ),
    "steep at the edge of its domain: rounding the input changes the result much": (
        "acos asin atanh erfinv tan"
    ),
    "a power or an inverse: results of small and large inputs exceed the range of float16": (
        "pow square reciprocal rsqrt"
    ),
    "sums or multiplies many values: float16 overflows, or small terms are lost": (
        "sum nansum cumsum mean prod std var var_mean trace fft_fft norm linalg_norm"
        " linalg_vector_norm normalize local_response_norm"
    ),
    "computes a mean and a variance, whose errors are in every output": (
        "layer_norm group_norm instance_norm"
    ),
    "a loss: 16 bits lose the small differences that make up the gradient": (
        "cross_entropy smooth_l1_loss ctc_loss"
    ),
    "solves or factorizes a matrix: rounding errors grow with its condition number": (
        "linalg_cholesky cholesky_inverse linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh"
        " linalg_lstsq linalg_matrix_rank linalg_pinv linalg_qr linalg_solve linalg_svd"
        " linalg_tensorinv linalg_tensorsolve linalg_solve_triangular linalg_inv linalg_det"
        " linalg_slogdet diag_embed"
    ),
    "orders values: rounding to 16 bits makes different values equal": "argsort topk",
}
_REASONS = {op: reason for reason, ops in _WHY_FLOAT32.items() for op in ops.split()}

_BY_RULE = {
    Rule.HALF: "a matrix product: tensor cores are fast in 16 bits and accumulate in float32",
    Rule.KEEP: "MXNet's kernel supports both dtypes: runs in the dtype of its inputs",
    Rule.PROMOTE: "needs all inputs in one dtype: the widest input decides",
    Rule.FULL: "MXNet has no 16-bit kernel for it",
}

_UNLISTED = Entry(Rule.KEEP, "in none of MXNet's lists: runs in the dtype of its inputs")

# BF16_USE_FP32_PARAMS in MXNet. With float16 the kernel itself uses float32 parameters.
_EXEMPT = {"batch_norm": ("running_mean", "running_var", "weight", "bias")}


def listed_as(rule: str, dtype: torch.dtype) -> list[str]:
    """Return MXNet's names of the ops under a rule, in MXNet's order.

    >>> listed_as("half", torch.bfloat16)
    ['Convolution', 'Deconvolution', 'FullyConnected']
    """
    return [
        foreign for line in _FACTS["lists"][dtype_name(dtype)][rule] for foreign in line.split()
    ]


def conditional_ops(dtype: torch.dtype) -> list[str]:
    """Return the ops that are float32 in MXNet because of the value of a parameter.

    >>> conditional_ops(torch.bfloat16)
    ['selu']
    """
    return " ".join(_FACTS["conditional"][dtype_name(dtype)].values()).split()


@cache
def lists(level: Level, dtype: torch.dtype) -> OpLists:
    """Return MXNet's op lists for a 16-bit dtype."""
    require_level("mxnet", level, LEVELS)
    rules = {
        foreign: Rule(rule)
        for rule in _FACTS["lists"][dtype_name(dtype)]
        for foreign in listed_as(rule, dtype)
    }
    entries = {
        ours: entry
        for ours, foreign in _FACTS["names"].items()
        if (entry := _entry(ours, foreign.split(), rules))
    }
    return OpLists(
        with_promotions(entries) | {op: _because(Rule.FULL, op) for op in conditional_ops(dtype)},
        _UNLISTED,
        _EXEMPT,
    )


def _entry(ours: str, foreign: list[str], rules: Mapping[str, Rule]) -> Entry | None:
    listed = [rules[name] for name in foreign if name in rules]
    return _because(listed[0], ours) if listed else None


def _because(rule: Rule, op: str) -> Entry:
    return Entry(rule, _REASONS.get(op, _BY_RULE[rule]) if rule is Rule.FULL else _BY_RULE[rule])
