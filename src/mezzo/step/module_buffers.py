"""Buffers of modules across a skipped step: restore batch-norm statistics, count batches in one launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import nn

from mezzo._torch import foreach_add_, foreach_copy_

_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")


class BufferSnapshot:
    """Buffers of one dtype and device, with room for their values before a step. One piece of memory, so that a handful of launches serve all of them."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)
        self._sizes = [buffer.numel() for buffer in buffers]
        self._before = torch.empty(
            sum(self._sizes), dtype=buffers[0].dtype, device=buffers[0].device
        )
        self._parts = self._split(self._before)

    def save(self) -> None:
        """Note the values."""
        foreach_copy_(self._parts, self._buffers)

    def restore(self, bad: torch.Tensor) -> None:
        """Put the noted values back where `bad`, on the device, is not 0. Chosen and not blended: what is put back may replace a NaN."""
        now = torch.cat([buffer.reshape(-1) for buffer in self._buffers])
        foreach_copy_(
            self._buffers, self._split(torch.where(bad.to(now.device) != 0, self._before, now))
        )

    def put_back(self) -> None:
        """The same where the host knows that the step was bad."""
        foreach_copy_(self._buffers, self._parts)

    def saved(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each buffer with its noted values."""
        return zip(self._buffers, self._parts, strict=True)

    def changed(self) -> list[torch.Tensor]:
        """The buffers that are not as they were; this waits for the device."""
        return [
            buffer
            for buffer, before in zip(self._buffers, self._parts, strict=True)
            if not torch.equal(buffer, before)
        ]

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split(self._sizes)
        return [part.view(buffer.shape) for part, buffer in zip(parts, self._buffers, strict=True)]


class ModuleBuffers:
    """The buffers of models that a forward pass writes. Which ones is learned by looking, once for each combination of training and evaluation modes."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._all = list(dict.fromkeys(buffer for model in models for buffer in model.buffers()))
        self._known: dict[Hashable, list[BufferSnapshot]] = {}
        self._now: list[BufferSnapshot] = []
        self._learning: Hashable | None = None

    def learned(self, mode: Hashable) -> bool:
        """Whether it is known what a forward pass writes in this mode."""
        return not self._all or mode in self._known

    def save(self, mode: Hashable) -> None:
        """Note the values before a step."""
        if self._all:
            self._learning = None if mode in self._known else mode
            self._now = self._known.get(mode) or ([] if mode in self._known else _kept(self._all))
            for kept in self._now:
                kept.save()

    def look(self) -> None:
        """After a forward pass in a new mode: see what it wrote."""
        if self._learning is not None:
            self._known[self._learning] = _kept(
                [buffer for kept in self._now for buffer in kept.changed()]
            )
            self._learning = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers of the models, in the order of `saved`."""
        return self._all

    def saved(self) -> list[torch.Tensor | None]:
        """The noted values, for a state that is saved in the middle of an update; None for buffers that nothing writes."""
        noted = {buffer: before.clone() for kept in self._now for buffer, before in kept.saved()}
        return [noted.get(buffer) for buffer in self._all]

    def load(self, values: list[torch.Tensor | None]) -> None:
        """Take noted values over."""
        pairs = [
            (buffer, value)
            for buffer, value in zip(self._all, values, strict=True)
            if value is not None
        ]
        before = dict(pairs)
        self._now = _kept([buffer for buffer, _ in pairs])
        for kept in self._now:
            for buffer, part in kept.saved():
                part.copy_(before[buffer])

    # The flag itself, known to the host or not.
    def restore(self, bad: torch.Tensor | bool) -> None:  # noqa: FBT001
        """Put the noted values back if the step was bad."""
        for kept in self._now:
            if isinstance(bad, torch.Tensor):
                kept.restore(bad)
            elif bad:
                kept.put_back()


def module_modes(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """What a step may depend on beside its inputs: the modes of modules, and which parameters are trained."""
    return tuple(map(_TRAINING, modules)), tuple(map(_REQUIRES_GRAD, parameters))


def _kept(buffers: Sequence[torch.Tensor]) -> list[BufferSnapshot]:
    sorted_: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in buffers:
        sorted_.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return [BufferSnapshot(group) for group in sorted_.values()]


_COUNTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NAME = "num_batches_tracked"


class BatchCounter:
    """Stands where a layer's counter is while a model runs; a layer does nothing to it but add."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add_(self, number: int) -> BatchCounter:
        """Note so many."""
        self.count += number
        return self


class BatchCounters:
    """The counters of models' batch norms."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {module: None for model in models for module in model.modules()}
        # Without a momentum the average is over all batches, and the counter is read. What is a
        # subclass may do with it what it likes.
        self._tallied = [
            (module, BatchCounter())
            for module in modules
            if type(module) in _COUNTED and module.momentum is not None
        ]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count for as long as this lasts, and add to the counters at the end."""
        tallied = [
            (module, tally)
            for module, tally in self._tallied
            if module.training and module._buffers.get(_NAME) is not None
        ]
        for module, tally in tallied:
            tally.count = 0
            # What an object's own dictionary holds is found before what a module looks up among its
            # buffers, which stay as they are for everybody else.
            module.__dict__[_NAME] = tally
        try:
            yield
        finally:
            for module, _ in tallied:
                del module.__dict__[_NAME]
        counted = [
            (module._buffers[_NAME], tally.count) for module, tally in tallied if tally.count
        ]
        if counted:
            buffers, counts = zip(*counted, strict=True)
            foreach_add_(buffers, counts)
