"""What `Model` is given to work on: data sets and loaders of torch's, and batches of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from mezzo._casting import map_tensors


class Shuffled(Sampler[int]):
    """The places of a data set, in another order every time: on the CPU, whatever device is the default, where torch's own sampler fails."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._count, device="cpu").tolist()

    def __len__(self) -> int:
        return self._count


def loader_of(data: Any, *, batch_size: int, shuffle: bool = False, drop_last: bool = False, num_workers: int = 0) -> Iterable[Any]:
    """A loader as it is, and one around a data set."""
    if isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, list | tuple):
        if not isinstance(data, Iterable):
            raise TypeError(f"The data should be a torch Dataset or DataLoader, or batches to go through, got {type(data).__name__}.")
        return data
    return DataLoader(data, batch_size=batch_size, sampler=Shuffled(len(data)) if shuffle else None, drop_last=drop_last, num_workers=num_workers)


def inputs_taken(forward: Callable[..., Any]) -> int:
    """How many values of a batch go into a network: as many as its forward needs; the rest are labels. Others are said: `Model(network, inputs=[...])`.

    >>> inputs_taken(torch.nn.Sequential().forward)
    1
    """
    needed = [parameter for parameter in inspect.signature(forward).parameters.values() if parameter.default is inspect.Parameter.empty]
    return sum(one.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in needed) or 1


def listed(values: Any) -> list[Any]:
    """One value, or several, as a list."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def placed(values: Any, device: torch.device) -> list[Any]:
    """Values of a batch on a device, arrays as tensors."""
    return [map_tensors(one if isinstance(one, torch.Tensor) else torch.as_tensor(one), lambda tensor: tensor.to(device)) for one in listed(values)]
