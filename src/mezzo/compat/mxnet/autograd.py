"""`mxnet.autograd`: a scope that records, and backward from one output or several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from mezzo.autocasting.autocast import autocast_all_devices

Heads = torch.Tensor | Sequence[torch.Tensor]


# MXNet's call shape; modes are the modules' own here.
def record(
    train_mode: bool = True,
) -> AbstractContextManager[object]:
    """Record what is computed inside, for gradients.

    >>> with record():
    ...     (torch.ones(1, requires_grad=True) * 2).requires_grad
    True
    """
    return torch.enable_grad()


# MXNet's call shape.
def pause(
    train_mode: bool = False,
) -> AbstractContextManager[object]:
    """Do not record."""
    return torch.no_grad()


# MXNet's call shape.
def backward(heads: Heads, head_grads: Heads | None = None, retain_graph: bool = False) -> None:
    """Compute gradients of outputs of any shape, added up; each is weighted by 1 where nothing else is given.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> backward([weight * 2, weight.sum()])
    >>> weight.grad
    tensor([3., 3.])
    """
    several = [heads] if isinstance(heads, torch.Tensor) else list(heads)
    if head_grads is None:
        given = [torch.ones_like(one) for one in several]
    else:
        given = [head_grads] if isinstance(head_grads, torch.Tensor) else list(head_grads)
    # Casts are the forward pass's business: backward runs in the dtypes that it left.
    with autocast_all_devices(enabled=False):
        torch.autograd.backward(several, given, retain_graph=retain_graph)
