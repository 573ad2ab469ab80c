"""Marks that dynamo reads, and operators that take functions."""

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
    """Mark a function whose answer dynamo takes as a constant of the code it compiles.

    What `torch.compiler.assume_constant_result` does, without importing dynamo for it: that takes
    1.8 seconds, which everybody who imports mezzo would wait.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def skip_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that runs as it is, with all that it calls, wherever it is not part of something that dynamo compiles.

    A model that breaks its graph inside a region runs eagerly there, and dynamo tries every Python
    function that it comes by: entering the region, and the mode at each op. What
    `torch._dynamo.eval_frame.skip_code` does, without importing dynamo for it.
    """
    # torch's own business: where it is no more, everything runs as before, with code compiled that
    # nobody needs.
    if FrameAction and FrameExecStrategy and set_code_exec_strategy:
        set_code_exec_strategy(
            cast("Any", function).__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        )
    return function


CARRIED = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})
"""Operators whose function is steered inside."""

REFUSED = frozenset({"cond", "while_loop", "map", "map_impl", "scan", "associative_scan"})
"""Operators whose functions cannot be steered."""


def operators() -> dict[Function, str]:
    """The listed operators that this torch has."""
    known = torch.ops.higher_order
    return {getattr(known, name): name for name in CARRIED | REFUSED if hasattr(known, name)}


def refusal() -> str:
    """Why a steered region cannot reach into an operator, and what to do."""
    return (
        "it runs its functions where a policy with entries of its own cannot reach them. Put `with"
        " torch.autocast(device, enabled=False):` around it and cast its inputs, or use a policy"
        " that is torch's own lists there"
    )


def under_mode(mode: TorchFunctionMode, function: Function) -> Function:
    """A function that runs under the mode."""

    def body(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return body


@dynamo_constant
def permit_mode_changes(permitted: bool) -> bool:  # noqa: FBT001
    """Let a checkpointed function enter a mode while dynamo traces it: torch's own switch for side effects that need no replay, as a balanced enter and exit."""
    config = _torch.dynamo_config
    if config is None:
        return permitted
    before: bool = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = permitted
    return before
