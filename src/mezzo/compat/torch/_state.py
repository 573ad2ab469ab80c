"""What torch's scaler keeps under names with an underscore, over mezzo's scales and records: its tests and its users' tricks read and write them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch.amp.grad_scaler import OptState

from mezzo.scaling.record import Record
from mezzo.scaling.scaler import GradScaler as MezzoScaler
from mezzo.scaling.words import Stage

_STAGES = {Stage.READY: OptState.READY, Stage.UNSCALED: OptState.UNSCALED, Stage.STEPPED: OptState.STEPPED}
_BACK = {theirs: ours for ours, theirs in _STAGES.items()}


class OptimizerState(dict[str, Any]):
    """One optimizer's entry; what is written to it counts."""

    def __init__(self, record: Record) -> None:
        super().__init__(stage=_STAGES[record.stage], found_inf_per_device=record.flags(0))
        self._record = record

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "stage":
            self._record.stage = _BACK[value]
        elif key == "found_inf_per_device":
            self._record.found[0] = value
            # Nobody told the host what these flags hold.
            self._record.told.append(None)


class OptimizerStates(MutableMapping[Any, dict[str, Any]]):
    """Every optimizer's entry by its `id`; a new one is made by looking, as in torch's defaultdict."""

    def __init__(self, records: dict[Any, Record]) -> None:
        self._records = records

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return OptimizerState(self._records.setdefault(key, Record()))

    def __setitem__(self, key: Any, value: dict[str, Any]) -> None:
        self._records[key] = Record(_BACK[value["stage"]], {0: value["found_inf_per_device"]}, [None])

    def __delitem__(self, key: Any) -> None:
        del self._records[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


class PrivateNames(MezzoScaler):
    """The private attributes of torch's scaler."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """A disabled one is of the same class, as in torch: whoever derives from it sees `_enabled`."""
        return object.__new__(cls)

    @property
    def _per_optimizer_states(self) -> OptimizerStates:
        return OptimizerStates(self._records)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: MutableMapping[Any, dict[str, Any]]) -> None:
        self._records.clear()
        OptimizerStates(self._records).update(states)

    @property
    def _scale(self) -> torch.Tensor | None:
        made = self._scales.made[0]
        return None if made is None else made.scale

    @_scale.setter
    def _scale(self, scale: torch.Tensor) -> None:
        self._scales.make(scale.device, 0).set(scale.detach(), self._scales.rule)

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        made = self._scales.made[0]
        return None if made is None else made.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, tracker: torch.Tensor) -> None:
        self._scales.make(tracker.device, 0).growth_tracker.copy_(tracker)

    @property
    def _init_scale(self) -> float:
        return self._scales.initial[0].scale

    @_init_scale.setter
    def _init_scale(self, scale: float) -> None:
        self._scales.initial = [replace(self._scales.initial[0], scale=scale)]

    _growth_factor = property(MezzoScaler.get_growth_factor, MezzoScaler.set_growth_factor)
    _backoff_factor = property(MezzoScaler.get_backoff_factor, MezzoScaler.set_backoff_factor)
    _growth_interval = property(MezzoScaler.get_growth_interval, MezzoScaler.set_growth_interval)
