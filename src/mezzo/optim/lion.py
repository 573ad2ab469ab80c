"""Lion: steps of one size in each direction, by the sign of an interpolated gradient."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from mezzo._torch import foreach_add_, foreach_mul, foreach_mul_, foreach_sign_, foreach_sub_
from mezzo.optim.own import Group, OwnOptimizer, Tensors, rate


class Lion(OwnOptimizer):
    """Chen et al., *Symbolic discovery of optimization algorithms* (2023), with decoupled weight decay.

    One moment where Adam keeps two. As every weight moves by `lr` at each step, take a rate 3 to 10 times smaller than for Adam, and a larger decay.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> weight.grad = torch.tensor([3.0, -0.001])
    >>> Lion([weight], lr=0.25).step()
    >>> weight.data
    tensor([ 0.7500, -0.7500])
    """

    held = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def update(self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors) -> None:
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
