"""A module's own `forward`, replaced and put back.

Hooks would be simpler, but compiled code ignores those added later and breaks on those that enter contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def replace_forward(module: nn.Module, mark: str, make: Callable[[Forward, bool], Forward]) -> Callable[[], None]:
    """Replace the forward of one module; what comes back puts it back.

    `make` gets the function that was there, and whether it is bound to its module already, and gives one of `self` and the arguments. A forward with the same `mark`
    gives way: what it had replaced is replaced anew.
    """
    own = module.__dict__.get("forward")
    function = getattr(own, mark, own) or type(module).forward
    forward = make(function, own is not None and function is not type(module).forward)
    setattr(forward, mark, function)
    # A bound method, so that a deep copy of the model gets one bound to the copy.
    module.__dict__["forward"] = MethodType(forward, module)
    return partial(_put_back, module, own)


def _put_back(module: nn.Module, own: Any) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = own
