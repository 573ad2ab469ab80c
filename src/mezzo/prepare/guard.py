"""Refuse `to(...)`, `cuda()`, `half()` and the like of a decorated model and of its parts: they would leave masters and region behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from mezzo._errors import UnsupportedError

Function = Callable[[torch.Tensor], torch.Tensor]


def guard(model: nn.Module, *, converted: bool) -> Callable[[], None]:
    """Refuse another device type, and where parameters are 16-bit every other device and dtype, of each part too; what comes back takes the guard off."""
    guarded = dict(model.named_modules()) if converted else {"": model}
    for name, module in guarded.items():
        module.__dict__["_apply"] = _Guard(module, name, converted=converted)
    return partial(_take_off, list(guarded.values()))


def _take_off(modules: list[nn.Module]) -> None:
    for module in modules:
        module.__dict__.pop("_apply", None)


class _Guard:
    """The `_apply` of a guarded module, through which torch moves and casts."""

    def __init__(self, module: nn.Module, name: str, *, converted: bool) -> None:
        self._module, self._name, self._converted = module, name, converted

    def __call__(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        # Every tensor is looked at before the first is moved.
        for name, tensor in chain(self._module.named_parameters(self._name), self._module.named_buffers(self._name)):
            if tensor.is_floating_point():
                self._refuse_move(name, tensor, function)
        return type(self._module)._apply(self._module, function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, has no masters, and goes where it likes: it gets the `_apply` of its class."""
        return getattr, (self._module, "_apply")

    def _refuse_move(self, name: str, tensor: torch.Tensor, function: Function) -> None:
        # Asked of a tensor without elements: nothing is moved to find out.
        before = tensor.detach().new_empty(0)
        after = function(before)
        away = (after.device, after.dtype) != (before.device, before.dtype) if self._converted else after.device.type != before.device.type
        if away:
            raise UnsupportedError(
                f"The model is decorated, and {name!r} would go from {before.dtype} on {before.device} to {after.dtype} on {after.device}, away from what was "
                "planned for it. First move, then decorate; or mezzo.undecorate(model), move it, and decorate anew."
            )
