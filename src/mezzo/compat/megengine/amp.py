"""MegEngine's `amp`: `autocast`, `GradScaler`, `enabled`, and tensor formats."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from types import ModuleType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo._dtypes import dtype_name, parse_dtype
from mezzo.autocasting.autocast import (
    autocast_all_devices,
    disable_autocast,
    set_thread_region,
    thread_region,
)
from mezzo.autocasting.regions import current_regions
from mezzo.compat.megengine.autodiff import GradManager, Outputs, listed
from mezzo.scaling.gradients import unscale_tensors
from mezzo.scaling.scale_state import ScaleRule, ScaleState, next_state

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: images and volumes."""


# MegEngine's call shape.
def convert_tensor_format(x: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """A tensor with its channels last, itself where it is converted in place. What has neither 4 nor 5 dimensions is left alone.

    >>> convert_tensor_format(torch.ones(1, 3, 2, 2)).is_contiguous(memory_format=torch.channels_last)
    True
    """
    layout = _FORMATS.get(x.dim())
    if layout is None:
        return x
    if not inplace:
        return x.contiguous(memory_format=layout)
    x.data = x.data.contiguous(memory_format=layout)
    return x


# MegEngine's call shape.
def convert_module_format(module: ModuleT, inplace: bool = True) -> ModuleT:
    """A module whose parameters and buffers have their channels last; a copy unless it is converted in place.

    >>> convert_module_format(nn.Conv2d(3, 8, 3)).weight.is_contiguous(memory_format=torch.channels_last)
    True
    """
    converted = module if inplace else copy.deepcopy(module)
    for one in (*converted.parameters(), *converted.buffers()):
        convert_tensor_format(one)
    return converted


PRESET = "megengine"

_low = torch.float16


def is_on() -> bool:
    """Whether precision is automatic in this thread just now."""
    return any(region.enabled for region in current_regions())


def turn(*, on: bool) -> None:
    """Throw the switch. Off is off inside a region too, until that region ends."""
    disable_autocast()
    if on:
        set_thread_region(autocast_all_devices(preset=PRESET, dtype=_low))
    elif is_on():
        set_thread_region(autocast_all_devices(preset=PRESET, enabled=False))


def low_dtype() -> str:
    """The 16-bit dtype in force, or the one that the switch would use."""
    return next(
        (dtype_name(region.computes_in) for region in current_regions() if region.enabled),
        dtype_name(_low),
    )


def set_low_dtype(word: str | torch.dtype) -> None:
    """Set the switch's 16-bit dtype; what it has switched on goes on in that one."""
    global _low
    _low = parse_dtype(word, what="low_prec_dtype")
    if thread_region() is not None and is_on():
        turn(on=True)


def require_float32(word: str | torch.dtype) -> None:
    """Refuse any other high precision: an op that is to be exact runs in float32."""
    parse_dtype(word, allowed=(torch.float32,), what="high_prec_dtype")


class autocast(autocast_all_devices):  # noqa: N801 - MegEngine's spelling
    """MegEngine's rules inside, as a context manager or a decorator.

    `enabled=False` switches an outer region off for its own duration; in MegEngine it could not.

    >>> @autocast()
    ... def product(x):
    ...     return x @ x
    >>> product(torch.ones(1, 1)).dtype
    torch.float16
    """

    def __init__(
        self,
        enabled: bool = True,
        low_prec_dtype: str | torch.dtype = "float16",
        high_prec_dtype: str | torch.dtype = "float32",
    ) -> None:
        if not is_dynamo_compiling():
            require_float32(high_prec_dtype)
        self.enabled, self.high_prec_dtype = enabled, "float32"
        low = parse_dtype(low_prec_dtype, what="low_prec_dtype")
        self.low_prec_dtype = dtype_name(low)
        self._switched: dict[int, list[AbstractContextManager[Any] | None]] = {}
        super().__init__(preset=PRESET, dtype=low, enabled=enabled)

    def __enter__(self) -> Self:
        if not is_dynamo_compiling():
            self._switched.setdefault(get_ident(), []).append(thread_region())
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if is_dynamo_compiling():
            return
        before = self._switched[get_ident()].pop()
        # What was assigned to the switch inside ends with the region, as there.
        if thread_region() is not before:
            disable_autocast()
            if before is not None:
                set_thread_region(before)


class GradScaler:
    """A scale that grows and backs off; gradients that are not finite are dropped, so that the optimizer finds none.

    `growth_interval=0` keeps the scale as it is, as does `growth_factor=0`. A static scale drops
    bad gradients too, which in MegEngine reach the parameters.

    >>> from torch import nn
    >>> from mezzo.compat.megengine.autodiff import GradManager
    >>> net = nn.Linear(2, 1)
    >>> gm, scaler = GradManager().attach(net.parameters()), GradScaler(growth_interval=1)
    >>> with gm:
    ...     scaler.backward(gm, net(torch.ones(1, 2)).sum())
    >>> net.weight.grad, scaler.scale_factor
    (tensor([[1., 1.]]), 32.0)
    """

    def __init__(
        self,
        init_scale: float = 2.0**4,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale_factor = float(init_scale)
        """What gradients are multiplied by; may be assigned."""
        self.growth_factor, self.backoff_factor, self.growth_interval = (
            float(growth_factor),
            float(backoff_factor),
            growth_interval,
        )
        self._growth_tracker = 0
        self._found_non_finite = False
        # Numbers that cannot be meant are refused here, and not at the first update.
        ScaleState(self.scale_factor)
        self._rule()

    def backward(
        self,
        gm: GradManager,
        y: Outputs = None,
        dy: Outputs = None,
        *,
        unscale_grad: bool = True,
        update_scale: bool | str = "if_unscale_grad",
    ) -> None:
        """Backward with `dy` times the scale, then `unscale` and `update`; with `unscale_grad=False` neither, for gradients that go on adding up."""
        outputs = listed(y)
        given: Sequence[Any] = (
            [torch.ones_like(one) for one in outputs] if dy is None else listed(dy)
        )
        gm.backward(outputs, [one * self.scale_factor for one in given])
        if unscale_grad:
            self.unscale(gm.attached_tensors())
            if update_scale:
                self.update()

    def unscale(self, grad_tensors: Iterable[torch.Tensor]) -> GradScaler:
        """Divide the gradients of tensors by the scale; where one is not finite, all are set to None."""
        tensors = [one for one in grad_tensors if one is not None and one.grad is not None]
        self._found_non_finite = (
            unscale_tensors(tensors, self.scale_factor) or self._found_non_finite
        )
        if self._found_non_finite:
            for one in tensors:
                one.grad = None
        return self

    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale to what `unscale` found since the last time, or set it. A static scale stays."""
        found, self._found_non_finite = self._found_non_finite, False
        rule = self._rule()
        if not rule.dynamic:
            return
        if new_scale is not None:
            self.scale_factor = ScaleState(float(new_scale)).scale
            return
        after = next_state(
            ScaleState(self.scale_factor, self._growth_tracker), rule, found_nonfinite=found
        )
        self.scale_factor, self._growth_tracker = after.scale, after.growth_tracker

    def state_dict(self) -> dict[str, Any]:
        """The scale, its rule and the good steps so far."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for name in _SAVED:
            setattr(self, name, state[name])

    def _rule(self) -> ScaleRule:
        if self.growth_factor == 0.0 or self.growth_interval == 0:
            return ScaleRule(dynamic=False)
        return ScaleRule(self.growth_factor, self.backoff_factor, self.growth_interval)


_SAVED = ("scale_factor", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


__all__ = ["GradScaler", "autocast", "convert_module_format", "convert_tensor_format"]


class _Amp(ModuleType):
    """This module, with attributes that do something when they are assigned."""

    @property
    def enabled(self) -> bool:
        """Whether precision is automatic here and now, by the switch or by a region."""
        return is_on()

    @enabled.setter
    def enabled(self, on: bool) -> None:
        turn(on=bool(on))

    @property
    def low_prec_dtype(self) -> str:
        """The 16-bit dtype in force, or the one that the switch would use."""
        return low_dtype()

    @low_prec_dtype.setter
    def low_prec_dtype(self, dtype: str) -> None:
        set_low_dtype(dtype)

    @property
    def high_prec_dtype(self) -> str:
        """float32."""
        return "float32"

    @high_prec_dtype.setter
    def high_prec_dtype(self, dtype: str) -> None:
        require_float32(dtype)


sys.modules[__name__].__class__ = _Amp
