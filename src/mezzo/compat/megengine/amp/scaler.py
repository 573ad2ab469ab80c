"""`megengine.amp.GradScaler`: scaled backward through a `GradManager`, in one call or in three."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mezzo.compat.megengine.autodiff import GradManager, Outputs, listed
from mezzo.scaling.gradients import unscale_tensors
from mezzo.scaling.state import ScaleRule, ScaleState, next_state


class GradScaler:
    """A scale that grows and backs off; gradients that are not finite are dropped, so that the optimizer finds none.

    `growth_interval=0` keeps the scale as it is, as does `growth_factor=0`. A static scale drops bad gradients too, which in MegEngine reach the parameters.

    >>> from torch import nn
    >>> from mezzo.compat.megengine.autodiff import GradManager
    >>> net = nn.Linear(2, 1)
    >>> gm, scaler = GradManager().attach(net.parameters()), GradScaler(growth_interval=1)
    >>> with gm:
    ...     scaler.backward(gm, net(torch.ones(1, 2)).sum())
    >>> net.weight.grad, scaler.scale_factor
    (tensor([[1., 1.]]), 32.0)
    """

    def __init__(self, init_scale: float = 2.0**4, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000) -> None:
        self.scale_factor = float(init_scale)
        """What gradients are multiplied by; may be assigned."""
        self.growth_factor, self.backoff_factor, self.growth_interval = float(growth_factor), float(backoff_factor), growth_interval
        self._growth_tracker = 0
        self._found_non_finite = False
        # Numbers that cannot be meant are refused here, and not at the first update.
        ScaleState(self.scale_factor)
        self._rule()

    def backward(
        self, gm: GradManager, y: Outputs = None, dy: Outputs = None, *, unscale_grad: bool = True, update_scale: bool | str = "if_unscale_grad"
    ) -> None:
        """Backward with `dy` times the scale, then `unscale` and `update`; with `unscale_grad=False` neither, for gradients that go on adding up."""
        outputs = listed(y)
        given: Sequence[Any] = [torch.ones_like(one) for one in outputs] if dy is None else listed(dy)
        gm.backward(outputs, [one * self.scale_factor for one in given])
        if unscale_grad:
            self.unscale(gm.attached_tensors())
            if update_scale:
                self.update()

    def unscale(self, grad_tensors: Iterable[torch.Tensor]) -> GradScaler:
        """Divide the gradients of tensors by the scale; where one is not finite, all are set to None."""
        tensors = [one for one in grad_tensors if one is not None and one.grad is not None]
        self._found_non_finite = unscale_tensors(tensors, self.scale_factor) or self._found_non_finite
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
        after = next_state(ScaleState(self.scale_factor, self._growth_tracker), rule, found_nonfinite=found)
        self.scale_factor, self._growth_tracker = after.scale, after.good_in_a_row

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
