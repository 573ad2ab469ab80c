"""What the fused step keeps for each parameter: its float32 states, and its counters, which live on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzo.optim.algorithms import Algorithm, Group
from mezzo.optim.masters import Masters
from mezzo.policy.types import Master
from mezzo.scaling.reading import groups_of

_STEPS, _DRAWS = 0, 1


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter with everything that its update reads and writes, but for the gradient."""

    parameter: torch.Tensor
    group: int
    """The place of its group."""
    place: int
    """Its place in the optimizer, and among the counters."""
    address: int
    """Where its data lay when tables were made."""
    states: tuple[tuple[str, torch.Tensor], ...]
    """Name → tensor, as the optimizer's state has them."""
    counters: tuple[tuple[str, torch.Tensor], ...]
    """Counters that the optimizer's state shows."""
    beside: torch.Tensor | None
    """What lies beside a 16-bit parameter."""
    sample: torch.Tensor | None
    """Of the parameter, where what lies beside it needs one."""


class Slots:
    """Makes the slots of an optimizer's parameters from its state, which it completes."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters, algorithm: Algorithm) -> None:
        self._optimizer, self._masters, self._algorithm = optimizer, masters, algorithm
        self.counters = torch.zeros(2, 0)
        """float32 [2, parameters]: steps and draws of each. float32 counts exactly to 2**24, as torch's own `step`."""

    def of(self, parameters: Sequence[torch.Tensor]) -> list[Slot]:
        """The slots of parameters that have gradients on one device."""
        groups = groups_of(self._optimizer)
        places = [(number, parameter) for number, group in enumerate(groups) for parameter in group["params"]]
        if self.counters.shape[1] < len(places) or self.counters.device != parameters[0].device:
            # States hold their counters, in the old memory as well as in the new.
            self.counters = torch.zeros(2, len(places), device=parameters[0].device)
        wanted = set(parameters)
        return [self._make(group, place, parameter) for place, (group, parameter) in enumerate(places) if parameter in wanted]

    def _make(self, group: int, place: int, parameter: torch.Tensor) -> Slot:
        options, state = groups_of(self._optimizer)[group], self._optimizer.state[parameter]
        names = self._algorithm.states(options)
        begun = all(state.get(name) is not None for name in names)
        shown = self._counters(self.counters[:, place], state, begun=begun and bool(names))
        for name in names:
            state[name] = self._state(parameter, state.get(name), options)
        self._masters.show(parameter, self._optimizer.state)
        beside, sample = (self._masters.beside(parameter), self._masters.sample(parameter)) if parameter in self._masters else (None, None)
        return Slot(parameter, group, place, parameter.data_ptr(), tuple((name, state[name]) for name in names), shown, beside, sample)

    def _state(self, parameter: torch.Tensor, held: torch.Tensor | None, group: Group) -> torch.Tensor:
        """A float32 state with the parameter's layout: what is held already, as long as it is that."""
        if held is not None and held.dtype is torch.float32 and held.stride() == parameter.stride() and held.device == parameter.device:
            return held
        made = torch.full_like(parameter, self._algorithm.initial(group), dtype=torch.float32, memory_format=torch.preserve_format)
        return made if held is None else made.copy_(held)

    def _counters(self, own: torch.Tensor, state: dict[str, Any], *, begun: bool) -> tuple[tuple[str, torch.Tensor], ...]:
        shown = []
        if self._algorithm.counts:
            own[_STEPS] = state.get("step", 0)
            state["step"] = own[_STEPS]
            shown.append(("step", state["step"]))
        else:
            # Not shown: it only tells the first step, which starts a momentum, from the others.
            own[_STEPS] = float(begun)
        if self._masters.kind.master is Master.STOCHASTIC:
            own[_DRAWS] = state.get("draws", 0)
            state["draws"] = own[_DRAWS]
            shown.append(("draws", state["draws"]))
        return tuple(shown)
