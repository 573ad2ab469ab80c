"""Operators that take functions (torch.cond, loops, checkpointing in compiled code): a mode sees one call, and what runs inside escapes it.

So the functions are wrapped to enter the mode again. Listed one by one; an operator that is not listed keeps its functions as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mezzo.policy.registry import Function

BODIES: Mapping[str, int | None] = {
    "cond": None,
    "while_loop": None,
    "map": None,
    "map_impl": None,
    "scan": None,
    "associative_scan": None,
    "wrap": None,
    "wrap_with_set_grad_enabled": None,
    "wrap_activation_checkpoint": None,
    "tag_activation_checkpoint": None,
    "invoke_subgraph": None,
    # forward is steered as in eager; backward, the second function, never is
    "autograd_function_apply": 1,
}
"""Name → how many of the functions among its arguments are wrapped; None wraps all."""


def operators() -> dict[Function, str]:
    """The listed operators that this torch has."""
    known = torch._ops._higher_order_ops
    return {known[name]: name for name in BODIES if name in known}


def wrapped(mode: TorchFunctionMode, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with their functions wrapped."""
    left = len(args) if BODIES[name] is None else BODIES[name]
    changed = []
    for value in args:
        if left and callable(value) and not isinstance(value, torch.Tensor):
            left -= 1
            changed.append(_within(mode, value))
        else:
            changed.append(value)
    return tuple(changed)


def _within(mode: TorchFunctionMode, function: Function) -> Function:
    def body(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return body
