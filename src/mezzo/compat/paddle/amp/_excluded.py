"""Which layers `decorate` leaves in float32: Paddle's normalisation layers, and `excluded_layers`."""

from __future__ import annotations

from collections.abc import Iterator
from glob import escape
from typing import Any

import torch
from torch import nn

from mezzo._torch import BatchNorm, InstanceNorm

BATCH_NORMS: tuple[type[nn.Module], ...] = (BatchNorm,)
"""Kept in float32 always, subclasses included."""
OTHER_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, InstanceNorm)
"""Kept in float32 beside float16 alone: Paddle casts them to bfloat16, and group norms to both."""


def read(excluded: Any) -> tuple[tuple[nn.Module, ...], tuple[type, ...]]:
    """The layers and the types in `excluded_layers`."""
    several = excluded if isinstance(excluded, list) else [] if excluded is None else [excluded]
    if not isinstance(excluded, list) and several and not _is_layer(excluded):
        raise TypeError(f"excluded_layers must be either a nn.Layer instance/type or a list of nn.Layer instances/types. It is {excluded!r}.")
    for one in several:
        if not _is_layer(one):
            raise TypeError(f"issubclass() arg 1 must be a class: excluded_layers has {one!r}. It may have layers and their types.")
    return tuple(one for one in several if isinstance(one, nn.Module)), tuple(one for one in several if isinstance(one, type))


def kept(models: list[nn.Module], dtype: str, excluded: Any) -> list[nn.Module | str]:
    """What stays in float32, as `keep_full` takes it. A layer is kept with all that is in it, a type's layers without: a kept Sequential casts its parts."""
    layers, types = read(excluded)
    norms = BATCH_NORMS if dtype == "bfloat16" else BATCH_NORMS + OTHER_NORMS
    found: list[nn.Module | str] = [one for model in models for one in model.modules() if any(one is layer for layer in layers)]
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, norms + types):
                found += [module] if not list(module.children()) else list(_own_names(name, module))
    return found


def _own_names(prefix: str, module: nn.Module) -> Iterator[str]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                yield escape(f"{prefix}.{name}" if prefix else name)


def _is_layer(one: Any) -> bool:
    return isinstance(one, nn.Module) or (isinstance(one, type) and issubclass(one, nn.Module))
