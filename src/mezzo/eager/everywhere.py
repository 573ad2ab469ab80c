"""A policy on every kind of device at once, for systems whose switch names none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

from mezzo._hardware import hardware
from mezzo.eager.autocast import autocast
from mezzo.eager.constant import constant

P = ParamSpec("P")
R = TypeVar("R")


@constant
def device_types() -> tuple[str, ...]:
    """The kinds of device that tensors may be on here: the CPU, and the accelerator if there is one.

    >>> device_types()[0]
    'cpu'
    """
    return tuple(dict.fromkeys(("cpu", hardware().device)))


class everywhere:  # noqa: N801 - reads as a phrase, as `autocast` does
    """`autocast` for tensors on any device: as context manager and as decorator.

    >>> import torch
    >>> with everywhere(preset="megengine", dtype="bfloat16"):
    ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    """

    def __init__(self, policy: Any = None, *, enabled: bool = True, **overrides: Any) -> None:
        self._each = [autocast(policy, device_type=device, enabled=enabled, **overrides) for device in device_types()]

    def __enter__(self) -> Self:
        for one in self._each:
            one.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for one in reversed(self._each):
            one.__exit__(*error)  # type: ignore[arg-type]

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, a generator function or a coroutine function: every call runs in the region."""
        for one in self._each:
            function = one(function)
        return function
