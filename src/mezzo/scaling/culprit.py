"""Who spoiled a step: the first parameter whose gradient was not finite, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.scaling import kernels
from mezzo.scaling.copies import Copy
from mezzo.scaling.reading import groups_of


class Names:
    """What parameters are called: as a watched model calls them, else as the optimizer does, else by their position in it."""

    def __init__(self) -> None:
        self._watched = WeakIdKeyDictionary()

    def watch(self, model: nn.Module) -> None:
        """Learn the names of a model's parameters."""
        for name, parameter in model.named_parameters():
            self._watched[parameter] = name

    def of(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
        """The name of one parameter of an optimizer."""
        watched = self._watched.get(parameter)
        if watched is not None:
            return str(watched)
        position = 0
        for group in groups_of(optimizer):
            for index, one in enumerate(group["params"]):
                if one is parameter:
                    names = group.get("param_names")
                    return f"parameter {position}" if names is None else str(names[index])
                position += 1
        return "a parameter that left the optimizer"


class Culprit(Protocol):
    """Somebody who can name the first bad parameter of a step."""

    def name(self) -> str | None:
        """Its name, or None when every gradient was finite; this may wait for the device."""

    def suspects(self) -> bool:
        """Whether there is anybody to name."""

    def fetch(self) -> list[Copy]:
        """Start what is needed to name it without waiting."""

    def told(self, fetched: list[Copy]) -> str | None:
        """Its name from what was fetched and has arrived."""


class Known:
    """A culprit whose name the host knows already, or nobody."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def name(self) -> str | None:
        """The name."""
        return self._name

    def suspects(self) -> bool:
        """Whether a name is known."""
        return self._name is not None

    def fetch(self) -> list[Copy]:
        """Nothing is needed."""
        return []

    def told(self, fetched: list[Copy]) -> str | None:  # noqa: ARG002
        """The name."""
        return self._name


NOBODY = Known()
"""No culprit is known."""


class Flagged:
    """A culprit among parameters with a flag each on a device: raised by the pass that checked their gradients, or made from those when somebody asks."""

    def __init__(self, names: Names, optimizer: torch.optim.Optimizer) -> None:
        self._names, self._optimizer = names, optimizer
        self._rows: list[tuple[Callable[[], torch.Tensor], Sequence[torch.Tensor]]] = []

    def add(self, flags: torch.Tensor, owners: Sequence[torch.Tensor]) -> None:
        """Add the flags of some parameters."""
        self._rows.append((lambda: flags, owners))

    def hold(self, gradients: Sequence[torch.Tensor], owners: Sequence[torch.Tensor]) -> None:
        """Hold the gradients of some parameters, to look at them only if somebody asks."""
        self._rows.append((partial(_flags_of, gradients), owners))

    def name(self) -> str | None:
        """The name; this waits for the device."""
        return self._first([flags().tolist() for flags, _ in self._rows])

    def suspects(self) -> bool:
        """Whether any parameter has a flag."""
        return bool(self._rows)

    def fetch(self) -> list[Copy]:
        """Start to copy the flags."""
        return [Copy(flags()) for flags, _ in self._rows]

    def told(self, fetched: list[Copy]) -> str | None:
        """The name."""
        return self._first([copy.values() for copy in fetched])

    def _first(self, raised: list[list[float]]) -> str | None:
        for (_, owners), flags in zip(self._rows, raised, strict=True):
            for owner, flag in zip(owners, flags, strict=True):
                if flag:
                    return self._names.of(owner, self._optimizer)
        return None


def _flags_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    device = gradients[0].device
    flags = torch.zeros(len(gradients), dtype=torch.int32, device=device)
    kernels.check(gradients, torch.zeros((), device=device), flags)
    return flags
