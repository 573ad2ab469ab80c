"""LAMB: Adam's direction, for each parameter as long a step as its weights are large."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from mezzo._torch import foreach_add_, foreach_addcmul_, foreach_div, foreach_div_, foreach_lerp_, foreach_mul_, foreach_norm, foreach_sqrt_, foreach_sub_
from mezzo.optim.own import Group, OwnOptimizer, Tensors, rate


class LAMB(OwnOptimizer):
    """You et al., *Large batch optimization for deep learning: training BERT in 76 minutes* (2019), with bias correction.

    A step changes a parameter by the fraction `lr` of its norm, whatever the size of its gradient, so that large batches and rates stay stable.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([100.0, 100.0])
    >>> LAMB([weight], lr=0.1, weight_decay=0.0).step()
    >>> (weight.data - torch.tensor([3.0, 4.0])).norm()
    tensor(0.5000)
    """

    held = ("step", "exp_avg", "exp_avg_sq")

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
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for held in self.state.values():
            if "step" in held and not isinstance(held["step"], torch.Tensor):
                held["step"] = torch.tensor(float(held["step"]))

    def check(self, group: Group) -> None:
        """Refuse values that cannot be meant."""
        super().check(group)
        if not group["eps"] >= 0.0:
            self.refuse("eps", group["eps"], "at least 0")

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Moments of zeros, and the step count on the CPU, as torch's Adam has it."""
        return {**super().start(parameter), "step": torch.zeros((), dtype=torch.float32)}

    def update(self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors) -> None:
        """Adam's direction plus the decay, scaled to the norm of the weights."""
        steps, moments, squares = state
        beta1, beta2 = group["betas"]
        foreach_add_(steps, 1.0)
        foreach_lerp_(moments, gradients, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        directions = _directions(group, moments, squares, self.corrections(group, steps))
        if group["weight_decay"] != 0:
            foreach_add_(directions, parameters, alpha=group["weight_decay"])
        sizes = self.ratios(group, parameters, directions) * rate(group, parameters[0].device)
        foreach_mul_(directions, list(sizes.unbind()))
        foreach_sub_(parameters, directions)

    def corrections(self, group: Group, steps: Tensors) -> tuple[list[float], list[float]]:
        """What each parameter's first and second moment are divided by, for they started at zero."""
        # In float64: 1 - 0.999 ** t in float32 is off by 6e-5 at the first steps.
        counts = [step.item() for step in steps]
        first, second = ([1 - beta**count for count in counts] for beta in group["betas"])
        return first, second

    def ratios(self, group: Group, parameters: Tensors, directions: Tensors) -> torch.Tensor:  # noqa: ARG002 - a variant may decide by the group
        """How long each parameter's step is, as a multiple of its direction."""
        return _trust(parameters, directions)


def _directions(group: Group, moments: Tensors, squares: Tensors, corrections: tuple[list[float], list[float]]) -> Tensors:
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
