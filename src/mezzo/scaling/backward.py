"""Backward of one loss apart from the gradients of others, which have other scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mezzo.scaling.gradients import parameters

Kept = list[tuple[torch.Tensor, torch.Tensor | None]]
"""Parameters and the gradients they had before."""


@contextmanager
def apart(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.Tensor]]:
    """Let the parameters of some optimizers hold no gradients but new ones; afterwards the old ones are added. Nothing is lost if the body fails."""
    unique = {id(parameter): parameter for optimizer in optimizers for parameter in parameters(optimizer) if parameter.requires_grad}
    kept: Kept = [(parameter, parameter.grad) for parameter in unique.values()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield list(unique.values())
    except BaseException:
        for parameter, old in kept:
            parameter.grad = old
        raise
    _add(kept)


@contextmanager
def backward_apart(loss: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer], **kwargs: Any) -> Iterator[Sequence[torch.optim.Optimizer]]:
    """Run backward while the parameters of some optimizers hold no other gradients."""
    with apart(optimizers) as tensors:
        loss.backward(**({"inputs": tensors} | kwargs))
        yield optimizers


@torch.no_grad()
def _add(kept: Kept) -> None:
    for parameter, old in kept:
        new = parameter.grad
        if old is None:
            continue
        if new is None:
            parameter.grad = old
        elif old.layout is new.layout is torch.strided:
            # In place: whoever holds the gradient, a bucket of a data-parallel wrapper for one, keeps holding it.
            parameter.grad = old.add_(new)
        else:
            parameter.grad = old + new if old.layout is torch.strided else new + old
