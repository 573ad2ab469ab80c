"""Functions whose answers compiled code takes as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose answer dynamo takes as a constant of the code it compiles.

    What `torch.compiler.assume_constant_result` does, without importing dynamo for it: that takes 1.8 seconds, which everybody who imports mezzo would wait.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
