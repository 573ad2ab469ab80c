"""Marks for dynamo, and higher-order operators in function modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.overrides import TorchFunctionMode

from mezzo import _torch
from mezzo._torch import FrameAction, FrameExecStrategy, set_code_exec_strategy
from mezzo.policy.registry import Function

P = ParamSpec("P")
R = TypeVar("R")


def dynamo_constant(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose result dynamo takes as a constant of the code it compiles.

    Does what `torch.compiler.assume_constant_result` does without importing dynamo, which would add
    1.8 seconds to `import mezzo`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def skip_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that dynamo must not compile by itself, nor anything it calls.

    A model that breaks its graph inside a region runs eagerly there, and dynamo tries to compile
    every Python function on the way: entering the region, and the mode at each op. Does what
    dynamo's `skip_code` does without importing dynamo.
    """
    # In a torch without these names dynamo compiles code that is not needed, with equal results.
    if FrameAction and FrameExecStrategy and set_code_exec_strategy:
        set_code_exec_strategy(
            cast("Any", function).__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        )
    return function


WRAPPED_OPERATORS = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})
"""Higher-order operators whose function runs under the mode."""

REFUSED_OPERATORS = frozenset({"cond", "while_loop", "map", "map_impl", "scan", "associative_scan"})
"""Higher-order operators whose functions run where no mode reaches them."""

REFUSAL = (
    "it runs its functions where a policy with its own op rules cannot be applied. Put `with"
    " torch.autocast(device, enabled=False):` around it and cast its inputs, or use a policy"
    " with torch's own lists there"
)
"""Reason for the refused operators, with the remedy."""


def higher_order_operators() -> dict[Function, str]:
    """Return the wrapped and refused operators that the installed torch has, with their names."""
    namespace = torch.ops.higher_order
    names = WRAPPED_OPERATORS | REFUSED_OPERATORS
    return {getattr(namespace, name): name for name in names if hasattr(namespace, name)}


def under_mode(mode: TorchFunctionMode, function: Function) -> Function:
    """Wrap a function so that it runs under a mode."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return wrapped


@dynamo_constant
def permit_mode_changes(permitted: bool) -> bool:  # noqa: FBT001
    """Set whether dynamo traces checkpointed functions that enter a mode; return the old value.

    This is torch's setting for side effects that need no replay, such as a balanced enter and exit.
    """
    config = _torch.dynamo_config
    if config is None:
        return permitted
    before: bool = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = permitted
    return before
