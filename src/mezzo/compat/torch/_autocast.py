"""`torch.autocast`, `torch.cuda.amp.autocast` and `torch.cpu.amp.autocast` on mezzo's regions.

torch's constructor parses the arguments, so that every error and warning is torch's. Entering and
exiting use mezzo's regions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.compiler import is_dynamo_compiling

from mezzo.autocasting import regions
from mezzo.autocasting.autocast import autocast as mezzo_autocast
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.regions import Region
from mezzo.compat.torch._counterparts import EqualsTorch
from mezzo.policy.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")


_DEVICES = ("cpu", "cuda")

_PROCESS_LOCAL = "_entered"
"""Attribute with per-thread state, which copies and pickles leave out."""


_policy: Policy | None = None
"""The policy of all new regions; None for torch's own lists."""


def use_policy(policy: Policy | None) -> None:
    """Set the policy of all regions that are created from now on."""
    global _policy
    _policy = policy


def current_policy() -> Policy | None:
    """Return the policy of new regions; None for torch's own lists."""
    return _policy


def _dtype(passed: torch.dtype) -> torch.dtype | None:
    """Return the dtype of a region: the policy's if it has one, or the one that is passed."""
    return passed if _policy is None or _policy.dtype is None else None


class autocast(mezzo_autocast, torch_autocast, metaclass=EqualsTorch, counterpart=torch_autocast):
    """`torch.autocast`: the same arguments, strictness and attributes.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    >>> autocast(torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: Expected `device_type` of type `str`, got: `<class 'torch.device'>`
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if is_dynamo_compiling():
            # Dynamo mistakes torch's constructor for a type's. Eager code checks the arguments.
            mezzo_autocast.__init__(
                self, device_type, dtype, _is_enabled(device_type, enabled), cache_enabled
            )
            return
        torch_autocast.__init__(self, device_type, dtype, enabled, cache_enabled)
        # mezzo has no dtypes for other devices: create a disabled region, then replace it by one
        # with torch's settings.
        known = device_type in _DEVICES
        mezzo_autocast.__init__(
            self,
            device_type,
            _dtype(self.fast_dtype),
            self._enabled and known,
            self._cache_enabled,
            policy=_policy,
        )
        if not known:
            self._region = Region(self.device, self._enabled, self.fast_dtype, self._cache_enabled)

    def __enter__(self) -> Self:
        if not is_dynamo_compiling() and regions.is_exporting():
            torch_autocast.__enter__(self)
            return self
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not is_dynamo_compiling() and regions.is_exporting():
            torch_autocast.__exit__(self, exc_type, error, trace)
        else:
            super().__exit__(exc_type, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function. Unlike torch, also works for generators and coroutines."""
        if not callable(function):
            raise TypeError(
                f"autocast()(func) requires a callable, but got {type(function).__name__}. As a"
                " context manager, write `with torch.autocast(device_type=...):`."
            )
        decorated = super().__call__(function)
        # torch.jit.script reads this attribute. setattr, because Python mangles names with two
        # leading underscores inside a class.
        setattr(
            decorated,
            "__script_unsupported",
            "@autocast() decorator is not supported in script mode",
        )
        return decorated

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by attributes, including those of subclasses, as torch does."""
        return _rebuild, (
            type(self),
            {name: value for name, value in self.__dict__.items() if name != _PROCESS_LOCAL},
        )


@dynamo_constant
def _is_enabled(device: str, enabled: bool) -> bool:
    return enabled and (
        device != "cuda" or not torch.cuda.amp.common.amp_definitely_not_available()
    )


def _rebuild(cls: type[autocast], attributes: dict[str, Any]) -> autocast:
    instance = cls.__new__(cls)
    instance.__dict__.update(attributes, **{_PROCESS_LOCAL: {}})
    return instance


class cuda_autocast(autocast, counterpart=torch.cuda.amp.autocast):
    """`torch.cuda.amp.autocast`, which torch deprecates."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        warn_deprecated("autocast", "cuda")
        super().__init__("cuda", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class cpu_autocast(autocast, counterpart=torch.cpu.amp.autocast):
    """`torch.cpu.amp.autocast`, which torch deprecates."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        warn_deprecated("autocast", "cpu")
        super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


def warn_deprecated(name: str, device: str) -> None:
    """Give torch's warning about a deprecated name."""
    if not is_dynamo_compiling():
        warnings.warn(
            f"`torch.{device}.amp.{name}(args...)` is deprecated. Please use"
            f" `torch.amp.{name}('{device}', args...)` instead.",
            FutureWarning,
            stacklevel=3,
        )
