"""Samples of 16-bit parameters: they tell whether a remainder or a compensation still belongs to the value that its parameter has.

A write through `.data` does not move a tensor's version, and a remainder says nothing about the value it was left by. So up to 128 elements, evenly spaced in memory,
are kept as they were when the companion tensor was written. This costs 256 bytes a parameter, and one small read each step.
"""

from __future__ import annotations

import torch

from mezzo.scaling.kernels import is_dense

SAMPLES = 128
"""The most elements of a sample; a power of two, as the kernel that compares needs it."""

_MAGNITUDE = 0x7FFF
"""The bits of a 16-bit number but for its sign."""


def spacing(numel: int) -> int:
    """Return how far sampled elements lie apart, as a power of two: with 3, elements 0, 8, 16 and so on.

    >>> [spacing(numel) for numel in (0, 1, 128, 129, 4096)]
    [0, 0, 0, 1, 5]
    """
    return max(0, (numel - 1).bit_length() - (SAMPLES.bit_length() - 1))


def sampled(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter's sampled elements.

    >>> sampled(torch.arange(256)).tolist() == list(range(0, 256, 2))
    True
    """
    value = parameter.detach()
    # In the order of memory, which is all that a kernel sees.
    flat = value.as_strided((value.numel(),), (1,)) if is_dense(value) else value.reshape(-1)
    return flat[:: 1 << spacing(flat.numel())]


def belongs(parameter: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return whether a parameter still has the values of a sample, as a bool on its device: no synchronization.

    It has not if at least half of the sampled elements are others, as after `fill_` or a new initialization. A few may be: dropping the companion of a whole weight
    that is clamped or masked after each step would lose every small update. Elements that are zero now are left out, because every kind deals with these by itself.

    >>> weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    >>> [belongs(torch.tensor(values).bfloat16(), weight).item() for values in ([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], [1.0, 0.0, 0.0])]
    [True, False, True]
    """
    now = sampled(parameter).view(torch.int16)
    there = (now & _MAGNITUDE) != 0
    changed = (there & (now != sample.view(torch.int16))).sum()
    return (changed == 0) | (2 * changed < there.sum())
