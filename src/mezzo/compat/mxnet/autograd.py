"""`mxnet.autograd`: `record`, `pause` and `backward` of one or several outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from mezzo.autocasting.autocast import autocast_all_devices

Heads = torch.Tensor | Sequence[torch.Tensor]


def record(
    train_mode: bool = True,
) -> AbstractContextManager[object]:
    """Enable gradients inside. `train_mode` has no effect: use `module.train()`.

    >>> with record():
    ...     (torch.ones(1, requires_grad=True) * 2).requires_grad
    True
    """
    return torch.enable_grad()


def pause(
    train_mode: bool = False,
) -> AbstractContextManager[object]:
    """Disable gradients inside. `train_mode` has no effect."""
    return torch.no_grad()


def backward(heads: Heads, head_grads: Heads | None = None, retain_graph: bool = False) -> None:
    """Accumulate the gradients of one or several outputs; `head_grads` default to 1.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> backward([weight * 2, weight.sum()])
    >>> weight.grad
    tensor([3., 3.])
    """
    heads = [heads] if isinstance(heads, torch.Tensor) else list(heads)
    if head_grads is None:
        head_grads = [torch.ones_like(head) for head in heads]
    elif isinstance(head_grads, torch.Tensor):
        head_grads = [head_grads]
    # Backward runs in the dtypes of the forward pass, without casts of its own.
    with autocast_all_devices(enabled=False):
        torch.autograd.backward(heads, list(head_grads), retain_graph=retain_graph)
