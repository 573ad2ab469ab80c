"""Samples of parameters: a few elements that show whether other code has written a parameter."""

from __future__ import annotations

import torch

from mezzo._launch import is_dense
from mezzo.scaling.mesh import local

SAMPLES = 128
"""The largest number of elements of a sample; a power of two, as the comparing kernel needs it."""

_MAGNITUDE = 0x7FFF
"""The bits of a 16-bit number except for its sign."""


def sample_spacing(numel: int) -> int:
    """Return the log2 of the distance of sampled elements: 3 samples elements 0, 8, 16 and so on.

    >>> [sample_spacing(numel) for numel in (0, 1, 128, 129, 4096)]
    [0, 0, 0, 1, 5]
    """
    return max(0, (numel - 1).bit_length() - (SAMPLES.bit_length() - 1))


def sample_size(numel: int) -> int:
    """Return the number of elements of the sample of a parameter.

    >>> [sample_size(numel) for numel in (0, 1, 128, 129, 4095)]
    [0, 1, 128, 65, 128]
    """
    return -(-numel >> sample_spacing(numel))


def sampled(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter's sampled elements, or of those of its shard.

    >>> sampled(torch.arange(256)).tolist() == list(range(0, 256, 2))
    True
    """
    value = local(parameter.detach())
    # In memory order, which is the only order that a kernel sees.
    flat = value.as_strided((value.numel(),), (1,)) if is_dense(value) else value.reshape(-1)
    return flat[:: 1 << sample_spacing(flat.numel())]


def matches_sample(parameter: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return whether a parameter still has the values of a sample, as a bool on its device.

    Does not synchronize. False if at least half of the sampled elements differ, as after `fill_` or
    a new initialization. A few may differ: if a weight that is clamped or masked after each step
    lost its whole companion, every small update would be lost. Elements that are zero now are not
    counted, because every format handles these itself.

    >>> sample = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    >>> values = ([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], [1.0, 0.0, 0.0])
    >>> [matches_sample(torch.tensor(value).bfloat16(), sample).item() for value in values]
    [True, False, True]
    """
    now = sampled(parameter).view(torch.int16)
    nonzero = (now & _MAGNITUDE) != 0
    changed = (nonzero & (now != sample.view(torch.int16))).sum()
    return (changed == 0) | (2 * changed < nonzero.sum())
