"""Apex's fused optimizers by name: torch's, or mezzo's, with Apex's arguments. At O2 their whole step is one fused pass, as every optimizer's is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from mezzo._errors import UnsupportedError
from mezzo._torch import foreach_mul
from mezzo.compat.apex.fp16_utils import FP16_Optimizer
from mezzo.optim.binding import without_hooks
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


class _SetsToNone(torch.optim.Optimizer):
    """Apex's optimizers say once whether `zero_grad` sets gradients to None."""

    set_grad_none = True

    # Torch's call shape.
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, as the constructor was told unless this call says otherwise."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _refuse(allowed: bool, who: str, what: str, remedy: str) -> None:
    if not allowed:
        raise UnsupportedError(f"{who} does not support {what}. {remedy}")


class FusedAdam(_SetsToNone, torch.optim.Adam):
    """`torch.optim.Adam` with Apex's arguments: decoupled weight decay unless `adam_w_mode=False`.

    >>> FusedAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.01).param_groups[0]["decoupled_weight_decay"]
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
        """Without bias correction it is another optimizer, which torch lacks."""
        return (
            super().__new__(cls)
            if bias_correction
            else _UncorrectedAdam(params, lr, *args, **kwargs)
        )

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
        _refuse(
            not amsgrad, "FusedAdam", "the AMSGrad variant", "Use torch.optim.Adam(amsgrad=True)."
        )
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode)
        self.set_grad_none = set_grad_none


class _UncorrectedAdam(_SetsToNone, LAMB):
    """Adam whose moments are taken as they are from the first step on, with decoupled weight decay: LAMB's direction, at its own length."""

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
        _refuse(
            not amsgrad, "FusedAdam", "the AMSGrad variant", "Use torch.optim.Adam(amsgrad=True)."
        )
        _refuse(
            adam_w_mode or not weight_decay,
            "FusedAdam",
            "adam_w_mode=False with bias_correction=False and a weight decay",
            "Leave one of the three out.",
        )
        super().__init__(params, lr, betas, eps, weight_decay)
        self.set_grad_none = set_grad_none

    def _corrections(self, group: Group, steps: Tensors) -> tuple[list[float], list[float]]:
        """None."""
        return [1.0] * len(steps), [1.0] * len(steps)

    def _ratios(self, group: Group, parameters: Tensors, directions: Tensors) -> torch.Tensor:
        """One."""
        return torch.ones(len(parameters), device=parameters[0].device)


class FusedLAMB(_SetsToNone, LAMB):
    """`mezzo.LAMB` with Apex's arguments: all gradients together are clipped to `max_grad_norm`, and groups without weight decay step at Adam's length unless
    `use_nvlamb`.
    """  # noqa: D205

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
        _refuse(not amsgrad, "FusedLAMB", "the AMSGrad variant", "Leave amsgrad out.")
        _refuse(
            adam_w_mode and grad_averaging,
            "FusedLAMB",
            "adam_w_mode=False and grad_averaging=False",
            "Leave them out.",
        )
        super().__init__(params, lr, betas, eps, weight_decay)
        self.set_grad_none, self.use_nvlamb, self._corrects, self._max_norm = (
            set_grad_none,
            use_nvlamb,
            bias_correction,
            max_grad_norm,
        )
        self._factor: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; gradients are clipped on the way, and stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [
            parameter.grad
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        norm = (
            torch.nn.utils.get_total_norm(found)
            if self._max_norm and self._max_norm > 0 and found
            else None
        )
        self._factor = None if norm is None else (self._max_norm / norm).clamp(max=1.0)
        without_hooks(ForeachOptimizer.step)(self)
        return loss

    def _update(
        self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors
    ) -> None:
        """LAMB's update from clipped gradients."""
        clipped = (
            gradients
            if self._factor is None
            else list(foreach_mul(gradients, self._factor.to(gradients[0].device)))
        )
        super()._update(group, parameters, clipped, *state)

    def _corrections(self, group: Group, steps: Tensors) -> tuple[list[float], list[float]]:
        """Adam's, unless the constructor was told otherwise."""
        return (
            super()._corrections(group, steps)
            if self._corrects
            else ([1.0] * len(steps), [1.0] * len(steps))
        )

    def _ratios(self, group: Group, parameters: Tensors, directions: Tensors) -> torch.Tensor:
        """LAMB's where weights decay, else one."""
        if group["weight_decay"] != 0 or self.use_nvlamb:
            return super()._ratios(group, parameters, directions)
        return torch.ones(len(parameters), device=parameters[0].device)


class FusedSGD(_SetsToNone, torch.optim.SGD):
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
        # A fused pass here materializes none.
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        _refuse(
            not wd_after_momentum,
            "FusedSGD",
            "wd_after_momentum=True",
            "Leave it out: weight decay is added before the momentum, as in torch.",
        )
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.set_grad_none = set_grad_none


class FusedAdagrad(_SetsToNone, torch.optim.Adagrad):
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
        _refuse(not adagrad_w_mode, "FusedAdagrad", "adagrad_w_mode=True", "Leave it out.")
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps)
        self.set_grad_none = set_grad_none


class FusedNovoGrad:
    """Not there: neither torch nor mezzo has NovoGrad."""

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedError(
            f"{type(self).__name__} is not available here. Use FusedLAMB or FusedAdam, or any torch"
            " optimizer of your own."
        )


class FusedMixedPrecisionLamb(FusedNovoGrad):
    """Not there: `amp.initialize(..., opt_level="O2")` with `FusedLAMB` keeps masters for it."""
