"""What a function sees beside its arguments: plain values of its closure and its globals, which a captured program would not see change."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

_PLAIN = (bool, int, float, str)


def values_seen(function: Any) -> Callable[[], Hashable]:
    """A question for the plain values that a function sees now.

    >>> def outer():
    ...     weight = 1.0
    ...     def change(to):
    ...         nonlocal weight
    ...         weight = to
    ...     return change, values_seen(lambda: weight)
    >>> change, ask = outer()
    >>> before = ask()
    >>> change(2.0)
    >>> before, ask()
    ((1.0,), (2.0,))
    """
    if not isinstance(function, FunctionType):
        return tuple
    cells = function.__closure__ or ()
    space, names = function.__globals__, [name for name in function.__code__.co_names if isinstance(function.__globals__.get(name), _PLAIN)]
    if not cells and not names:
        return tuple
    return lambda: (*[content for cell in cells if isinstance(content := _content(cell), _PLAIN)], *[space.get(name) for name in names])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing is in it yet.
        return None
