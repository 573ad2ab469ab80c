"""LAMB and Lion, and the base class that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from mezzo._errors import UnsupportedError
from mezzo._torch import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_neg,
    foreach_norm,
    foreach_sign_,
    foreach_sqrt_,
    foreach_sub_,
)

Group = dict[str, Any]
Tensors = list[torch.Tensor]

_BETAS = 2


class ForeachOptimizer(torch.optim.Optimizer):
    """An optimizer in torch's foreach ops: one round of them for each device and dtype of a group."""

    _state_names: ClassVar[tuple[str, ...]] = ()
    """What the state of a parameter holds, in the order in which `update` takes it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, unless one of its values cannot be meant."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: Group) -> None:
        """Refuse values that cannot be meant."""
        lr, betas = group["lr"], group["betas"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            self._refuse(
                "lr",
                f"a tensor of {lr.numel()} elements",
                "a number of at least 0, or a tensor that holds one",
            )
        if not float(lr) >= 0.0:
            self._refuse("lr", lr, "at least 0")
        if len(betas) != _BETAS or not all(0.0 <= beta < 1.0 for beta in betas):
            self._refuse("betas", betas, "two numbers, each at least 0 and below 1")
        if not group["weight_decay"] >= 0.0:
            self._refuse("weight_decay", group["weight_decay"], "at least 0")

    def _refuse(self, name: str, value: object, allowed: str) -> None:
        """Raise: what was passed, and what is allowed."""
        raise ValueError(f"{type(self).__name__} got {name}={value}: it must be {allowed}.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A closure is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters, gradients, *state in self._gathered(group):
                self._update(
                    group,
                    parameters,
                    list(foreach_neg(gradients)) if group["maximize"] else gradients,
                    *state,
                )
        return loss

    def _update(
        self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors
    ) -> None:
        """Step parameters of one device and dtype down their gradients."""
        raise NotImplementedError

    def _start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step."""
        return {
            name: torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for name in self._state_names
        }

    def _gathered(self, group: Group) -> Iterable[list[Tensors]]:
        """Parameters, gradients and what their state holds, in lists of one device and dtype each."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return []
        gradients = [self._dense(parameter.grad) for parameter in parameters]
        for parameter in parameters:
            state = self.state[parameter]
            # Others may keep things in it too, so that it need not be empty.
            if not state.keys() >= set(self._state_names):
                state.update(self._start(parameter))
        lists = [
            parameters,
            gradients,
            *(
                [self.state[parameter][name] for parameter in parameters]
                for name in self._state_names
            ),
        ]
        return [list(rows) for rows, _ in self._group_tensors_by_device_and_dtype(lists).values()]  # type: ignore[arg-type]

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is torch.strided and not gradient.is_complex():
            return gradient
        kind = "complex" if gradient.is_complex() else f"sparse ({gradient.layout})"
        raise UnsupportedError(
            f"{type(self).__name__} takes dense real gradients, got a {kind} one. Make the"
            " embedding with sparse=False, or hold complex weights as torch.view_as_real, or use"
            " another optimizer for this parameter."
        )


def rate(group: Group, device: torch.device) -> float | torch.Tensor:
    """A group's learning rate. A number stays one, in float64; a tensor goes to the device without being read."""
    lr: float | torch.Tensor = group["lr"]
    return lr.to(device, non_blocking=True).squeeze() if isinstance(lr, torch.Tensor) else lr


class LAMB(ForeachOptimizer):
    """You et al., *Large batch optimization for deep learning: training BERT in 76 minutes* (2019), with bias correction.

    A step changes a parameter by the fraction `lr` of its norm, whatever the size of its gradient,
    so that large batches and rates stay stable.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([100.0, 100.0])
    >>> LAMB([weight], lr=0.1, weight_decay=0.0).step()
    >>> (weight.data - torch.tensor([3.0, 4.0])).norm()
    tensor(0.5000)
    """

    _state_names = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
            },
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for held in self.state.values():
            if "step" in held and not isinstance(held["step"], torch.Tensor):
                held["step"] = torch.tensor(float(held["step"]))

    def _check(self, group: Group) -> None:
        """Refuse values that cannot be meant."""
        super()._check(group)
        if not group["eps"] >= 0.0:
            self._refuse("eps", group["eps"], "at least 0")

    def _start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Moments of zeros, and the step count on the CPU, as torch's Adam has it."""
        return {**super()._start(parameter), "step": torch.zeros((), dtype=torch.float32)}

    def _update(
        self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors
    ) -> None:
        """Adam's direction plus the decay, scaled to the norm of the weights."""
        steps, moments, squares = state
        beta1, beta2 = group["betas"]
        foreach_add_(steps, 1.0)
        foreach_lerp_(moments, gradients, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        directions = _directions(group, moments, squares, self._corrections(group, steps))
        if group["weight_decay"] != 0:
            foreach_add_(directions, parameters, alpha=group["weight_decay"])
        sizes = self._ratios(group, parameters, directions) * rate(group, parameters[0].device)
        foreach_mul_(directions, list(sizes.unbind()))
        foreach_sub_(parameters, directions)

    def _corrections(self, group: Group, steps: Tensors) -> tuple[list[float], list[float]]:
        """What each parameter's first and second moment are divided by, for they started at zero."""
        # In float64: 1 - 0.999 ** t in float32 is off by 6e-5 at the first steps.
        counts = [step.item() for step in steps]
        first, second = ([1 - beta**count for count in counts] for beta in group["betas"])
        return first, second

    # A variant may decide by the group.
    def _ratios(self, group: Group, parameters: Tensors, directions: Tensors) -> torch.Tensor:  # noqa: ARG002
        """How long each parameter's step is, as a multiple of its direction."""
        return _trust(parameters, directions)


def _directions(
    group: Group, moments: Tensors, squares: Tensors, corrections: tuple[list[float], list[float]]
) -> Tensors:
    first, second = corrections
    widths = list(foreach_div(squares, second))
    foreach_sqrt_(widths)
    foreach_add_(widths, group["eps"])
    directions = list(foreach_div(moments, first))
    foreach_div_(directions, widths)
    return directions


def _trust(parameters: Tensors, directions: Tensors) -> torch.Tensor:
    """The norm of each parameter over that of its direction; 1 where either is 0."""
    weights, lengths = (torch.stack(foreach_norm(tensors)) for tensors in (parameters, directions))
    return torch.where((weights == 0) | (lengths == 0), 1.0, weights / lengths)


class Lion(ForeachOptimizer):
    """Chen et al., *Symbolic discovery of optimization algorithms* (2023), with decoupled weight decay.

    One moment where Adam keeps two. As every weight moves by `lr` at each step, take a rate 3 to 10
    times smaller than for Adam, and a larger decay.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> weight.grad = torch.tensor([3.0, -0.001])
    >>> Lion([weight], lr=0.25).step()
    >>> weight.data
    tensor([ 0.7500, -0.7500])
    """

    _state_names = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    def _update(
        self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors
    ) -> None:
        """Decay, step by the sign, and only then let the gradient into the moment."""
        (moments,), (beta1, beta2) = state, group["betas"]
        lr = rate(group, parameters[0].device)
        if group["weight_decay"] != 0:
            foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        directions = list(foreach_mul(moments, beta1))
        foreach_add_(directions, gradients, alpha=1 - beta1)
        foreach_sign_(directions)
        foreach_mul_(directions, lr)
        foreach_sub_(parameters, directions)
        foreach_mul_(moments, beta2)
        foreach_add_(moments, gradients, alpha=1 - beta2)
