"""`_per_optimizer_states` of torch's GradScaler as a view of mezzo's records: what is written to it counts."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Self

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


class StatefulScaler(MezzoScaler):
    """mezzo's scaler with the states of its optimizers under torch's name, and one class for enabled and disabled ones."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """A disabled one is of the same class, as in torch, where a subclass reads `_enabled`."""
        return object.__new__(cls)

    @property
    def _per_optimizer_states(self) -> OptimizerStates:
        return OptimizerStates(self._records)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: MutableMapping[Any, dict[str, Any]]) -> None:
        self._records.clear()
        OptimizerStates(self._records).update(states)
