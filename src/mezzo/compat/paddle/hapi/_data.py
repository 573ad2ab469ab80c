"""What `Model` is given to work on: data sets and loaders of torch's, and batches of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from mezzo._casting import map_tensors


def loader_of(data: Any, *, batch_size: int, shuffle: bool = False, drop_last: bool = False, num_workers: int = 0) -> Iterable[Any]:
    """A loader as it is, and one around a data set."""
    if isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, list | tuple):
        if not isinstance(data, Iterable):
            raise TypeError(f"The data should be a torch Dataset or DataLoader, or batches to go through, got {type(data).__name__}.")
        return data
    # On the CPU whatever device is the default: torch shuffles there.
    with torch.device("cpu"):
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers, generator=torch.Generator("cpu"))


def inputs_taken(forward: Callable[..., Any]) -> int:
    """How many values of a batch go into a network: as many as its forward has parameters; the rest are labels.

    >>> inputs_taken(torch.nn.Sequential().forward)
    1
    """
    kinds = [parameter.kind for parameter in inspect.signature(forward).parameters.values()]
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds) or 1


def listed(values: Any) -> list[Any]:
    """One value, or several, as a list."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def placed(values: Any, device: torch.device) -> list[Any]:
    """Values of a batch on a device, arrays as tensors."""
    return [map_tensors(one if isinstance(one, torch.Tensor) else torch.as_tensor(one), lambda tensor: tensor.to(device)) for one in listed(values)]
