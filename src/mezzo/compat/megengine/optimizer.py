"""`megengine.optimizer`: torch's optimizers with MegEngine's defaults and chained calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch.optim.optimizer import ParamsT

import mezzo
from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.optim.fused_algorithms import without_hooks

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "LRScheduler",
    "MultiStepLR",
    "Optimizer",
    "clip_grad_norm",
    "clip_grad_value",
]

Optimizer = torch.optim.Optimizer


class _ChainedOptimizer(torch.optim.Optimizer):
    """Return the optimizer from each call, for `opt.step().clear_grad()`."""

    def __init__(self, params: ParamsT, *args: Any, **kwargs: Any) -> None:
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameters, got the module"
                f" {type(params).__name__}. Pass net.parameters()."
            )
        super().__init__(params, *args, **kwargs)

    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; return the optimizer."""
        # torch already runs the step hooks around this method; the inner step would repeat them.
        without_hooks(super().step.__func__)(self, closure)  # type: ignore[attr-defined]
        return self

    def clear_grad(self) -> Self:
        """Set the gradients to None; return the optimizer."""
        self.zero_grad(set_to_none=True)
        return self


class SGD(_ChainedOptimizer, torch.optim.SGD):
    """Stochastic gradient descent.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.ones(1)
    >>> SGD([weight], lr=0.5).step().clear_grad() is not None, weight.item(), weight.grad
    (True, 0.5, None)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )


class Adam(_ChainedOptimizer, torch.optim.Adam):
    """Adam with weight decay added to the gradient (L2)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class AdamW(_ChainedOptimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class Adagrad(_ChainedOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, lr_decay, weight_decay, eps=eps)


class Adadelta(_ChainedOptimizer, torch.optim.Adadelta):
    """`torch.optim.Adadelta`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, rho, eps, weight_decay)


class LAMB(_ChainedOptimizer, mezzo.LAMB):
    """`mezzo.LAMB`, with bias correction."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class LRScheduler:
    """`megengine.optimizer.LRScheduler`: base class; define `get_lr` with `self.current_epoch`."""

    def __init__(self, optimizer: Optimizer, current_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError("optimizer argument given to the lr_scheduler should be Optimizer")
        self.optimizer, self.current_epoch = optimizer, current_epoch
        for index, group in enumerate(optimizer.param_groups):
            if current_epoch == -1:
                group.setdefault("initial_lr", group["lr"])
            elif "initial_lr" not in group:
                raise KeyError(
                    "param 'initial_lr' is not specified in"
                    f" param_groups[{index}] when resuming an optimizer"
                )
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self.step()

    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch, or to the one that is passed, and set its learning rates."""
        self.current_epoch = self.current_epoch + 1 if epoch is None else epoch
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        raise NotImplementedError(f"Define get_lr() in {type(self).__name__}.")


class MultiStepLR(LRScheduler):
    """`megengine.optimizer.MultiStepLR`: multiply by gamma at each milestone."""

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        current_epoch: int = -1,
    ) -> None:
        if list(milestones) != sorted(milestones):
            raise ValueError(
                f"Milestones should be a list of increasing integers. Got {milestones}"
            )
        self.milestones, self.gamma = milestones, gamma
        super().__init__(optimizer, current_epoch)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        factor = self.gamma ** bisect_right(self.milestones, self.current_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return milestones, gamma and the epoch."""
        return {
            "milestones": self.milestones,
            "gamma": self.gamma,
            "current_epoch": self.current_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict."""
        self.milestones, self.gamma = state_dict["milestones"], state_dict["gamma"]
        self.current_epoch = state_dict["current_epoch"]


def clip_grad_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], max_norm: float, ord: float = 2.0
) -> torch.Tensor:
    """Clip gradients to a total norm; return their norm before.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm([weight], 1.0)
    tensor(5.)
    """
    return torch.nn.utils.clip_grad_norm_(tensors, max_norm, ord)


@torch.no_grad()
def clip_grad_value(
    tensors: torch.Tensor | Iterable[torch.Tensor], lower: float, upper: float
) -> None:
    """Clamp every element of the gradients to `[lower, upper]`."""
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if tensor.grad is not None:
            tensor.grad.clamp_(lower, upper)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=torch.optim)
