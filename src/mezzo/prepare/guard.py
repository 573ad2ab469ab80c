"""`model.to(...)`, `cuda()`, `half()` and their like would take a decorated model away from its masters and its region: they are told the right order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from mezzo._errors import UnsupportedError
from mezzo.prepare.decoration import decoration_of

Function = Callable[[torch.Tensor], torch.Tensor]


def guard(model: nn.Module, *, converted: bool) -> Callable[[], None]:
    """Refuse another device type, and where parameters are 16-bit every other device and dtype; what comes back takes the guard off."""

    def _apply(self_: nn.Module, function: Function, *args: Any, **kwargs: Any) -> Any:
        # A deep copy has no masters, and goes where it likes.
        if decoration_of(self_) is not None:
            _refuse_moves(self_, function, converted=converted)
        return type(self_)._apply(self_, function, *args, **kwargs)

    model.__dict__["_apply"] = MethodType(_apply, model)
    return partial(model.__dict__.pop, "_apply", None)


def _refuse_moves(model: nn.Module, function: Function, *, converted: bool) -> None:
    for name, parameter in model.named_parameters():
        # Asked of a tensor without elements: nothing is moved to find out.
        before = parameter.detach().new_empty(0)
        after = function(before)
        away = (after.device, after.dtype) != (before.device, before.dtype) if converted else after.device.type != before.device.type
        if away:
            raise UnsupportedError(
                f"The model is decorated, and {name!r} would go from {before.dtype} on {before.device} to {after.dtype} on {after.device}, away from what was "
                "planned for it. First move, then decorate; or mezzo.undecorate(model), move it, and decorate anew."
            )
