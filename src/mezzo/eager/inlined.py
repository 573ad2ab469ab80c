"""Functions that dynamo traces where they are called from compiled code, and never compiles for themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from mezzo._torch import FrameAction, FrameExecStrategy, set_code_exec_strategy

P = ParamSpec("P")
R = TypeVar("R")


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that runs as it is, with all that it calls, wherever it is not part of something that dynamo compiles.

    A model that breaks its graph inside a region runs eagerly there, and dynamo tries every Python function that it comes by: entering the region, and the mode at each op.
    What `torch._dynamo.eval_frame.skip_code` does, without importing dynamo for it.
    """
    # torch's own business: where it is no more, everything runs as before, with code compiled that nobody needs.
    if FrameAction and FrameExecStrategy and set_code_exec_strategy:
        set_code_exec_strategy(cast("Any", function).__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function
