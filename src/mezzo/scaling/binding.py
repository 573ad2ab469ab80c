"""What a scaler and a schedule may ask of a step that mezzo has bound to an optimizer; the steps themselves live above."""

from __future__ import annotations

from typing import Protocol

import torch

from mezzo.scaling.culprit import Flagged
from mezzo.scaling.gradients import Flags


class BoundStep(Protocol):
    """A step that skips by itself, on a CPU too: 16-bit gradients are not unscaled in place."""

    reads_on_device: bool
    """Whether scheduled values may be tensors, for nothing reads them on the host."""

    def check(self, scale: torch.Tensor, flags: Flags, culprit: Flagged) -> bool:
        """Check the gradients, which are `scale` times too large, in a way of one's own; false where there is none."""

    def widen_gradients(self) -> None:
        """Turn 16-bit gradients into float32 ones, for whoever is going to unscale them in place: in float16 small ones would be gone."""


def binding_of(optimizer: torch.optim.Optimizer) -> BoundStep | None:
    """What an optimizer's step was bound to.

    >>> binding_of(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    """
    return optimizer.__dict__.get("_bound")
