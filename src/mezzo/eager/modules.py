"""Rules for whole modules: what a rule matches is found first, then each matching instance's `forward` is replaced, and put back when the binding ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from mezzo._casting import cast_all
from mezzo._errors import PolicyError, UnsupportedError, nearest
from mezzo.eager.forward import Forward, replace_forward
from mezzo.eager.region import Region, innermost_region, inside
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
    chosen: dict[nn.Module, tuple[int, Ruled]] = {}
    for selector, rule in policy.modules:
        matched = [name for name, module in modules.items() if selector.matches(name, module)]
        if not matched:
            known = [name for name in modules if name]
            raise PolicyError(
                f"The module rule {selector.text!r} matches nothing in {type(model).__name__}.{nearest(selector.text, known)} "
                f"Its modules: {', '.join(known[:_SHOWN])}{', …' if len(known) > _SHOWN else ''}."
            )
        for name in matched:
            # By the module: one that is shared has several names and runs one way.
            if modules[name] not in chosen or chosen[modules[name]][0] <= selector.rank:
                chosen[modules[name]] = selector.rank, Ruled(name, modules[name], rule)
    return tuple(ruled for _, ruled in chosen.values())


class Binding:
    """Module rules on a model, for as long as a region lasts."""

    def __init__(self, ruled: tuple[Ruled, ...], regions: Mapping[Rule, Region], dtype: torch.dtype) -> None:
        self._ruled = ruled
        self._regions = regions
        self._dtypes = {Rule.HALF: dtype, Rule.FULL: torch.float32, Rule.KEEP: None}
        self._undo: list[Callable[[], None]] = []
        self._depth = 0
        self.active = False
        """Whether the rules hold: a deep copy that was made of the model keeps its forward, and must not follow them for ever."""

    def apply(self) -> None:
        """Replace the forward of every ruled module; entering the same binding again changes nothing."""
        self._depth += 1
        if self._depth == 1:
            self.active = True
            self._undo = [self._replace_forward(one.module, self._regions[one.rule], self._dtypes[one.rule]) for one in self._ruled]

    def undo(self) -> None:
        """Put every forward back."""
        self._depth -= 1
        if self._depth == 0:
            self.active = False
            for undo in reversed(self._undo):
                undo()
            self._undo = []

    def is_switched_off(self, device: str) -> bool:
        """Whether a disabled region of the user's is around, and not just the float32 rule of a parent."""
        return not torch.is_autocast_enabled(device) and not any(innermost_region() is region for region in self._regions.values())

    def _replace_forward(self, module: nn.Module, region: Region, dtype: torch.dtype | None) -> Callable[[], None]:
        def make(function: Forward, bound: bool) -> Forward:  # noqa: FBT001
            def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if not self.active or (not is_dynamo_compiling() and self.is_switched_off(region.device)):
                    return function(*args, **kwargs) if bound else function(self_, *args, **kwargs)
                if dtype is not None:
                    args, kwargs = cast_all(args, dtype, region.device), cast_all(kwargs, dtype, region.device)
                with inside(region):
                    return function(*args, **kwargs) if bound else function(self_, *args, **kwargs)

            return forward

        # The rules of another binding around this one give way: of nested regions the inner speaks.
        return replace_forward(module, "mezzo_original", make)
