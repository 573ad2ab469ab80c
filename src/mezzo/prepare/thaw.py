"""Converted parameters that get a gradient in an optimizer later, because they were frozen or were not in it: they get a master with that gradient."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from mezzo._errors import UnsupportedError
from mezzo.optim.bound import Bound
from mezzo.prepare.weights import Weights


def watch(bound: Bound, weights: Weights, undo: ExitStack) -> None:
    """Give masters to parameters that a bound optimizer meets without one; the stack gets what ends that."""

    def newcomers(found: list[torch.Tensor]) -> None:
        for parameter in found:
            if parameter not in weights and Weights.of(parameter) is not None:
                raise UnsupportedError(
                    f"{type(bound.optimizer).__name__} was given a parameter of shape {tuple(parameter.shape)} that another mezzo.decorate has made "
                    f"{parameter.dtype}, and whose master it does not know. Decorate both models with both optimizers in one call: "
                    "decorate([model, other], [optimizer, other_optimizer])."
                )
        for parameter in found:
            if parameter in weights:
                weights.hand_over(parameter, bound.masters)

    bound.newcomers = newcomers
    undo.callback(setattr, bound, "newcomers", None)
