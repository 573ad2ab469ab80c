"""Restore buffers such as batch-norm statistics after a skip; count batches in one launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter

import torch
from torch import nn

from mezzo._torch import foreach_add_, foreach_copy_

_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")


def module_modes(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return `training` of each module and `requires_grad` of each parameter.

    A step may depend on these besides its inputs.
    """
    return tuple(map(_TRAINING, modules)), tuple(map(_REQUIRES_GRAD, parameters))


class ModuleBuffers:
    """Buffers that a forward pass writes, with their values before the step.

    Which buffers these are is found by comparison, once for each combination of modes.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        buffers = dict.fromkeys(buffer for model in models for buffer in model.buffers())
        # Sparse ones, such as the adjacency of a graph, are constants.
        self._all = [buffer for buffer in buffers if buffer.layout is torch.strided]
        self._written: dict[Hashable, list[BufferSnapshot]] = {}
        """Snapshots of the buffers that are written, by modes."""
        self._current: list[BufferSnapshot] = []
        """Snapshots of the current step, which `restore` reads."""
        self._unknown_modes: Hashable | None = None
        """Modes of the current step, if its written buffers are to be found."""

    def knows(self, modes: Hashable) -> bool:
        """Return whether it is known which buffers a forward pass writes in these modes."""
        return not self._all or modes in self._written

    def save(self, modes: Hashable) -> None:
        """Save the values before a step: of the written buffers, or of all if not known."""
        if self._all:
            known = modes in self._written
            self._unknown_modes = None if known else modes
            self._current = self._written[modes] if known else _snapshots(self._all)
            for snapshot in self._current:
                snapshot.save()

    @property
    def current(self) -> list[BufferSnapshot]:
        """Snapshots that a skipped step restores; a captured update depends on them."""
        return self._current

    def select(self, modes: Hashable) -> None:
        """Use the values that a captured graph has saved in these modes."""
        self._current = self._written.get(modes, [])

    def find_written(self) -> None:
        """Find the buffers that a forward pass has written, if not known. This synchronizes."""
        if self._unknown_modes is not None:
            self._written[self._unknown_modes] = _snapshots(
                [buffer for snapshot in self._current for buffer in snapshot.changed()]
            )
            self._unknown_modes = None

    # The flag itself, on the host or on the device.
    def restore(self, found_nonfinite: torch.Tensor | bool) -> None:  # noqa: FBT001
        """Restore the saved values if the step was skipped."""
        for snapshot in self._current:
            if isinstance(found_nonfinite, torch.Tensor):
                snapshot.restore_where(found_nonfinite)
            elif found_nonfinite:
                snapshot.restore()

    # -- checkpoints of an unfinished update -------------------------------------------------------

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers of the models, in the order of `state`."""
        return self._all

    def state(self) -> list[torch.Tensor | None]:
        """Return copies of the saved values; None for buffers that are not written."""
        saved = {
            buffer: before.clone()
            for snapshot in self._current
            for buffer, before in snapshot.pairs()
        }
        return [saved.get(buffer) for buffer in self._all]

    def load_state(self, values: list[torch.Tensor | None]) -> None:
        """Load saved values that `state` returned."""
        saved = {
            buffer: value
            for buffer, value in zip(self._all, values, strict=True)
            if value is not None
        }
        self._current = _snapshots(list(saved))
        for snapshot in self._current:
            for buffer, before in snapshot.pairs():
                before.copy_(saved[buffer])


class BufferSnapshot:
    """Buffers of one dtype and device, with memory for their values before a step.

    The memory is one allocation, so that a few launches copy all of them.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)
        self._sizes = [buffer.numel() for buffer in buffers]
        self._memory = torch.empty(
            sum(self._sizes), dtype=buffers[0].dtype, device=buffers[0].device
        )
        self._before = self._split(self._memory)
        # Values after a step, laid out alike, so that few launches select between both.
        self._selected = torch.empty_like(self._memory)
        self._after = self._split(self._selected)

    def save(self) -> None:
        """Save the values."""
        foreach_copy_(self._before, self._buffers)

    def changed(self) -> list[torch.Tensor]:
        """Return the buffers that differ from their saved values. This synchronizes."""
        return [buffer for buffer, before in self.pairs() if not torch.equal(buffer, before)]

    def restore(self) -> None:
        """Restore the saved values."""
        foreach_copy_(self._buffers, self._before)

    def restore_where(self, flag: torch.Tensor) -> None:
        """Restore the saved values if a flag on the device is not 0. Does not synchronize."""
        foreach_copy_(self._after, self._buffers)
        # Select rather than multiply by the flag: the current value may be NaN.
        skipped = flag.to(self._memory.device) != 0
        torch.where(skipped, self._memory, self._selected, out=self._selected)
        foreach_copy_(self._buffers, self._after)

    def pairs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return each buffer with its saved value."""
        return zip(self._buffers, self._before, strict=True)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split(self._sizes)
        return [
            piece.view(buffer.shape) for piece, buffer in zip(pieces, self._buffers, strict=True)
        ]


def _snapshots(buffers: Sequence[torch.Tensor]) -> list[BufferSnapshot]:
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in buffers:
        groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return [BufferSnapshot(group) for group in groups.values()]


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NAME = "num_batches_tracked"


class BatchCounter:
    """Replaces a layer's `num_batches_tracked` while a model runs; the layer only adds to it."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        """Start again from 0."""
        self.count = 0

    def add_(self, number: int) -> BatchCounter:
        """Add to the count."""
        self.count += number
        return self


class BatchCounters:
    """The `num_batches_tracked` buffers of models, incremented together."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {module: None for model in models for module in model.modules()}
        # Not without momentum: the average is then over all batches, and the layer reads the
        # counter. Not subclasses, which may do anything with it.
        self._counters = [
            (module, BatchCounter())
            for module in modules
            if type(module) in _BATCH_NORMS and module.momentum is not None
        ]

    def counting(self) -> AbstractContextManager[None]:
        """Return a context that counts batches on the host and adds them at its end."""
        return self._counting() if self._counters else nullcontext()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        active = [
            (module, counter)
            for module, counter in self._counters
            if module.training and module._buffers.get(_NAME) is not None
        ]
        for module, counter in active:
            counter.reset()
            # Python finds an entry of the instance's dictionary before `Module.__getattr__` looks
            # at the buffers, which stay as they are for all other code.
            module.__dict__[_NAME] = counter
        try:
            yield
        finally:
            for module, _ in active:
                del module.__dict__[_NAME]
        counted = [
            (module._buffers[_NAME], counter.count) for module, counter in active if counter.count
        ]
        if counted:
            buffers, counts = zip(*counted, strict=True)
            foreach_add_(buffers, counts)
