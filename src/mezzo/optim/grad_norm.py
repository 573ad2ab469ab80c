"""`mezzo.grad_norm`: the norm of the gradients at an optimizer's last step."""

from __future__ import annotations

import torch

from mezzo._errors import PolicyError, UnsupportedError
from mezzo.optim.binding import Optimizer, optimizer_binding


def grad_norm(optimizer: Optimizer) -> torch.Tensor:
    """Return the norm of all gradients at an optimizer's last step, unscaled and before clipping.

    Args:
        optimizer: An optimizer that was decorated with `clip_norm=`, or is in a training step
            with `clip_norm=` or `grad_norm=True`.

    Returns:
        A float32 tensor on the optimizer's device. Getting it does not synchronize; reading it,
        as `.item()` does, synchronizes.

    Raises:
        PolicyError: This is not an optimizer.
        UnsupportedError: The optimizer computes no norm, or has not stepped yet.

    >>> import mezzo
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = mezzo.decorate(model, optimizer, dtype="bfloat16", clip_norm=1.0)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> optimizer.step()
    >>> mezzo.grad_norm(optimizer)
    tensor(5.)
    """
    if not isinstance(optimizer, Optimizer):
        raise PolicyError(
            f"grad_norm takes an optimizer, got {type(optimizer).__name__}. Pass the optimizer that"
            " was decorated; for gradients of a model call torch.nn.utils.get_total_norm."
        )
    binding = optimizer_binding(optimizer)
    if binding is None or not binding.computes_norm:
        raise UnsupportedError(
            f"This {type(optimizer).__name__} computes no norm of its gradients: it was decorated"
            " without clip_norm=. Pass clip_norm=1.0 to mezzo.decorate(model, optimizer, ...), or"
            " call torch.nn.utils.get_total_norm on unscaled gradients."
        )
    norm = binding.grad_norm
    if norm is None:
        raise UnsupportedError(
            "grad_norm() was called before the first step. Call optimizer.step() first."
        )
    return norm
