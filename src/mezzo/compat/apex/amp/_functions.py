"""Functions of the user's own, put under a rule of O1: by decorating them, or by name in the module that holds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from mezzo.autocasting.op_table import Action
from mezzo.compat.apex.amp._amp_state import _amp_state
from mezzo.compat.apex.amp._casts import registered
from mezzo.policy.registry import registry
from mezzo.policy.types import Rule

P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that O1 casts its inputs to float16. Its body runs without further casts."""
    return _under(Rule.HALF, fn)


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that O1 casts its inputs to float32. Its body runs without further casts, and is float32 indeed."""
    return _under(Rule.FULL, fn)


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that O1 casts its inputs to the widest dtype among them."""
    return _under(Rule.PROMOTE, fn)


def register_half_function(module: Any, name: str) -> None:
    """Put a function of a module under `half_function`, before `initialize`; one of torch's own changes its list."""
    _register(Rule.HALF, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Put a function of a module under `float_function`, before `initialize`; one of torch's own changes its list."""
    _register(Rule.FULL, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Put a function of a module under `promote_function`, before `initialize`; one of torch's own changes its list."""
    _register(Rule.PROMOTE, module, name)


def _under(rule: Rule, function: Callable[P, R]) -> Callable[P, R]:
    name = getattr(function, "__name__", type(function).__name__)
    action = Action(name, rule, "put under this rule by the user")

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        handle = _amp_state.handle
        # At the other levels Apex leaves such functions alone.
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        result: R = handle.steering.steer(function, action, args, kwargs)
        return result

    return wrapped


def _register(rule: Rule, module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    function = getattr(module, name)
    known = registry().name_of(function)
    if known is None:
        setattr(module, name, _under(rule, function))
    else:
        # torch's own function stays in its place, for the compiler's sake: the casts of the next `initialize` treat it so.
        registered[known] = rule
