"""`apex.optimizers`: torch's or mezzo's optimizers with Apex's arguments.

At O2 the step is fused, as it is for every optimizer that mezzo binds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from mezzo._errors import UnsupportedError
from mezzo._torch import foreach_mul
from mezzo.compat._missing import module_getattr
from mezzo.compat.apex._substitutions import SUBSTITUTIONS
from mezzo.compat.apex.fp16_utils import FP16_Optimizer
from mezzo.optim.fused_algorithms import without_hooks
from mezzo.optim.optimizers import LAMB, ForeachOptimizer, Group, Tensors

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]


class _SetGradNoneOptimizer(torch.optim.Optimizer):
    """Set in the constructor, as Apex does, whether `zero_grad` sets gradients to None."""

    set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; `set_to_none` defaults to the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _require(supported: bool, optimizer: str, option: str, remedy: str) -> None:
    if not supported:
        raise UnsupportedError(f"{optimizer} does not support {option}. {remedy}")


class FusedAdam(_SetGradNoneOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with Apex's arguments: decoupled weight decay unless `adam_w_mode=False`.

    >>> optimizer = FusedAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.01)
    >>> optimizer.param_groups[0]["decoupled_weight_decay"]
    True
    """

    steps_as = torch.optim.Adam

    def __new__(
        cls,
        params: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return `_UncorrectedAdam` without bias correction, which torch's Adam always applies."""
        if bias_correction:
            return super().__new__(cls)
        return _UncorrectedAdam(params, lr, *args, **kwargs)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _require(
            not amsgrad, "FusedAdam", "the AMSGrad variant", "Use torch.optim.Adam(amsgrad=True)."
        )
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode)
        self.set_grad_none = set_grad_none


class _UncorrectedAdam(_SetGradNoneOptimizer, LAMB):
    """AdamW without bias correction: LAMB's update direction with a trust ratio of 1."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _require(
            not amsgrad, "FusedAdam", "the AMSGrad variant", "Use torch.optim.Adam(amsgrad=True)."
        )
        _require(
            adam_w_mode or not weight_decay,
            "FusedAdam",
            "adam_w_mode=False with bias_correction=False and a weight decay",
            "Leave one of the three out.",
        )
        super().__init__(params, lr, betas, eps, weight_decay)
        self.set_grad_none = set_grad_none

    def _corrections(self, group: Group, steps: Tensors) -> tuple[list[float], list[float]]:
        """Return factors of 1: no bias correction."""
        return [1.0] * len(steps), [1.0] * len(steps)

    def _ratios(self, group: Group, parameters: Tensors, directions: Tensors) -> torch.Tensor:
        """Return trust ratios of 1."""
        return torch.ones(len(parameters), device=parameters[0].device)


class FusedLAMB(_SetGradNoneOptimizer, LAMB):
    """`mezzo.LAMB` with Apex's arguments.

    Gradients are clipped to the total norm `max_grad_norm`. Groups without weight decay use a
    trust ratio of 1 (Adam's step length) unless `use_nvlamb` is set.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _require(not amsgrad, "FusedLAMB", "the AMSGrad variant", "Leave amsgrad out.")
        _require(
            adam_w_mode and grad_averaging,
            "FusedLAMB",
            "adam_w_mode=False and grad_averaging=False",
            "Leave them out.",
        )
        super().__init__(params, lr, betas, eps, weight_decay)
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb
        self._bias_correction = bias_correction
        self._max_norm = max_grad_norm
        self._clip_factor: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Clipping does not modify `.grad`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [
            parameter.grad
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        norm = (
            torch.nn.utils.get_total_norm(gradients)
            if self._max_norm and self._max_norm > 0 and gradients
            else None
        )
        self._clip_factor = None if norm is None else (self._max_norm / norm).clamp(max=1.0)
        without_hooks(ForeachOptimizer.step)(self)
        return loss

    def _update(
        self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors
    ) -> None:
        """Apply LAMB's update to clipped gradients."""
        clipped = (
            gradients
            if self._clip_factor is None
            else list(foreach_mul(gradients, self._clip_factor.to(gradients[0].device)))
        )
        super()._update(group, parameters, clipped, *state)

    def _corrections(self, group: Group, steps: Tensors) -> tuple[list[float], list[float]]:
        """Return Adam's bias corrections, or 1 with `bias_correction=False`."""
        return (
            super()._corrections(group, steps)
            if self._bias_correction
            else ([1.0] * len(steps), [1.0] * len(steps))
        )

    def _ratios(self, group: Group, parameters: Tensors, directions: Tensors) -> torch.Tensor:
        """Return LAMB's trust ratios for groups with weight decay, otherwise 1."""
        if group["weight_decay"] != 0 or self.use_nvlamb:
            return super()._ratios(group, parameters, directions)
        return torch.ones(len(parameters), device=parameters[0].device)


class FusedSGD(_SetGradNoneOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with Apex's arguments."""

    steps_as = torch.optim.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        # No effect: the fused step never materializes master gradients.
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        _require(
            not wd_after_momentum,
            "FusedSGD",
            "wd_after_momentum=True",
            "Leave it out: weight decay is added before the momentum, as in torch.",
        )
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.set_grad_none = set_grad_none


class FusedAdagrad(_SetGradNoneOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad` with Apex's arguments."""

    steps_as = torch.optim.Adagrad

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        _require(not adagrad_w_mode, "FusedAdagrad", "adagrad_w_mode=True", "Leave it out.")
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps)
        self.set_grad_none = set_grad_none


class FusedNovoGrad:
    """Not available: neither torch nor mezzo has NovoGrad."""

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedError(
            f"{type(self).__name__} is not available here. Use FusedLAMB, FusedAdam or any torch"
            " optimizer."
        )


class FusedMixedPrecisionLamb(FusedNovoGrad):
    """Not available: use `FusedLAMB` with `amp.initialize(..., opt_level="O2")`."""


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.optim)
