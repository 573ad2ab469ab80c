"""Float32 values of many parameters as one flat tensor, read from and written to their masters.

An op over the flat tensor is one launch, where an op for each parameter would be hundreds. Nothing
here synchronizes, and everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mezzo._launch import is_dense
from mezzo._torch import foreach_copy_, foreach_mul_
from mezzo.optim.companion import matches_samples, sampled
from mezzo.optim.master_weights import MasterWeights

_SMALL = 2**16
"""Tensors with fewer elements are copied and selected together, larger ones one by one: a launch
takes as long as 2^16 elements on an H200."""


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate dense tensors, each in memory order, to a new tensor.

    >>> flatten([torch.tensor([[1, 2], [3, 4]]).T, torch.tensor(5)])
    tensor([1, 2, 3, 4, 5])
    """
    return torch.cat([tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors])


def views_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor with the shapes and strides of dense tensors.

    >>> views_like(torch.arange(5), [torch.ones(2, 2).T, torch.ones(())])
    [tensor([[0, 2],
            [1, 3]]), tensor(4)]
    """
    views, offset = [], flat.storage_offset()
    for tensor in tensors:
        views.append(flat.as_strided(tensor.shape, tensor.stride(), offset))
        offset += tensor.numel()
    return views


def kept_if(
    skipped: torch.Tensor | None, before: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """Return `before` if the bool tensor `skipped` is set, else `after`.

    Selects: infinite elements times zero would be NaN.
    """
    return after if skipped is None else torch.where(skipped, before, after)


class FlatValues:
    """The float32 values of dense parameters of one dtype, all with masters or all without.

    Change `flat` in place, then call `write`.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> values = FlatValues(MasterWeights(), [weight])
    >>> values.flat.mul_(2)
    tensor([2., 4.])
    >>> values.write(torch.tensor(True)), weight.tolist()
    (None, [1.0, 2.0])
    >>> values.write(None), weight.tolist()
    (None, [2.0, 4.0])
    """

    def __init__(self, masters: MasterWeights, parameters: Sequence[torch.Tensor]) -> None:
        self._masters, self._parameters = masters, list(parameters)
        self._has_masters = self._parameters[0] in masters
        self._stored = flatten(self._parameters)
        self._companion: torch.Tensor | None = None
        self._companions: list[torch.Tensor] = []
        self.flat = self._stored.clone() if not self._has_masters else self._read()
        """The float32 values, in memory order, one parameter after the other."""

    def _read(self) -> torch.Tensor:
        companions = map(self._masters.companion_tensor, self._parameters)
        self._companions = [companion for companion in companions if companion is not None]
        if self._companions:
            self._companion = flatten(self._companions)
        return self._masters.format.merge(self._stored, self._current_companion())

    def _current_companion(self) -> torch.Tensor | None:
        """Return the companions, zero for parameters that no longer match their samples."""
        samples = self._samples()
        if self._companion is None or not samples:
            return self._companion
        current, matches = self._companion.clone(), matches_samples(self._parameters, samples)
        # As bits: a companion of NaN times zero would be NaN.
        bits = views_like(current.view(torch.int16), self._companions)
        foreach_mul_(bits, list(matches.to(torch.int16).unbind()))
        return current

    def _samples(self) -> list[torch.Tensor]:
        samples = map(self._masters.sample, self._parameters)
        return [sample for sample in samples if sample is not None]

    def views(self) -> list[torch.Tensor]:
        """Return the value of each parameter, as views of `flat`."""
        return views_like(self.flat, self._parameters)

    def write(self, skipped: torch.Tensor | None) -> None:
        """Write the values to the parameters and their masters, unless `skipped` is set.

        Then every bit stays, also of NaNs and of companions that are not exact.
        """
        rounded, companion = self.flat, None
        if self._has_masters:
            rounded, companion = self._masters.format.split(self.flat, self._stored.dtype)
        _write(self._parameters, kept_if(skipped, self._stored, rounded))
        if self._companion is not None and companion is not None:
            _write(self._companions, kept_if(skipped, self._companion, companion))
        self._write_samples(skipped)
        if self._has_masters:
            self._masters.mark_written(self._parameters)

    def _write_samples(self, skipped: torch.Tensor | None) -> None:
        samples = self._samples() if self._companions else []
        if samples:
            now = torch.cat([sampled(parameter) for parameter in self._parameters])
            _write(samples, kept_if(skipped, flatten(samples), now))


@torch.no_grad()
def _write(tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
    foreach_copy_(tensors, views_like(flat, tensors))


class SavedTensors:
    """Copies of tensors that an update changes in place, to restore them if it is skipped.

    >>> live = [torch.ones(2), torch.ones(())]
    >>> saved = SavedTensors(live)
    >>> _ = [one.fill_(torch.nan) for one in live]
    >>> saved.restore_if(torch.tensor(True)), live
    (None, [tensor([1., 1.]), tensor(1.)])
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        is_small = [tensor.numel() < _SMALL and is_dense(tensor) for tensor in tensors]
        self._large = [tensor for tensor, small in zip(tensors, is_small, strict=True) if not small]
        self._copies = [torch.empty_like(tensor) for tensor in self._large]
        if self._large:
            foreach_copy_(self._copies, self._large)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor, small in zip(tensors, is_small, strict=True):
            if small:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        self._small = [(live, flatten(live)) for live in by_dtype.values()]

    def restore_if(self, skipped: torch.Tensor) -> None:
        """Write the copies back if the bool tensor `skipped` is set."""
        for live, copy in zip(self._large, self._copies, strict=True):
            torch.where(skipped, copy, live, out=live)
        for small, before in self._small:
            _write(small, kept_if(skipped, before, flatten(small)))
