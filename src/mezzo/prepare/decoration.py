"""What `decorate` did to models and optimizers, known by each of them for as long as it lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.half_weights import HalfWeights
from mezzo.prepare.plan import Plan

_MARK = "_mezzo_decoration"


class Accumulating(Protocol):
    """A training step that may update after several calls."""

    @property
    def position(self) -> int:
        """Calls since the last update."""


class Decoration:
    """Models and optimizers that were decorated together, and the way back."""

    def __init__(
        self,
        plan: Plan,
        models: tuple[nn.Module, ...],
        optimizers: tuple[Optimizer, ...],
        weights: HalfWeights,
    ) -> None:
        self.plan, self.models, self.optimizers, self.weights = plan, models, optimizers, weights
        self.undo_stack = ExitStack()
        """Takes off what was put on, the last first."""
        self.training_steps: WeakSet[Accumulating] = WeakSet()
        """The training steps that were made of these models and optimizers."""
        self.lent = False
        """Whether the models hold averaged weights for a while, which must not be trained."""

    def undo(self) -> None:
        """Put everything back, with the current exact values: whole or not at all."""
        self.weights.refuse_changed()
        self.undo_stack.close()
        self.weights.restore()
        flatten_rnns(self.models)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model, pickled or deep, is a model of its own: it does not belong to this."""
        return _nothing, ()


def _nothing() -> None:
    return None


def all_decorated(
    models: Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> tuple[nn.Module | Optimizer, ...]:
    """All that is decorated together."""
    return (*models, *optimizers)


def decoration_of(one: nn.Module | Optimizer) -> Decoration | None:
    """What a model or an optimizer was decorated with."""
    found: Decoration | None = one.__dict__.get(_MARK)
    return found


def mark(one: nn.Module | Optimizer, decoration: Decoration) -> Callable[[], None]:
    """Note on a model or an optimizer what it was decorated with; what comes back takes the note off."""
    one.__dict__[_MARK] = decoration
    return partial(one.__dict__.pop, _MARK, None)


def flatten_rnns(models: tuple[nn.Module, ...]) -> None:
    """Let cuDNN have the weights of recurrent layers in one piece again, after they moved."""
    taken = torch.backends.cudnn.CUDNN_TENSOR_DTYPES
    # torch's list of what cuDNN takes leaves bfloat16 out, which cuDNN's recurrent layers take;
    # unflattened they would copy their weights at every call.
    added = {torch.bfloat16} - taken
    taken |= added
    try:
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()
    finally:
        taken -= added
