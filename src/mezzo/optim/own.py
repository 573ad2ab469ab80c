"""What the optimizers that torch lacks have in common: arguments are checked, gradients gathered and closures called in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from mezzo._errors import UnsupportedError
from mezzo._torch import foreach_neg

Group = dict[str, Any]
Tensors = list[torch.Tensor]

_BETAS = 2


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer in torch's foreach ops: one round of them for each device and dtype of a group."""

    held: ClassVar[tuple[str, ...]] = ()
    """What the state of a parameter holds, in the order in which `update` takes it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, unless one of its values cannot be meant."""
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def check(self, group: Group) -> None:
        """Refuse values that cannot be meant."""
        lr, betas = group["lr"], group["betas"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            self.refuse("lr", f"a tensor of {lr.numel()} elements", "a number of at least 0, or a tensor that holds one")
        if not float(lr) >= 0.0:
            self.refuse("lr", lr, "at least 0")
        if len(betas) != _BETAS or not all(0.0 <= beta < 1.0 for beta in betas):
            self.refuse("betas", betas, "two numbers, each at least 0 and below 1")
        if not group["weight_decay"] >= 0.0:
            self.refuse("weight_decay", group["weight_decay"], "at least 0")

    def refuse(self, name: str, value: object, allowed: str) -> None:
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
                self.update(group, parameters, list(foreach_neg(gradients)) if group["maximize"] else gradients, *state)
        return loss

    def update(self, group: Group, parameters: Tensors, gradients: Tensors, *state: Tensors) -> None:
        """Step parameters of one device and dtype down their gradients."""
        raise NotImplementedError

    def start(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step."""
        return {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in self.held}

    def _gathered(self, group: Group) -> Iterable[list[Tensors]]:
        """Parameters, gradients and what their state holds, in lists of one device and dtype each."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return []
        gradients = [self._dense(parameter.grad) for parameter in parameters]
        for parameter in parameters:
            state = self.state[parameter]
            # Others may keep things in it too, so that it need not be empty.
            if not state.keys() >= set(self.held):
                state.update(self.start(parameter))
        lists = [parameters, gradients, *([self.state[parameter][name] for parameter in parameters] for name in self.held)]
        return [list(rows) for rows, _ in self._group_tensors_by_device_and_dtype(lists).values()]  # type: ignore[arg-type]

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is torch.strided and not gradient.is_complex():
            return gradient
        kind = "complex" if gradient.is_complex() else f"sparse ({gradient.layout})"
        raise UnsupportedError(
            f"{type(self).__name__} takes dense real gradients, got a {kind} one. "
            "Make the embedding with sparse=False, or hold complex weights as torch.view_as_real, or use another optimizer for this parameter."
        )


def rate(group: Group, device: torch.device) -> float | torch.Tensor:
    """A group's learning rate. A number stays one, in float64; a tensor goes to the device without being read."""
    lr: float | torch.Tensor = group["lr"]
    return lr.to(device, non_blocking=True).squeeze() if isinstance(lr, torch.Tensor) else lr
