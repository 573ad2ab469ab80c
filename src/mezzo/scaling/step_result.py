"""`StepResult`, and the name of the first parameter with a non-finite gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mezzo._launch import AsyncCopy
from mezzo.scaling import check_unscale
from mezzo.scaling.schedule_sync import groups_of


class ParameterNames:
    """What parameters are called: as a watched model calls them, else as the optimizer does, else by their position in it."""

    def __init__(self) -> None:
        self._watched = WeakIdKeyDictionary()

    def register(self, model: nn.Module) -> None:
        """Learn the names of a model's parameters."""
        for name, parameter in model.named_parameters():
            self._watched[parameter] = name

    def name_of(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
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


class NonfiniteSource(Protocol):
    """Somebody who can name the first bad parameter of a step."""

    def name(self) -> str | None:
        """Its name, or None when every gradient was finite; this may wait for the device."""

    def has_candidates(self) -> bool:
        """Whether there is anybody to name."""

    def fetch(self) -> list[AsyncCopy]:
        """Start what is needed to name it without waiting."""

    def name_from(self, fetched: list[AsyncCopy]) -> str | None:
        """Its name from what was fetched and has arrived."""


class KnownSource:
    """A culprit whose name the host knows already, or nobody."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def name(self) -> str | None:
        """The name."""
        return self._name

    def has_candidates(self) -> bool:
        """Whether a name is known."""
        return self._name is not None

    def fetch(self) -> list[AsyncCopy]:
        """Nothing is needed."""
        return []

    def name_from(self, fetched: list[AsyncCopy]) -> str | None:  # noqa: ARG002
        """The name."""
        return self._name


NO_SOURCE = KnownSource()
"""No culprit is known."""


class FlaggedSource:
    """A culprit among parameters with a flag each on a device: raised by the pass that checked their gradients, or made from those when somebody asks."""

    def __init__(self, names: ParameterNames, optimizer: torch.optim.Optimizer) -> None:
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

    def has_candidates(self) -> bool:
        """Whether any parameter has a flag."""
        return bool(self._rows)

    def fetch(self) -> list[AsyncCopy]:
        """Start to copy the flags."""
        return [AsyncCopy(flags()) for flags, _ in self._rows]

    def name_from(self, fetched: list[AsyncCopy]) -> str | None:
        """The name."""
        return self._first([copy.values() for copy in fetched])

    def _first(self, raised: list[list[float]]) -> str | None:
        for (_, owners), flags in zip(self._rows, raised, strict=True):
            for owner, flag in zip(owners, flags, strict=True):
                if flag:
                    return self._names.name_of(owner, self._optimizer)
        return None


def _flags_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    device = gradients[0].device
    flags = torch.zeros(len(gradients), dtype=torch.int32, device=device)
    check_unscale.check(gradients, torch.zeros((), device=device), flags)
    return flags


class StepResult:
    """The outcome of `scaler.step(optimizer)`.

    `value` is what the optimizer's own step returned; `skipped` says whether the step was skipped,
    and only reading it may wait for the device.

    >>> StepResult.known(None, skipped=False)
    StepResult(stepped, value=None)
    """

    __slots__ = ("_culprit", "_found", "_skipped", "value")

    def __init__(
        self, value: Any, found: torch.Tensor | None, culprit: NonfiniteSource | None = None
    ) -> None:
        self.value = value
        self._found = found
        self._skipped: bool | None = None
        self._culprit = culprit

    @classmethod
    def known(
        cls, value: Any, *, skipped: bool, culprit: NonfiniteSource | None = None
    ) -> StepResult:
        """A result that the host knows already."""
        result = cls(value, None, culprit)
        result._skipped = skipped
        return result

    @property
    def found_inf(self) -> torch.Tensor | None:
        """The flag on the device, where the host does not know it: 0 after a good step, else 1."""
        return self._found

    @property
    def skipped(self) -> bool:
        """Whether the gradients were not finite and the parameters were left alone."""
        if self._skipped is None:
            self._skipped = self._found is not None and bool(self._found)
        return self._skipped

    @property
    def first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient was not finite; None after a good step, and where nobody looked at single parameters."""
        return (self._culprit or NO_SOURCE).name() if self.skipped else None

    def __repr__(self) -> str:
        told = (
            "not read yet" if self._skipped is None else ("skipped" if self._skipped else "stepped")
        )
        return f"StepResult({told}, value={self.value!r})"
