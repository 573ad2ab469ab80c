"""`oneflow.amp`: `autocast`, `GradScaler`, `StaticGradScaler`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.autocast import autocast as _autocast
from mezzo.compat._missing import module_getattr
from mezzo.compat.oneflow._substitutions import SUBSTITUTIONS
from mezzo.scaling.scaler import GradScaler as EngineScaler

__all__ = ["GradScaler", "StaticGradScaler", "autocast"]

_PRESET = "oneflow"

_DEFAULT_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""Dtype of a region when none is passed."""


class autocast(_autocast):
    """`oneflow.autocast`: autocast by OneFlow's op lists.

    Ops of its white list run in 16 bits, those of its gray and clear lists if all their inputs are
    16-bit, all others in float32. Differs from OneFlow: also works on CPU, where OneFlow warns and
    does nothing.

    >>> with autocast("cpu"):
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.bfloat16
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if not is_dynamo_compiling() and device_type not in _DEFAULT_DTYPES:
            raise UnsupportedError(
                f"User specified autocast device_type must be 'cuda' or 'cpu', got {device_type!r}."
            )
        super().__init__(
            device_type,
            _DEFAULT_DTYPES[device_type] if dtype is None else dtype,
            enabled,
            cache_enabled,
            preset=_PRESET,
        )


def _check_numbers(scaler: str, **numbers: Any) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise PolicyError(f"{scaler}'s {name} must be a number > 0.0, got {number!r}.")


@dataclass(frozen=True)
class GradScaler:
    """`oneflow.amp.GradScaler`: settings of a dynamic loss scale, which stays at least 1.

    >>> GradScaler(init_scale=2**12, growth_interval=1000).make_scaler().get_scale()
    4096.0
    """

    init_scale: float = 2.0**16
    """Initial loss scale."""
    growth_factor: float = 2.0
    """Factor of the scale after `growth_interval` successful steps in a row."""
    backoff_factor: float = 0.5
    """Factor of the scale after a skipped step; must be 1 / `growth_factor`."""
    growth_interval: int = 2000
    """Successful steps in a row before the scale grows."""

    def __post_init__(self) -> None:
        _check_numbers("GradScaler", **vars(self))
        if self.backoff_factor != 1.0 / self.growth_factor:
            raise PolicyError(
                "Only support 1.0/growth_factor as backoff_factor at the moment, got"
                f" {self.backoff_factor}: it must be {1.0 / self.growth_factor:g}."
            )
        # Raises for invalid numbers, here instead of at `set_grad_scaler`.
        self.make_scaler()

    def make_scaler(self) -> EngineScaler:
        """Return the `mezzo.GradScaler` of a graph."""
        return EngineScaler(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=1.0,
        )


@dataclass(frozen=True)
class StaticGradScaler:
    """`oneflow.amp.StaticGradScaler`: a constant loss scale.

    Differs from OneFlow: steps with non-finite gradients are skipped.

    >>> StaticGradScaler(128.0).make_scaler().get_scale()
    128.0
    """

    scale_factor: float
    """The loss scale."""

    def __post_init__(self) -> None:
        _check_numbers("StaticGradScaler", scale_factor=self.scale_factor)

    def make_scaler(self) -> EngineScaler:
        """Return the `mezzo.GradScaler` of a graph."""
        return EngineScaler(init_scale=self.scale_factor, dynamic=False)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.amp)
