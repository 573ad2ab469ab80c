"""`Decoration`: what `decorate` changed, stored on each decorated model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.forward import DECORATION
from mezzo.prepare.half_weights import HalfWeights
from mezzo.prepare.plan import Plan
from mezzo.scaling.scaler import GradScaler


class Accumulating(Protocol):
    """A training step that may update after several calls."""

    @property
    def position(self) -> int:
        """Number of calls since the last update."""

    @property
    def updates(self) -> int:
        """Number of updates so far, skipped ones included."""

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler; None if gradients are not scaled."""


class Decoration:
    """Models and optimizers that were decorated together, and how to undo it."""

    def __init__(
        self,
        plan: Plan,
        models: tuple[nn.Module, ...],
        optimizers: tuple[Optimizer, ...],
        weights: HalfWeights,
    ) -> None:
        self.plan, self.models, self.optimizers, self.weights = plan, models, optimizers, weights
        self.undo_stack = ExitStack()
        """Callbacks that remove wrappers and hooks, the last first."""
        self.training_steps: WeakSet[Accumulating] = WeakSet()
        """Training steps that were created from these models and optimizers."""
        self.scaler: GradScaler | bool | None = None
        """The scaler of training steps that are created without `scaler=`: an integration shares
        its own."""
        self.holds_averages = False
        """Whether the models hold averaged weights, inside `EMA.applied()`, and must not train."""

    def share_scaler(self, scaler: GradScaler | None) -> None:
        """Set the scaler, or none, of training steps that are created without `scaler=`."""
        self.scaler = False if scaler is None else scaler

    @contextmanager
    def holding_averages(self) -> Iterator[None]:
        """Refuse training inside the block, in which the models hold averaged weights."""
        before, self.holds_averages = self.holds_averages, True
        try:
            yield
        finally:
            self.holds_averages = before

    def undo(self) -> None:
        """Restore models and optimizers, with the current float32 values of all tensors.

        Raises `UnsupportedError`, before anything changes, if a tensor was cast or moved since.
        """
        self.weights.refuse_changed()
        self.undo_stack.close()
        self.weights.restore()
        flatten_rnns(self.models)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as None: a copy of a model is not decorated."""
        return _nothing, ()


def _nothing() -> None:
    # Pickles of decorated models refer to this function by name.
    return None


def all_decorated(
    models: Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> tuple[nn.Module | Optimizer, ...]:
    """Return models and optimizers in one tuple."""
    return (*models, *optimizers)


def decoration_of(owner: nn.Module | Optimizer) -> Decoration | None:
    """Return the decoration of a model or an optimizer; None if it is not decorated."""
    decoration: Decoration | None = owner.__dict__.get(DECORATION)
    return decoration


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the decorated optimizer inside a wrapper of Accelerate or Lightning.

    Any other optimizer is returned as it is.
    """
    inner: Any = getattr(optimizer, "optimizer", None)
    is_wrapper = any(base.__name__ in _OPTIMIZER_WRAPPERS for base in type(optimizer).__mro__)
    return inner if is_wrapper and decoration_of(inner) is not None else optimizer


_OPTIMIZER_WRAPPERS = ("AcceleratedOptimizer", "_FabricOptimizer", "LightningOptimizer")
"""Classes whose `step()` calls that of their `optimizer`."""


def has_exact_masters(optimizer: Optimizer, models: tuple[nn.Module, ...]) -> bool:
    """Return whether the exact values of these models are those of the optimizer's masters."""
    decoration = decoration_of(optimizer)
    return (
        decoration is not None
        and MASTER_FORMATS[decoration.plan.master].exact
        and all(model in models for model in decoration.models)
    )


def mark(owner: nn.Module | Optimizer, decoration: Decoration) -> Callable[[], None]:
    """Store a decoration on a model or an optimizer; return a function that removes it."""
    owner.__dict__[DECORATION] = decoration
    return partial(owner.__dict__.pop, DECORATION, None)


def flatten_rnns(models: tuple[nn.Module, ...]) -> None:
    """Put the weights of each recurrent layer into one block of memory again, for cuDNN."""
    supported = torch.backends.cudnn.CUDNN_TENSOR_DTYPES
    # torch's set lacks bfloat16, which cuDNN's recurrent layers support; with weights that are not
    # in one block they would copy them at every call.
    added = {torch.bfloat16} - supported
    supported |= added
    try:
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()
    finally:
        supported -= added
