"""Rules for whole modules: what a rule matches is found first, then each matching instance's `forward` is replaced, and put back when the binding ends.

Hooks would be simpler, but compiled code ignores those added later and breaks on those that enter contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from mezzo._casting import cast_all
from mezzo._errors import PolicyError, UnsupportedError, nearest
from mezzo.eager.region import Region, inside
from mezzo.policy.policy import Policy
from mezzo.policy.rule import Rule

_SHOWN = 20


@dataclass(frozen=True)
class Ruled:
    """One module under its rule."""

    name: str
    module: nn.Module
    rule: Rule


def plan_modules(model: nn.Module, policy: Policy) -> tuple[Ruled, ...]:
    """Find the rule of each module that one names. An exact name beats a glob, a glob beats a type, and of equals the later wins."""
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError("Module rules cannot be bound to nn.DataParallel, whose replicas would run the original's forward. Bind the module inside it.")
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, tuple[int, Rule]] = {}
    for selector, rule in policy.modules:
        matched = [name for name, module in modules.items() if selector.matches(name, module)]
        if not matched:
            known = [name for name in modules if name]
            raise PolicyError(
                f"The module rule {selector.text!r} matches nothing in {type(model).__name__}.{nearest(selector.text, known)} "
                f"Its modules: {', '.join(known[:_SHOWN])}{', …' if len(known) > _SHOWN else ''}."
            )
        chosen |= {name: (selector.rank, rule) for name in matched if chosen.get(name, (-1, rule))[0] <= selector.rank}
    return tuple(Ruled(name, modules[name], rule) for name, (_, rule) in chosen.items())


class Binding:
    """Module rules on a model, for as long as a region lasts."""

    def __init__(self, ruled: tuple[Ruled, ...], regions: Mapping[Rule, Region], dtype: torch.dtype) -> None:
        self._ruled = ruled
        self._regions = regions
        self._dtypes = {Rule.HALF: dtype, Rule.FULL: torch.float32, Rule.KEEP: None}
        self._undo: list[Callable[[], None]] = []
        self._depth = 0

    def apply(self) -> None:
        """Replace the forward of every ruled module; entering the same binding again changes nothing."""
        self._depth += 1
        if self._depth == 1:
            self._undo = [_replace_forward(one.module, self._regions[one.rule], self._dtypes[one.rule]) for one in self._ruled]

    def undo(self) -> None:
        """Put every forward back."""
        self._depth -= 1
        if self._depth == 0:
            for undo in reversed(self._undo):
                undo()
            self._undo = []


def _replace_forward(module: nn.Module, region: Region, dtype: torch.dtype | None) -> Callable[[], None]:
    own = module.__dict__.get("forward")
    function = own or type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            args, kwargs = cast_all(args, dtype, region.device), cast_all(kwargs, dtype, region.device)
        with inside(region):
            return function(*args, **kwargs) if own is not None else function(self, *args, **kwargs)

    # A bound method, so that a deep copy of the model gets one bound to the copy.
    module.__dict__["forward"] = MethodType(forward, module)
    return partial(_put_back, module, own)


def _put_back(module: nn.Module, own: Any) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = own
