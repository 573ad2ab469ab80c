"""The optimizers LAMB and Lion, and their base class."""

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
    """Base of optimizers that update all parameters of one device and dtype with foreach ops."""

    _state_names: ClassVar[tuple[str, ...]] = ()
    """Keys of a parameter's state, in the order in which `_update` takes them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters; raise `ValueError` if an option is out of range."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: Group) -> None:
        """Raise `ValueError` for options that are out of range."""
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
        raise ValueError(f"{type(self).__name__} got {name}={value}: it must be {allowed}.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, after one call of the closure."""
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
        """Update parameters of one device and dtype."""
        raise NotImplementedError

    def _start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the initial state of a parameter."""
        return {
            name: torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for name in self._state_names
        }

    def _gathered(self, group: Group) -> Iterable[list[Tensors]]:
        """Return lists of parameters, gradients and states, grouped by device and dtype."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return []
        gradients = [self._dense(parameter.grad) for parameter in parameters]
        for parameter in parameters:
            state = self.state[parameter]
            # It need not be empty: other code may keep values in it too.
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
        layout = "complex" if gradient.is_complex() else f"sparse ({gradient.layout})"
        raise UnsupportedError(
            f"{type(self).__name__} takes dense real gradients, got a {layout} one. Create the"
            " embedding with sparse=False, or hold complex weights as torch.view_as_real, or use"
            " another optimizer for this parameter."
        )


class LAMB(ForeachOptimizer):
    """LAMB: Adam with each parameter's step scaled to the norm of the parameter.

    A step changes a parameter by the fraction `lr` of its norm, however large its gradient is, so
    that training with large batches and learning rates stays stable. With bias correction. From You
    et al., *Large batch optimization for deep learning: training BERT in 76 minutes* (2019).

    Args:
        params: Parameters or parameter groups, as for optimizers of torch.
        lr: Learning rate: the change of a parameter in one step, as a fraction of its norm. A
            tensor is not read on the host.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Multiple of the parameter that is added to the direction of its step.
        maximize: Whether to maximize the objective instead of minimizing it.

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
        for entries in self.state.values():
            if "step" in entries and not isinstance(entries["step"], torch.Tensor):
                entries["step"] = torch.tensor(float(entries["step"]))

    def _check(self, group: Group) -> None:
        """Raise `ValueError` for options that are out of range."""
        super()._check(group)
        if not group["eps"] >= 0.0:
            self._refuse("eps", group["eps"], "at least 0")

    def _start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return moments of zeros, and a step count on the CPU, as torch's Adam has it."""
        return {**super()._start(parameter), "step": torch.zeros((), dtype=torch.float32)}

    def _update(
        self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors
    ) -> None:
        """Step in Adam's direction plus the weight decay, scaled to the norm of each parameter."""
        steps, moments, squares = state
        beta1, beta2 = group["betas"]
        foreach_add_(steps, 1.0)
        foreach_lerp_(moments, gradients, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        directions = _directions(group, moments, squares, self._corrections(group, steps))
        if group["weight_decay"] != 0:
            foreach_add_(directions, parameters, alpha=group["weight_decay"])
        lr = _learning_rate(group, parameters[0].device)
        factors = self._ratios(group, parameters, directions) * lr
        foreach_mul_(directions, list(factors.unbind()))
        foreach_sub_(parameters, directions)

    def _corrections(self, group: Group, steps: Tensors) -> tuple[list[float], list[float]]:
        """Return the bias corrections of each parameter's first and second moment."""
        # In float64: 1 - 0.999 ** t in float32 is off by 6e-5 at the first steps.
        counts = [step.item() for step in steps]
        first, second = ([1 - beta**count for count in counts] for beta in group["betas"])
        return first, second

    def _ratios(self, group: Group, parameters: Tensors, directions: Tensors) -> torch.Tensor:  # noqa: ARG002
        """Return the trust ratios: how many times its direction each parameter moves.

        Subclasses may use the group's options.
        """
        return _trust_ratios(parameters, directions)


def _directions(
    group: Group, moments: Tensors, squares: Tensors, corrections: tuple[list[float], list[float]]
) -> Tensors:
    first, second = corrections
    denominators = list(foreach_div(squares, second))
    foreach_sqrt_(denominators)
    foreach_add_(denominators, group["eps"])
    directions = list(foreach_div(moments, first))
    foreach_div_(directions, denominators)
    return directions


def _trust_ratios(parameters: Tensors, directions: Tensors) -> torch.Tensor:
    """Return the norm of each parameter over that of its direction; 1 where either is 0."""
    weights, steps = (torch.stack(foreach_norm(tensors)) for tensors in (parameters, directions))
    return torch.where((weights == 0) | (steps == 0), 1.0, weights / steps)


class Lion(ForeachOptimizer):
    """Lion: each weight moves by `lr` in the direction of the sign of an averaged gradient.

    Stores one moment where Adam stores two. Use a learning rate 3 to 10 times smaller than for
    Adam, and a larger weight decay, which is decoupled. From Chen et al., *Symbolic discovery of
    optimization algorithms* (2023).

    Args:
        params: Parameters or parameter groups, as for optimizers of torch.
        lr: Learning rate: the change of a weight in one step. A tensor is not read on the host.
        betas: Weight of the average in the direction of a step, and its decay rate.
        weight_decay: Fraction `lr * weight_decay` of each weight is subtracted in a step.
        maximize: Whether to maximize the objective instead of minimizing it.

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
        """Apply the weight decay, step by the sign, then update the moment with the gradient."""
        (moments,), (beta1, beta2) = state, group["betas"]
        lr = _learning_rate(group, parameters[0].device)
        if group["weight_decay"] != 0:
            foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        directions = list(foreach_mul(moments, beta1))
        foreach_add_(directions, gradients, alpha=1 - beta1)
        foreach_sign_(directions)
        foreach_mul_(directions, lr)
        foreach_sub_(parameters, directions)
        foreach_mul_(moments, beta2)
        foreach_add_(moments, gradients, alpha=1 - beta2)


def _learning_rate(group: Group, device: torch.device) -> float | torch.Tensor:
    """Return a group's learning rate; copy a tensor to the device without synchronizing."""
    lr: float | torch.Tensor = group["lr"]
    return lr.to(device, non_blocking=True).squeeze() if isinstance(lr, torch.Tensor) else lr
