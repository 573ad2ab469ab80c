"""An optimizer whose own `step()` runs through a scaler: for call shapes in which nobody calls the scaler's."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.optim.bound import replace_step
from mezzo.scaling.result import StepResult
from mezzo.scaling.scaler import GradScaler

Optimizer = torch.optim.Optimizer

_MARK = "_mezzo_attached"


class Attached:
    """Steps an optimizer through a scaler once a loss was scaled: unscaled, checked, skipped where bad, and the scale adapted. Other steps are its own.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> attached = Attached(optimizer, GradScaler("cpu", init_scale=8.0))
    >>> attached.scale(weight.sum() * float("inf")).backward()
    >>> optimizer.step()
    >>> weight.item(), attached.scaler.get_scale()
    (1.0, 4.0)
    """

    def __init__(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.last: StepResult | None = None
        """What became of the last step that ran through the scaler."""
        self._scaled = self._unscaled = self._stepping = False
        self._own = optimizer.step

        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs)

        # torch's hooks run once, in the optimizer's own step.
        self._restore = replace_step(optimizer, step)
        optimizer.__dict__[_MARK] = self

    def scale(self, losses: Any) -> Any:
        """Scale losses: the next step is the scaler's."""
        self._scaled = True
        return self.scaler.scale(losses)

    def unscale(self) -> None:
        """Unscale the gradients in place and check them, for whoever looks at them before the step; once, however often it is asked."""
        if self._scaled and not self._unscaled:
            self.scaler.unscale_(self.optimizer)
            self._unscaled = True

    def detach(self) -> None:
        """Let the optimizer's own step run again; a wrapper that somebody put around ours meanwhile stays, and reaches it too."""
        self._scaled = False
        if self.optimizer.__dict__.get(_MARK) is self:
            del self.optimizer.__dict__[_MARK]
        self._restore()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stepping or not self._scaled:
            return self._own(*args, **kwargs)
        self._stepping = True
        try:
            self.last = self.scaler.step(self.optimizer, *args, **kwargs)
        finally:
            self._stepping = False
        self._scaled = self._unscaled = False
        self.scaler.update()
        return self.last.value


def attached_to(optimizer: Optimizer) -> Attached | None:
    """What steps an optimizer through a scaler; None where it steps by itself."""
    found: Attached | None = optimizer.__dict__.get(_MARK)
    return found
