"""Gradient clipping as optimizers of Paddle do it: when they step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import utils

from mezzo.optim.bound import bound_of

Optimizer = torch.optim.Optimizer


class Clip(Protocol):
    """What `grad_clip` takes."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""


@dataclass(frozen=True)
class ClipGradByGlobalNorm:
    """All gradients together have at most this norm.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> ClipGradByGlobalNorm(1.0)([weight])
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """

    clip_norm: float
    """The largest norm."""
    group_name: str = "default_group"
    """Paddle's; each optimizer clips its own gradients here, too."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""
        utils.clip_grad_norm_(parameters, self.clip_norm)


@dataclass(frozen=True)
class ClipGradByNorm:
    """Each gradient by itself has at most this norm."""

    clip_norm: float
    """The largest norm."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""
        for parameter in parameters:
            utils.clip_grad_norm_([parameter], self.clip_norm)


@dataclass(frozen=True)
class ClipGradByValue:
    """Each element of each gradient is at most this, and at least its negative or another number."""

    max: float
    """The largest value."""
    min: float | None = None
    """The smallest; None is the negative of the largest."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.clamp_(-self.max if self.min is None else self.min, self.max)


def clip_of(optimizer: Optimizer) -> Clip | None:
    """What an optimizer clips by when it steps; None where it does not, or where its bound step does it by itself."""
    bound = bound_of(optimizer)
    clip: Clip | None = getattr(optimizer, "_grad_clip", None)
    return None if bound is not None and bound.clip_norm is not None else clip


def clip_before_step(optimizer: Optimizer, arguments: Any, words: Any) -> None:  # noqa: ARG001 - the shape of a step hook
    """A hook of optimizers: clip what they are about to step from, in float32."""
    clip = clip_of(optimizer)
    if clip is None:
        return
    bound = bound_of(optimizer)
    if bound is not None:
        bound.widen_gradients()
    clip([parameter for group in optimizer.param_groups for parameter in group["params"]])


def norm_for_all(optimizers: Sequence[Optimizer]) -> float | None:
    """The one global norm that several optimizers clip to, which a bound step can do by itself; None where they do not agree on one."""
    clips = {getattr(optimizer, "_grad_clip", None) for optimizer in optimizers}
    only = clips.pop() if len(clips) == 1 else None
    return only.clip_norm if isinstance(only, ClipGradByGlobalNorm) else None
