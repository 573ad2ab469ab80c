"""Outputs of a step: the loss among them, copies for the host, means over several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mezzo._casting import map_tensors, tensors_of
from mezzo._errors import PolicyError
from mezzo._launch import AsyncCopy
from mezzo.step.inputs import copy_outputs, format_shapes

# -- the loss among what was returned --------------------------------------------------------------


class Returned(NamedTuple):
    """What a loss function or the body of a step returned."""

    loss: torch.Tensor | None
    """The loss; None if there is none."""
    aux: Any
    """What was returned besides the loss; None if nothing was."""


def split_loss(returned: Any) -> Returned:
    """Return the loss, and what was returned besides.

    That is `(loss, aux)`, also with several values after the loss, or an object or mapping with a
    `loss`, which is then itself the aux.

    >>> loss = torch.ones(())
    >>> split_loss((loss, {"accuracy": 0.5})).aux
    {'accuracy': 0.5}
    """
    if isinstance(returned, torch.Tensor):
        return Returned(returned, None)
    named = _named_loss(returned)
    if named is not None:
        return Returned(named, returned)
    if isinstance(returned, tuple) and returned and isinstance(returned[0], torch.Tensor):
        loss, *aux = returned
        return Returned(loss, aux[0] if len(aux) == 1 else tuple(aux) or None)
    return Returned(None, returned)


def loss_of_output(output: Any) -> torch.Tensor:
    """Return the loss that a model computed itself.

    That is `output.loss`, `output["loss"]`, or the only tensor of the output that has one element.

    >>> float(loss_of_output((torch.zeros(4, 2), torch.tensor(0.25))))
    0.25
    """
    named = _named_loss(output)
    if named is not None:
        return named
    tensors = tensors_of(output)
    single = [tensor for tensor in tensors if tensor.numel() == 1]
    if len(single) == 1:
        return single[0]
    names = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise PolicyError(
        f"There is no loss in the model's output, a {type(output).__name__}{names}:"
        f" {format_shapes(tensors)}. Without loss_fn the loss is output.loss, output['loss'] or the"
        " only tensor with one element. Pass what the model computes its loss from, such as"
        " labels=, or pass loss_fn=."
    )


def _named_loss(value: Any) -> torch.Tensor | None:
    loss = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


# -- copies for the caller -------------------------------------------------------------------------


class KeptOutputs:
    """Detached outputs of a call, which are copied only if they are read.

    `map_tensors` does not look inside, so that copies of a call's results leave it alone. The
    tensors of a captured graph are overwritten by each replay.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = map_tensors(value, torch.Tensor.detach)

    def copy(self) -> Any:
        """Return copies, which no later call overwrites."""
        return copy_outputs(self._value)

    @property
    def value(self) -> Any:
        """The outputs themselves, which the next call may overwrite."""
        return self._value


class HostOutputs:
    """Outputs of a step that are being copied to the host.

    >>> pending = HostOutputs({"accuracy": torch.tensor(0.5)})
    >>> pending.ready(), pending.get()
    (True, {'accuracy': tensor(0.5000)})
    """

    def __init__(self, outputs: Any) -> None:
        devices: set[torch.device] = set()

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu":
                return tensor.detach().clone()
            devices.add(tensor.device)
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return pinned.copy_(tensor.detach(), non_blocking=True)

        self._outputs = map_tensors(outputs, copy)
        self._arrived = [torch.Event(device=device) for device in devices]
        for event in self._arrived:
            event.record()

    def ready(self) -> bool:
        """Return whether the copies are complete. Does not synchronize."""
        return all(event.query() for event in self._arrived)

    def get(self) -> Any:
        """Return the outputs as tensors on the host. Waits until they have arrived."""
        for event in self._arrived:
            event.synchronize()
        return self._outputs


# -- means -----------------------------------------------------------------------------------------


class RunningMeans:
    """Means of the loss and of scalar outputs over windows of calls. No call synchronizes."""

    def __init__(self, window: int, device: torch.device) -> None:
        self._window, self._device = window, device
        self._names: tuple[str, ...] = ()
        self._totals = torch.empty(0)
        self._parts: list[torch.Tensor] = []
        """The elements of the totals, as views."""
        self._calls = 0
        self._pending: list[tuple[tuple[str, ...], AsyncCopy]] = []
        """Finished windows whose means may not have arrived, the oldest first."""
        self._last: dict[str, float] = {}

    def add(self, loss: torch.Tensor | None, aux: Any) -> None:
        """Add the values of a call; at the end of a window copy the means to the host."""
        scalars = _scalars(loss, aux)
        names = tuple(scalars)
        if names != self._names:
            # Other metrics than before: a new window.
            self._names, self._calls = names, 0
            self._totals = torch.zeros(len(names), device=self._device)
            self._parts = [self._totals[place] for place in range(len(names))]
        for part, value in zip(self._parts, scalars.values(), strict=True):
            part.add_(value)
        self._calls += 1
        if self._calls == self._window:
            self._pending.append((names, AsyncCopy(self._totals / self._calls)))
            self._totals.zero_()
            self._calls = 0
            self.read()

    def read(self) -> dict[str, float]:
        """Return the means of the last window that has arrived; empty before the first."""
        while self._pending and self._pending[0][1].arrived():
            names, copy = self._pending.pop(0)
            self._last = dict(zip(names, copy.values(), strict=True))
        return dict(self._last)


def _scalars(loss: torch.Tensor | None, aux: Any) -> dict[str, torch.Tensor | float]:
    """Return the loss and the scalars of a mapping by name; a single scalar is `"outputs"`."""
    found = aux if isinstance(aux, Mapping) else {"outputs": aux}
    named = {"loss": loss} | {str(name): value for name, value in found.items()}
    return {
        name: value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value)
        for name, value in named.items()
        if isinstance(value, int | float)
        or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex())
    }
