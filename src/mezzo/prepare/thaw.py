"""Parameters that nobody trained when they were decorated, and somebody trains later: they get a master with their first gradient."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from mezzo.optim.masters import Masters
from mezzo.prepare.given import Optimizer
from mezzo.prepare.weights import Weights
from mezzo.scaling.gradients import parameters


def watch(optimizer: Optimizer, masters: Masters, weights: Weights, undo: ExitStack) -> None:
    """Look before each step whether a 16-bit parameter without a master has a gradient; the stack gets what ends the watch."""
    groups, frozen = len(optimizer.param_groups), _frozen(optimizer, masters, weights)

    def before_step(*_: object) -> None:
        nonlocal groups, frozen
        if len(optimizer.param_groups) != groups:
            groups, frozen = len(optimizer.param_groups), _frozen(optimizer, masters, weights)
        # Mostly there are none, and a step costs nothing more.
        if any(one.grad is not None for one in frozen):
            for parameter in frozen:
                if parameter.grad is not None:
                    weights.hand_over(parameter, masters)
            frozen = _frozen(optimizer, masters, weights)

    undo.callback(optimizer.register_step_pre_hook(before_step).remove)


def _frozen(optimizer: Optimizer, masters: Masters, weights: Weights) -> list[torch.Tensor]:
    return [one for one in parameters(optimizer) if one in weights and one not in masters]
