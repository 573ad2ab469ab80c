"""Batches in classes of the user's own: Apex casts what has a method `to`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from mezzo._torch import pytree


def cast_custom_batches(model: nn.Module, inputs: torch.dtype, outputs: torch.dtype) -> tuple[Callable[[], None], ...]:
    """Let a model cast custom batches on the way in and out by their own `to(dtype)`; what comes back takes that off again."""
    # Functions of this module, so that the model can be pickled.
    before = model.register_forward_pre_hook(partial(_before, inputs), with_kwargs=True)
    return before.remove, model.register_forward_hook(partial(_after, outputs)).remove


def _before(dtype: torch.dtype, _model: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast((args, kwargs), dtype)


def _after(dtype: torch.dtype, _model: nn.Module, _args: Any, result: Any) -> Any:
    return _cast(result, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda value: value.to(dtype) if _is_custom(value) else value, values)


def _is_custom(value: object) -> bool:
    """Whether a value is neither a tensor, which the model's door casts, nor anything of torch's, but has a method `to`."""
    return not isinstance(value, torch.Tensor | nn.Module | torch.device | torch.dtype) and callable(getattr(value, "to", None))
