"""Take the precision that is in force along, into another thread or to a later moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from mezzo.eager.modules import current_bindings, only
from mezzo.eager.region import current_regions, inside

P = ParamSpec("P")
R = TypeVar("R")


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """Bind a function to the precision that is in force here, whatever thread or moment it is called in.

    Autocast state and module rules belong to a thread: a worker starts without them. A carried function takes them along.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import mezzo, torch
    >>> with mezzo.autocast("cpu", dtype="bfloat16"), ThreadPoolExecutor() as pool:
    ...     pool.submit(mezzo.carry(lambda: torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)).result()
    torch.bfloat16
    """
    regions, bindings = current_regions(), current_bindings()

    @wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        # Outside any region there is nothing to take along. Entering rules again that hold already would cost a visit to every module that has one.
        if not regions or current_bindings() == bindings:
            with inside(*regions):
                return function(*args, **kwargs)
        with only(bindings), inside(*regions):
            return function(*args, **kwargs)

    return carried
