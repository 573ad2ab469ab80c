"""Hooks of observed modules, which copies of the modules do not have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.compiler import is_compiling
from torch.jit import is_tracing  # type: ignore[attr-defined]


class ModuleHook:
    """A forward hook that only the module itself runs, not a copy of it and not a traced one.

    Scripts copy and save models that are observed, whole: `copy.deepcopy(model)` for an average of
    the weights, `torch.save(model, path)`. The hook of a copy does nothing, and a file with it can
    be read without mezzo.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function, except in code that is compiled or traced: it must not keep this."""
        if not is_compiling() and not is_tracing():
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it as a method that takes all arguments and returns None."""
        return getattr, (nullcontext(), "__exit__")
