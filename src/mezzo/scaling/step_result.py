"""`StepResult`, and the name of the first parameter with a non-finite gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mezzo._launch import AsyncCopy
from mezzo.scaling import check_unscale
from mezzo.scaling.gradient_counts import CountedGradients, GradientCounts
from mezzo.scaling.mesh import named_shards
from mezzo.scaling.schedule_sync import groups_of


class StepResult:
    """The result of `scaler.step(optimizer)`.

    `value` is the return value of the optimizer's own step. Reading `skipped` or `first_nonfinite`
    synchronizes where only the device has the answer; everything else does not.

    >>> StepResult.known(None, skipped=False)
    StepResult(stepped, value=None)
    """

    __slots__ = ("_found_inf", "_skipped", "_source", "value")

    def __init__(
        self, value: Any, found_inf: torch.Tensor | None, source: NonfiniteSource | None = None
    ) -> None:
        self.value = value
        self._found_inf = found_inf
        self._skipped: bool | None = None
        self._source = source

    @classmethod
    def known(
        cls, value: Any, *, skipped: bool, source: NonfiniteSource | None = None
    ) -> StepResult:
        """Create a result whose outcome is known on the host."""
        result = cls(value, None, source)
        result._skipped = skipped
        return result

    @property
    def found_inf(self) -> torch.Tensor | None:
        """The flag on the device: 0 after a successful step, else 1.

        None if the outcome was known on the host.
        """
        return self._found_inf

    @property
    def skipped(self) -> bool:
        """Whether a gradient was not finite, so that the parameters were not updated."""
        if self._skipped is None:
            self._skipped = self._found_inf is not None and bool(self._found_inf)
        return self._skipped

    @property
    def first_nonfinite(self) -> str | None:
        """Name of the first parameter with a non-finite gradient.

        None after a successful step, and if single parameters were not checked.
        """
        return (self._source or NO_SOURCE).name() if self.skipped else None

    def __repr__(self) -> str:
        if self._skipped is None:
            outcome = "not read yet"
        else:
            outcome = "skipped" if self._skipped else "stepped"
        return f"StepResult({outcome}, value={self.value!r})"


def first_nonfinite(results: Iterable[StepResult | None]) -> str | None:
    """Return the first parameter with a non-finite gradient in the steps of an update, by name.

    None among the results is a step without a scaler. This synchronizes.
    """
    names = (result.first_nonfinite for result in results if result is not None)
    return next((name for name in names if name is not None), None)


class ParameterNames:
    """Names of parameters: in a registered model, else in the optimizer, else their position."""

    def __init__(self) -> None:
        self._registered = WeakIdKeyDictionary()

    def register(self, model: nn.Module) -> None:
        """Use the names of a model's parameters. Does not keep the model alive."""
        for name, parameter in named_shards(model):
            self._registered[parameter] = name

    def name_of(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
        """Return the name of a parameter of an optimizer."""
        registered = self._registered.get(parameter)
        if registered is not None:
            return str(registered)
        position = 0
        for group in groups_of(optimizer):
            for index, member in enumerate(group["params"]):
                if member is parameter:
                    names = group.get("param_names")
                    return f"parameter {position}" if names is None else str(names[index])
                position += 1
        return "a parameter that is no longer in the optimizer"


class NonfiniteSource(Protocol):
    """The first parameter with a non-finite gradient in a step, found when it is needed."""

    def name(self) -> str | None:
        """Return its name, or None if every gradient was finite. This may synchronize."""

    def has_candidates(self) -> bool:
        """Return whether any parameter was checked."""

    def fetch(self) -> list[AsyncCopy]:
        """Start the copies to the host that `name_from` needs."""

    def name_from(self, fetched: list[AsyncCopy]) -> str | None:
        """Return its name from copies that have arrived. Does not synchronize."""


class KnownSource:
    """A source whose name is known on the host; None means that there is no source."""

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def name(self) -> str | None:
        """Return the name."""
        return self._name

    def has_candidates(self) -> bool:
        """Return whether there is a name."""
        return self._name is not None

    def fetch(self) -> list[AsyncCopy]:
        """Return no copies: none are needed."""
        return []

    def name_from(self, fetched: list[AsyncCopy]) -> str | None:  # noqa: ARG002 - none are fetched
        """Return the name."""
        return self._name


NO_SOURCE = KnownSource()
"""No source is known."""


class _FlagRow(NamedTuple):
    """Parameters that were checked together, and where their flags are."""

    flags: Callable[[], torch.Tensor]
    """Returns one flag per parameter, nonzero if its gradient was not finite."""
    parameters: Sequence[torch.Tensor]


class FlaggedSource:
    """A source among parameters with one flag each on a device.

    The flags are set by the kernel that checked the gradients, or computed from the gradients when
    the name is needed.
    """

    def __init__(
        self,
        names: ParameterNames,
        optimizer: torch.optim.Optimizer,
        counts: GradientCounts | None = None,
    ) -> None:
        self._names, self._optimizer = names, optimizer
        self._counts = counts
        self._rows: list[_FlagRow] = []

    def counted(self, parameters: Sequence[torch.Tensor]) -> CountedGradients | None:
        """Return where the check counts the gradients of some parameters; None if it does not."""
        return None if self._counts is None else self._counts.of(parameters)

    def add(self, flags: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Add the flags of some parameters."""
        self._rows.append(_FlagRow(lambda: flags, parameters))

    def hold(self, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Keep the gradients of some parameters, to check them when the name is needed."""
        self._rows.append(_FlagRow(partial(_flags_of, gradients), parameters))

    def name(self) -> str | None:
        """Return the name. This synchronizes."""
        return self._first([row.flags().tolist() for row in self._rows])

    def has_candidates(self) -> bool:
        """Return whether any parameter has a flag."""
        return bool(self._rows)

    def fetch(self) -> list[AsyncCopy]:
        """Start copies of the flags."""
        return [AsyncCopy(row.flags()) for row in self._rows]

    def name_from(self, fetched: list[AsyncCopy]) -> str | None:
        """Return the name from copies of the flags."""
        return self._first([copy.values() for copy in fetched])

    def _first(self, values: list[list[float]]) -> str | None:
        for row, flags in zip(self._rows, values, strict=True):
            for parameter, flag in zip(row.parameters, flags, strict=True):
                if flag:
                    return self._names.name_of(parameter, self._optimizer)
        return None


def _flags_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    device = gradients[0].device
    flags = torch.zeros(len(gradients), dtype=torch.int32, device=device)
    check_unscale.check(gradients, torch.zeros((), device=device), flags)
    return flags
