"""`paddle.nn.utils`: clip gradients, and join parameters to a vector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import utils

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle._tensor import as_tensor

__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "parameters_to_vector",
    "vector_to_parameters",
]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Any:
    """Clip gradients to a total norm, after `unscale_`; return their norm before.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], 1.0).item()
    5.0
    """
    return as_tensor(utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite))


def clip_grad_value_(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clip each element of the gradients."""
    utils.clip_grad_value_(parameters, clip_value)


def parameters_to_vector(parameters: Iterable[Any], name: str | None = None) -> Any:
    """Return the values of parameters as one vector."""
    return as_tensor(utils.parameters_to_vector(parameters))


def vector_to_parameters(vec: Any, parameters: Iterable[Any], name: str | None = None) -> None:
    """Set the values of parameters from one vector."""
    utils.vector_to_parameters(vec, parameters)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=utils)
