"""Functions of `megengine.functional` that create, join and reshape tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mezzo.compat.megengine._tensor import Tensor, parse_dtype
from mezzo.compat.megengine.device import parse_device

__all__ = [
    "arange",
    "broadcast_to",
    "concat",
    "copy",
    "expand_dims",
    "eye",
    "flatten",
    "full",
    "full_like",
    "gather",
    "linspace",
    "ones",
    "ones_like",
    "repeat",
    "reshape",
    "roll",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "tile",
    "transpose",
    "where",
    "zeros",
    "zeros_like",
]

Shape = int | Sequence[int]


def zeros(shape: Shape, *, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return zeros on the default device, or on `device`.

    >>> zeros((2, 1), device="cpu0")
    Tensor([[0.],
            [0.]])
    """
    return full(shape, 0, dtype=dtype, device=device)


def ones(shape: Shape, *, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return ones on the default device, or on `device`."""
    return full(shape, 1, dtype=dtype, device=device)


def full(shape: Shape, value: Any, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """Return a tensor filled with a value."""
    size = [shape] if isinstance(shape, int) else list(shape)
    filled = torch.full(
        size,
        value,
        dtype=None if dtype is None else parse_dtype(dtype),
        device=parse_device(device),
    )
    return filled.as_subclass(Tensor)


def arange(
    start: float = 0,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: Any = "float32",
    device: str | None = None,
) -> Tensor:
    """Return evenly spaced values, float32 by default."""
    if stop is None:
        start, stop = 0, start
    values = torch.arange(start, stop, step, dtype=parse_dtype(dtype), device=parse_device(device))
    return values.as_subclass(Tensor)


def linspace(
    start: float, stop: float, num: int, *, dtype: Any = "float32", device: str | None = None
) -> Tensor:
    """Return `num` evenly spaced values, both ends included."""
    values = torch.linspace(start, stop, num, dtype=parse_dtype(dtype), device=parse_device(device))
    return values.as_subclass(Tensor)


def eye(
    N: int,
    M: int | None = None,
    *,
    dtype: Any = "float32",
    device: str | None = None,
) -> Tensor:
    """Return ones on the diagonal of an N × M matrix."""
    rows = torch.eye(
        N, N if M is None else M, dtype=parse_dtype(dtype), device=parse_device(device)
    )
    return rows.as_subclass(Tensor)


def zeros_like(inp: torch.Tensor) -> torch.Tensor:
    """Return zeros of the same shape, dtype and device."""
    return torch.zeros_like(inp)


def ones_like(inp: torch.Tensor) -> torch.Tensor:
    """Return ones of the same shape, dtype and device."""
    return torch.ones_like(inp)


def full_like(inp: torch.Tensor, value: Any) -> torch.Tensor:
    """Return a filled tensor of the same shape, dtype and device."""
    return torch.full_like(inp, value)


def concat(inps: Iterable[torch.Tensor], axis: int = 0, device: str | None = None) -> torch.Tensor:
    """Join tensors along an axis.

    >>> concat([torch.zeros(1), torch.ones(1)])
    tensor([0., 1.])
    """
    joined = torch.cat(list(inps), axis)
    return joined if device is None else joined.to(parse_device(device))


def stack(inps: Iterable[torch.Tensor], axis: int = 0, device: str | None = None) -> torch.Tensor:
    """Join tensors along a new axis."""
    joined = torch.stack(list(inps), axis)
    return joined if device is None else joined.to(parse_device(device))


def split(
    inp: torch.Tensor, nsplits_or_sections: int | Sequence[int], axis: int = 0
) -> list[torch.Tensor]:
    """Split into equal parts, or at indices, as `numpy.split` does."""
    if isinstance(nsplits_or_sections, int) and inp.shape[axis] % nsplits_or_sections:
        raise ValueError(
            f"Axis {axis} has {inp.shape[axis]} elements, which are not divisible into"
            f" {nsplits_or_sections} equal parts. Pass the indices to split at."
        )
    parts = nsplits_or_sections
    return list(torch.tensor_split(inp, parts if isinstance(parts, int) else list(parts), axis))


def reshape(inp: torch.Tensor, target_shape: Shape) -> torch.Tensor:
    """Return the same elements in another shape."""
    return inp.reshape(target_shape if isinstance(target_shape, int) else tuple(target_shape))


def flatten(inp: torch.Tensor, start_axis: int = 0, end_axis: int = -1) -> torch.Tensor:
    """Join the axes from `start_axis` to `end_axis` into one.

    >>> flatten(torch.zeros(2, 3, 4), 1).shape
    torch.Size([2, 12])
    """
    return torch.flatten(inp, start_axis, end_axis)


def transpose(inp: torch.Tensor, pattern: Iterable[int | str]) -> torch.Tensor:
    """Permute the axes; "x" in the pattern is a new axis of one element."""
    axes = list(pattern)
    permuted = inp.permute(*(axis for axis in axes if isinstance(axis, int)))
    for place, axis in enumerate(axes):
        if axis == "x":
            permuted = permuted.unsqueeze(place)
    return permuted


def swapaxes(inp: torch.Tensor, axis1: int, axis2: int) -> torch.Tensor:
    """Swap two axes."""
    return torch.swapaxes(inp, axis1, axis2)


def expand_dims(inp: torch.Tensor, axis: int | Sequence[int]) -> torch.Tensor:
    """Insert axes of one element at these places of the result."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    for place in sorted(axis % (inp.dim() + len(axes)) for axis in axes):
        inp = inp.unsqueeze(place)
    return inp


def squeeze(inp: torch.Tensor, axis: int | Sequence[int] | None = None) -> torch.Tensor:
    """Remove axes of one element."""
    if axis is None:
        return torch.squeeze(inp)
    return torch.squeeze(inp, axis if isinstance(axis, int) else tuple(axis))


def broadcast_to(inp: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Repeat axes of one element up to a shape."""
    return torch.broadcast_to(inp, [shape] if isinstance(shape, int) else list(shape))


def repeat(inp: torch.Tensor, repeats: int, axis: int | None = None) -> torch.Tensor:
    """Repeat each element, as `numpy.repeat` does."""
    return torch.repeat_interleave(inp, repeats, axis)


def tile(inp: torch.Tensor, reps: int | Sequence[int]) -> torch.Tensor:
    """Repeat the whole tensor, as `numpy.tile` does."""
    return torch.tile(inp, (reps,) if isinstance(reps, int) else tuple(reps))


def where(mask: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Choose elements of `x` where the mask is true, otherwise of `y`."""
    return torch.where(mask, x, y)


def gather(inp: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    """Choose elements along an axis by indices of any integer dtype."""
    return torch.gather(inp, axis, index.long())


def roll(
    inp: torch.Tensor, shift: int | Sequence[int], axis: int | Sequence[int] | None = None
) -> torch.Tensor:
    """Move the elements along axes; those at the end come first."""
    return torch.roll(inp, shift, axis)  # type: ignore[arg-type]


def copy(inp: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """Copy a tensor, to another device if one is passed."""
    return inp.clone() if device is None else inp.to(parse_device(device), copy=True)
