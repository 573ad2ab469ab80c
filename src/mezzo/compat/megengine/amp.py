"""`megengine.amp`: `autocast`, `GradScaler`, channels-last conversion, and assignable settings.

`amp.enabled`, `amp.low_prec_dtype` and `amp.high_prec_dtype` take effect when they are assigned, as
in MegEngine: this module's class is replaced by one with properties.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any, Self, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo._dtypes import dtype_name, parse_dtype
from mezzo._errors import ScalerError
from mezzo.autocasting.autocast import (
    autocast_all_devices,
    disable_autocast,
    set_thread_region,
    thread_region,
)
from mezzo.autocasting.regions import current_regions
from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine.autodiff import GradManager, Outputs, as_list, check_outputs
from mezzo.scaling.gradients import unscale_tensors
from mezzo.scaling.scale_state import ScaleRule, ScaleState, next_state

__all__ = ["GradScaler", "autocast", "convert_module_format", "convert_tensor_format"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_PRESET = "megengine"

_default_dtype = torch.float16
"""The 16-bit dtype that `amp.enabled = True` uses."""


class autocast(autocast_all_devices):
    """`megengine.amp.autocast`: autocast by MegEngine's op lists, as context manager or decorator.

    Differs from MegEngine: `enabled=False` disables an outer region inside this one.

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
            _check_flag(enabled)
            _require_float32(high_prec_dtype)
        self.enabled, self.high_prec_dtype = enabled, "float32"
        low = parse_dtype(low_prec_dtype, what="low_prec_dtype")
        self.low_prec_dtype = dtype_name(low)
        self._outer_switches: dict[int, list[AbstractContextManager[Any] | None]] = {}
        super().__init__(preset=_PRESET, dtype=low, enabled=enabled)

    def __enter__(self) -> Self:
        if not is_dynamo_compiling():
            self._outer_switches.setdefault(get_ident(), []).append(thread_region())
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if is_dynamo_compiling():
            return
        outer = self._outer_switches[get_ident()].pop()
        # As in MegEngine, an assignment to amp.enabled inside ends with the region.
        if thread_region() is not outer:
            disable_autocast()
            if outer is not None:
                set_thread_region(outer)


class GradScaler:
    """`megengine.amp.GradScaler`: if a gradient is non-finite, all are set to None.

    The optimizer then skips those parameters. `growth_interval=0` or `growth_factor=0` make the
    scale static. Differs from MegEngine: with a static scale non-finite gradients are removed too,
    instead of reaching the parameters.

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
        """The loss scale; assignable."""
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self._growth_tracker = 0
        self._found_non_finite = False
        self._unscaled: dict[int, ref[torch.Tensor]] = {}
        self._accumulates = False
        """Whether gradients are scaled because of `unscale_grad=False`."""
        # Both raise for invalid numbers, here instead of at the first update.
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
        """Run backward with `dy` times the scale, then `unscale` and `update`.

        With `unscale_grad=False` do neither, to accumulate scaled gradients. Differs from
        MegEngine: gradients that an earlier call unscaled, such as those of another loss with its
        own scaler, are not divided again.
        """
        if not isinstance(gm, GradManager):
            raise TypeError(
                f"scaler.backward(gm, y) takes a GradManager first, got {type(gm).__name__}. Call"
                " scaler.backward(gm, loss)."
            )
        outputs, output_grads = as_list(y), as_list(dy)
        check_outputs(outputs, output_grads)
        if dy is None:
            output_grads = [torch.ones_like(output) for output in outputs]
        scaled_grads = [gradient * self.scale_factor for gradient in output_grads]
        if not unscale_grad or self._accumulates:
            gm.backward(outputs, scaled_grads)
            self._accumulates = True
            earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        else:
            with _set_aside(gm.attached_tensors()) as earlier:
                gm.backward(outputs, scaled_grads)
        if unscale_grad:
            self.unscale(gm.attached_tensors())
            if not self._found_non_finite:
                for tensor, gradient in earlier:
                    tensor.grad = gradient if tensor.grad is None else gradient.add_(tensor.grad)
            if update_scale:
                self.update()

    def unscale(self, grad_tensors: Iterable[torch.Tensor]) -> GradScaler:
        """Unscale gradients; if one is non-finite, set all to None. This synchronizes.

        Raises `ScalerError` for gradients that were unscaled since the last `update`.
        """
        if isinstance(grad_tensors, torch.Tensor):
            grad_tensors = [grad_tensors]
        if isinstance(grad_tensors, nn.Module) or not isinstance(grad_tensors, Iterable):
            raise TypeError(
                f"unscale() takes tensors, got {type(grad_tensors).__name__}. Pass"
                " gm.attached_tensors()."
            )
        self._accumulates = False
        tensors = [
            tensor for tensor in grad_tensors if tensor is not None and tensor.grad is not None
        ]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        self._check_scaled(gradients)
        self._found_non_finite = (
            unscale_tensors(tensors, self.scale_factor) or self._found_non_finite
        )
        if self._found_non_finite:
            for tensor in tensors:
                tensor.grad = None
        else:
            self._unscaled |= {id(gradient): ref(gradient) for gradient in gradients}
        return self

    def _check_scaled(self, gradients: Iterable[torch.Tensor]) -> None:
        """Raise if a gradient was unscaled since the last update."""
        for gradient in gradients:
            unscaled = self._unscaled.get(id(gradient))
            if unscaled is not None and unscaled() is gradient:
                raise ScalerError(
                    "unscale() was already called for these gradients since the last update()."
                    " Call it once, after the last backward(). To accumulate gradients, pass"
                    " unscale_grad=False to every scaler.backward() but the last."
                )

    def update(self, new_scale: float | None = None) -> None:
        """Grow the scale or back off after `unscale`, or set it. A static scale never changes."""
        found_nonfinite, self._found_non_finite = self._found_non_finite, False
        self._unscaled.clear()
        rule = self._rule()
        if not rule.dynamic:
            return
        if new_scale is not None:
            self.scale_factor = ScaleState(float(new_scale)).scale
            return
        state = ScaleState(self.scale_factor, self._growth_tracker)
        state = next_state(state, rule, found_nonfinite=found_nonfinite)
        self.scale_factor, self._growth_tracker = state.scale, state.growth_tracker

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its rule and the growth tracker."""
        return {name: getattr(self, name) for name in _STATE_FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; nothing is changed if an entry is missing."""
        missing = [name for name in _STATE_FIELDS if name not in state]
        if missing:
            raise KeyError(
                f"The state of a GradScaler needs {', '.join(missing)}; it has"
                f" {', '.join(map(str, state)) or 'no entries'}. Pass scaler.state_dict()."
            )
        for name in _STATE_FIELDS:
            setattr(self, name, state[name])

    def _rule(self) -> ScaleRule:
        if self.growth_factor == 0.0 or self.growth_interval == 0:
            return ScaleRule(dynamic=False)
        return ScaleRule(self.growth_factor, self.backoff_factor, self.growth_interval)


@contextmanager
def _set_aside(tensors: list[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Remove gradients inside; yield them with their tensors. Put them back if the body raises."""
    kept = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        yield kept
    except BaseException:
        for tensor, gradient in kept:
            tensor.grad = gradient
        raise


_STATE_FIELDS = (
    "scale_factor",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by number of dimensions (images, volumes)."""


def convert_tensor_format(x: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """Convert a 4- or 5-dimensional tensor to channels-last; return others unchanged.

    >>> image = convert_tensor_format(torch.ones(1, 3, 2, 2))
    >>> image.is_contiguous(memory_format=torch.channels_last)
    True
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"convert_tensor_format takes a tensor, got {type(x).__name__}.")
    memory_format = _CHANNELS_LAST.get(x.dim())
    if memory_format is None:
        return x
    if not inplace:
        return x.contiguous(memory_format=memory_format)
    x.data = x.data.contiguous(memory_format=memory_format)
    return x


def convert_module_format(module: ModuleT, inplace: bool = True) -> ModuleT:
    """Convert a module's parameters and buffers to channels-last, in a copy if not `inplace`.

    >>> conv = convert_module_format(nn.Conv2d(3, 8, 3))
    >>> conv.weight.is_contiguous(memory_format=torch.channels_last)
    True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"convert_module_format takes a module, got {type(module).__name__}. Convert a tensor"
            " with convert_tensor_format."
        )
    converted = module if inplace else copy.deepcopy(module)
    for tensor in (*converted.parameters(), *converted.buffers()):
        convert_tensor_format(tensor)
    return converted


def _is_enabled() -> bool:
    """Return whether autocast is currently active in this thread."""
    return any(region.enabled for region in current_regions())


def _set_enabled(*, enabled: bool) -> None:
    """Set `amp.enabled`. False also disables an active autocast region until it exits."""
    disable_autocast()
    if enabled:
        set_thread_region(autocast_all_devices(preset=_PRESET, dtype=_default_dtype))
    elif _is_enabled():
        set_thread_region(autocast_all_devices(preset=_PRESET, enabled=False))


def _current_dtype() -> str:
    """Return the 16-bit dtype of the active region, otherwise the default."""
    return next(
        (dtype_name(region.computes_in) for region in current_regions() if region.enabled),
        dtype_name(_default_dtype),
    )


def _set_default_dtype(dtype: str | torch.dtype) -> None:
    """Set `amp.low_prec_dtype`; if `amp.enabled` is set, switch to the new dtype."""
    global _default_dtype
    _default_dtype = parse_dtype(dtype, what="low_prec_dtype")
    if thread_region() is not None and _is_enabled():
        _set_enabled(enabled=True)


def _check_flag(enabled: Any) -> None:
    """Raise for `@amp.autocast` without brackets, which MegEngine accepts and breaks later."""
    if callable(enabled):
        name = getattr(enabled, "__name__", type(enabled).__name__)
        raise TypeError(
            f"amp.autocast takes enabled=True or False, got the function {name!r}. Write"
            " @amp.autocast(), with brackets."
        )


def _require_float32(dtype: str | torch.dtype) -> None:
    """Raise for any other `high_prec_dtype`: ops under the full rule run in float32."""
    parse_dtype(dtype, allowed=(torch.float32,), what="high_prec_dtype")


class _AmpModule(ModuleType):
    """Class of this module: `enabled` and the dtypes are properties."""

    @property
    def enabled(self) -> bool:
        """Whether autocast is active in this thread, by assignment or by a region."""
        return _is_enabled()

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        _set_enabled(enabled=bool(enabled))

    @property
    def low_prec_dtype(self) -> str:
        """The 16-bit dtype of the active region, otherwise the default."""
        return _current_dtype()

    @low_prec_dtype.setter
    def low_prec_dtype(self, dtype: str) -> None:
        _set_default_dtype(dtype)

    @property
    def high_prec_dtype(self) -> str:
        """Always float32."""
        return "float32"

    @high_prec_dtype.setter
    def high_prec_dtype(self, dtype: str) -> None:
        _require_float32(dtype)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
sys.modules[__name__].__class__ = _AmpModule
