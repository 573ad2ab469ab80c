"""OneFlow's `amp`: `autocast`, `GradScaler`, `StaticGradScaler`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.autocast import autocast as _autocast
from mezzo.scaling.scaler import GradScaler as Scaler

PRESET = "oneflow"

_DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""What a region computes in where no dtype is said."""


class autocast(_autocast):  # noqa: N801 - OneFlow's spelling
    """OneFlow's lists inside: listed ops in 16 bits, what follows them if all its inputs are, everything default_rule in float32.

    On a CPU too, where OneFlow warns and does nothing.

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
        if not is_dynamo_compiling() and device_type not in _DTYPES:
            raise UnsupportedError(
                f"User specified autocast device_type must be 'cuda' or 'cpu', got {device_type!r}."
            )
        super().__init__(
            device_type,
            _DTYPES[device_type] if dtype is None else dtype,
            enabled,
            cache_enabled,
            preset=PRESET,
        )


@dataclass(frozen=True)
class GradScaler:
    """A scale that grows and backs off, never below 1.

    >>> GradScaler(init_scale=2**12, growth_interval=1000).scaler().get_scale()
    4096.0
    """

    init_scale: float = 2.0**16
    """What the scale starts from."""
    growth_factor: float = 2.0
    """What it is multiplied by after `growth_interval` good steps in a row."""
    backoff_factor: float = 0.5
    """What it is multiplied by after a bad step: 1 / `growth_factor`."""
    growth_interval: int = 2000
    """Good steps in a row before the scale grows."""

    def __post_init__(self) -> None:
        if self.backoff_factor != 1.0 / self.growth_factor:
            raise PolicyError(
                "Only support 1.0/growth_factor as backoff_factor at the moment, got"
                f" {self.backoff_factor}: it must be {1.0 / self.growth_factor:g}."
            )
        self.scaler()

    def scaler(self) -> Scaler:
        """The scaler of a graph."""
        return Scaler(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=1.0,
        )


@dataclass(frozen=True)
class StaticGradScaler:
    """A scale that stays. Steps whose gradients are not finite are skipped; OneFlow lets them through.

    >>> StaticGradScaler(128.0).scaler().get_scale()
    128.0
    """

    scale_factor: float
    """The scale."""

    def __post_init__(self) -> None:
        if self.scale_factor <= 0.0:
            raise PolicyError(
                f"StaticGradScaler's scale_factor must > 0.0, got {self.scale_factor}."
            )

    def scaler(self) -> Scaler:
        """The scaler of a graph."""
        return Scaler(init_scale=self.scale_factor, dynamic=False)


__all__ = ["GradScaler", "StaticGradScaler", "autocast"]
