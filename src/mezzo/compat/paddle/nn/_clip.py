"""Gradient clipping of optimizers: by the norm of all gradients, by each norm, or by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import utils

from mezzo.optim.binding import optimizer_binding

Optimizer = torch.optim.Optimizer


class Clip(Protocol):
    """Type of the `grad_clip` argument of optimizers."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""


@dataclass(frozen=True)
class ClipGradByGlobalNorm:
    """`paddle.nn.ClipGradByGlobalNorm`: limit the norm of all gradients together.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> ClipGradByGlobalNorm(1.0)([weight])
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """

    clip_norm: float
    """The largest norm."""
    group_name: str = "default_group"
    """Accepted and not used, as in Paddle: each optimizer clips its own gradients."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""
        utils.clip_grad_norm_(parameters, self.clip_norm)


@dataclass(frozen=True)
class ClipGradByNorm:
    """`paddle.nn.ClipGradByNorm`: limit the norm of each gradient."""

    clip_norm: float
    """The largest norm."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""
        for parameter in parameters:
            utils.clip_grad_norm_([parameter], self.clip_norm)


@dataclass(frozen=True)
class ClipGradByValue:
    """`paddle.nn.ClipGradByValue`: limit each element of each gradient."""

    max: float
    """The largest value."""
    min: float | None = None
    """The smallest value; None is `-max`."""

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in place."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.clamp_(-self.max if self.min is None else self.min, self.max)


def hook_clip(optimizer: Optimizer) -> Clip | None:
    """Return the clip that `clip_before_step` applies.

    None if the optimizer does not clip, or if its fused step clips to a global norm itself.
    """
    binding = optimizer_binding(optimizer)
    clip: Clip | None = getattr(optimizer, "_grad_clip", None)
    return None if binding is not None and binding.clip_norm is not None else clip


def clip_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Clip gradients in float32 before a step; a step pre-hook of optimizers."""
    clip = hook_clip(optimizer)
    if clip is None:
        return
    binding = optimizer_binding(optimizer)
    if binding is not None:
        binding.widen_gradients()
    clip([parameter for group in optimizer.param_groups for parameter in group["params"]])


def shared_clip_norm(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the global norm that all these optimizers clip to, for a fused step to apply.

    None if their clips differ, or are no `ClipGradByGlobalNorm`.
    """
    clips = {getattr(optimizer, "_grad_clip", None) for optimizer in optimizers}
    shared = clips.pop() if len(clips) == 1 else None
    return shared.clip_norm if isinstance(shared, ClipGradByGlobalNorm) else None
