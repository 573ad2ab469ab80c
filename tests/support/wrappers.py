"""Optimizers that wrap another optimizer, and one with its own master weights."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as in davda54/sam.

    It creates the inner optimizer, and both share their groups.
    """

    def __init__(self, params, base_optimizer, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([one.grad.norm() for one in self._trained()]).norm()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["old_p"] = one.data.clone()
                    one.add_(one.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for one in self._trained():
            one.data = self.state[one]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()

    def _trained(self):
        return [
            one for group in self.param_groups for one in group["params"] if one.grad is not None
        ]


class Lookahead(torch.optim.Optimizer):
    """Lookahead, as in lonePatient/lookahead_pytorch.

    It wraps an optimizer, and does not call the constructor of torch.optim.Optimizer.
    """

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups, self.defaults, self.state = (
            optimizer.param_groups,
            optimizer.defaults,
            defaultdict(dict),
        )

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        if self.count % self.k == 0:
            for group in self.param_groups:
                for fast in group["params"]:
                    slow = self.state[fast].setdefault("slow", fast.data.clone())
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
        self.count += 1
        return loss


class Several(torch.optim.Optimizer):
    """An optimizer for each of several lists of parameters."""

    def __init__(self, optimizers):
        super().__init__(
            [one for each in optimizers for group in each.param_groups for one in group["params"]],
            {},
        )
        self._parts = {"all": tuple(optimizers)}

    def step(self, closure=None):
        for each in self._parts["all"]:
            each.step()


class Hidden(torch.optim.Optimizer):
    """Keeps its inner optimizer in an attribute that mezzo does not search."""

    def __init__(self, optimizer, *, shared):
        super().__init__(
            optimizer.param_groups if shared else [{**group} for group in optimizer.param_groups],
            {},
        )
        self.held = SimpleNamespace(optimizer=optimizer)
        if shared:
            self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        self.held.optimizer.step()


class MasterSGD(torch.optim.Optimizer):
    """SGD with its own float32 masters, which follow parameters that other code has written."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.masters = {
            one: one.detach().float().clone().requires_grad_()
            for group in self.param_groups
            for one in group["params"]
        }
        self.inner = torch.optim.SGD(self.masters.values(), **options)

    @torch.no_grad()
    def step(self, closure=None):
        for one, master in self.masters.items():
            master.copy_(torch.where(master.to(one.dtype) == one, master, one.float()))
            master.grad = None if one.grad is None else one.grad.float()
        self.inner.step()
        for one, master in self.masters.items():
            one.copy_(master)
