"""Batch norm counts its batches, one launch for each layer: 53 in a ResNet-50, or 3 % of a captured step. Here they are counted on the host and added in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from mezzo._torch import foreach_add_

_COUNTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NAME = "num_batches_tracked"


class Tally:
    """Stands where a layer's counter is while a model runs; a layer does nothing to it but add."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add_(self, number: int) -> Tally:
        """Note so many."""
        self.count += number
        return self


class Tallies:
    """The counters of models' batch norms."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {module: None for model in models for module in model.modules()}
        # Without a momentum the average is over all batches, and the counter is read. What is a subclass may do with it what it likes.
        self._tallied = [(module, Tally()) for module in modules if type(module) in _COUNTED and module.momentum is not None]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count for as long as this lasts, and add to the counters at the end."""
        tallied = [(module, tally) for module, tally in self._tallied if module.training and module._buffers.get(_NAME) is not None]
        for module, tally in tallied:
            tally.count = 0
            # What an object's own dictionary holds is found before what a module looks up among its buffers, which stay as they are for everybody else.
            module.__dict__[_NAME] = tally
        try:
            yield
        finally:
            for module, _ in tallied:
                del module.__dict__[_NAME]
        counted = [(module._buffers[_NAME], tally.count) for module, tally in tallied if tally.count]
        if counted:
            buffers, counts = zip(*counted, strict=True)
            foreach_add_(buffers, counts)
