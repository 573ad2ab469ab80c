"""Operators that take functions: torch.cond, loops, checkpointing in compiled code. A mode sees one call, and what runs inside escapes it.

Checkpointing's function is wrapped to enter the mode again, which dynamo allows there. In the others it does not (they may change nothing outside), so
that a steered region around them is refused, rather than run in another precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mezzo import _torch
from mezzo.eager.constant import constant
from mezzo.policy.registry import Function

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
        "it runs its functions where a policy with entries of its own cannot reach them. Put `with torch.autocast(device, enabled=False):` around it "
        "and cast its inputs, or use a policy that is torch's own lists there"
    )


def within(mode: TorchFunctionMode, function: Function) -> Function:
    """A function that runs under the mode."""

    def body(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return body


@constant
def permit_mode_changes(permitted: bool) -> bool:  # noqa: FBT001
    """Let a checkpointed function enter a mode while dynamo traces it: torch's own switch for side effects that need no replay, as a balanced enter and exit."""
    config = _torch.dynamo_config
    if config is None:
        return permitted
    before: bool = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = permitted
    return before
