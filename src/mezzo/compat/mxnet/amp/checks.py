"""What `convert_*` refuses, with MXNet's exception and at least its words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from mezzo.compat.mxnet.amp.lists import Condition, list_conditional_fp32_ops, list_fp32_ops, list_lp16_fp32_ops, list_lp16_ops


def check_lists(dtype: torch.dtype, target_ops: Any, fp32_ops: Any, conditional: Any) -> None:
    """Refuse lists that are none, that overlap, or that name an op which MXNet does not list. A list that is not given is MXNet's own."""
    for name, given in (("target_dtype_ops", target_ops), ("fp32_ops", fp32_ops), ("conditional_fp32_ops", conditional)):
        if given is not None and not isinstance(given, list):
            raise AssertionError(f"{name} should be a list of strs, got {type(given).__name__}.")
    conditions = list_conditional_fp32_ops(dtype) if conditional is None else [_condition(one) for one in conditional]
    lists = {
        "target_dtype_ops": set(list_lp16_ops(dtype) if target_ops is None else target_ops),
        "fp32_ops": set(list_fp32_ops(dtype) if fp32_ops is None else fp32_ops),
        "conditional_fp32_ops": {op for op, _, _ in conditions},
    }
    for (one, ones), (other, others) in combinations(lists.items(), 2):
        if ones & others:
            raise AssertionError(
                f"Ops cannot be in two or more lists. Common ops in {one} and {other}: {sorted(ones & others)}. A list that is not given is MXNet's own: give both."
            )
    known = {*list_lp16_ops(dtype), *list_fp32_ops(dtype), *list_lp16_fp32_ops(dtype), *(op for op, _, _ in list_conditional_fp32_ops(dtype))}
    if illegal := set().union(*lists.values()) - known:
        raise AssertionError(
            "Can only choose ops from one of the four lists for lp16_ops and fp32_ops: 1. amp.list_lp16_ops(target_dtype) 2. amp.list_fp32_ops(target_dtype) "
            f"3. amp.list_lp16_fp32_ops(target_dtype) 4. amp.list_conditional_fp32_ops(target_dtype). Op {sorted(illegal)} not in any of them."
        )


def check_names(excluded: Any) -> list[str]:
    """The names that are left out, or an error."""
    if excluded is None:
        return []
    if isinstance(excluded, str) or not isinstance(excluded, Sequence):
        raise ValueError(  # noqa: TRY004 - MXNet's type
            f"excluded_sym_names must be a list of strings representing the names of the symbols that should not be casted, while received type {type(excluded)}."
        )
    return list(excluded)


def _condition(entry: Any) -> Condition:
    match entry:
        case (str() as op, str() as parameter, list() as values):
            return op, parameter, values
    raise AssertionError(f"conditional_fp32_ops should be a list of (str, str, list of str), got {entry!r}.")
