"""Paddle's `nn`: torch's modules, gradient clipping, and names that have other words in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch.nn import utils

from mezzo.optim.binding import optimizer_binding

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
    bound = optimizer_binding(optimizer)
    clip: Clip | None = getattr(optimizer, "_grad_clip", None)
    return None if bound is not None and bound.clip_norm is not None else clip


# The shape of a step hook.
def clip_before_step(optimizer: Optimizer, arguments: Any, words: Any) -> None:
    """A hook of optimizers: clip what they are about to step from, in float32."""
    clip = clip_of(optimizer)
    if clip is None:
        return
    bound = optimizer_binding(optimizer)
    if bound is not None:
        bound.widen_gradients()
    clip([parameter for group in optimizer.param_groups for parameter in group["params"]])


def norm_for_all(optimizers: Sequence[Optimizer]) -> float | None:
    """The one global norm that several optimizers clip to, which a bound step can do by itself; None where they do not agree on one."""
    clips = {getattr(optimizer, "_grad_clip", None) for optimizer in optimizers}
    only = clips.pop() if len(clips) == 1 else None
    return only.clip_norm if isinstance(only, ClipGradByGlobalNorm) else None


SUBSTITUTIONS = {
    "nn.Layer": "torch.nn.Module",
    "nn.LayerList": "torch.nn.ModuleList",
    "nn.Sequential": "torch.nn.Sequential",
    "nn.Linear": (
        "torch.nn.Linear; Paddle starts from Xavier-uniform weights and zero biases:"
        " torch.nn.init.xavier_uniform_, zeros_"
    ),
    "nn.Conv2D": "torch.nn.Conv2d",
    "nn.BatchNorm2D": "torch.nn.BatchNorm2d",
    "nn.LayerNorm": "torch.nn.LayerNorm",
    "nn.Embedding": "torch.nn.Embedding",
    "nn.ReLU": "torch.nn.ReLU",
    "nn.MSELoss": "torch.nn.MSELoss",
    "nn.CrossEntropyLoss": "torch.nn.CrossEntropyLoss; its labels have no last dimension of one",
    "nn.functional": "torch.nn.functional",
    "io.Dataset": "torch.utils.data.Dataset",
    "io.DataLoader": "torch.utils.data.DataLoader",
    "vision.transforms": "torchvision.transforms",
    "vision.datasets": "torchvision.datasets",
    "optimizer.lr": "torch.optim.lr_scheduler, made with the optimizer",
    "regularizer.L2Decay": "the coefficient itself: weight_decay=1e-4",
    "to_tensor": "torch.as_tensor",
    "seed": "torch.manual_seed",
    "no_grad": "torch.no_grad",
    "save": "torch.save",
    "load": "torch.load",
    "distributed.init_parallel_env": "torch.distributed.init_process_group",
    "loss.numpy()": "loss.item(), or loss.detach().numpy()",
    "label._to(place)": "label.to(device)",
    "model.set_state_dict": "model.load_state_dict",
    "tensor.stop_gradient = False": "tensor.requires_grad_()",
}
"""Paddle's call → torch's."""


def refuse(module: str, name: str) -> NoReturn:
    """Say what a name of Paddle's is in torch's words."""
    asked = f"{module}.{name}" if module else name
    inside = [call for call in SUBSTITUTIONS if call.startswith(f"{asked}.")]
    if asked in SUBSTITUTIONS:
        remedy = f" Use {SUBSTITUTIONS[asked]}."
    elif inside:
        remedy = (
            f" Use torch's: {'; '.join(f'{call} is {SUBSTITUTIONS[call]}' for call in inside)}."
        )
    else:
        remedy = " Layers, tensors and data are torch's: docs/coming-from/paddle.md has the table."
    raise AttributeError(
        f"mezzo.compat.paddle has no {asked}: it brings Paddle's mixed precision alone.{remedy}"
    )


__all__ = ["ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue"]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    refuse("nn", name)
