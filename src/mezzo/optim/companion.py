"""The companion tensor of a 16-bit parameter: a float32 master, a remainder or a compensation, and how it is written in an optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mezzo.optim.kinds import KINDS, Kind
from mezzo.optim.samples import belongs, sampled
from mezzo.policy.types import Master

MASTER = "mezzo_master"
"""The name of a companion tensor in a parameter's state, whatever its kind."""

_SAMPLES = {f"mezzo_{kind.master.value}_sample": kind for kind in KINDS.values() if kind.sampled}
"""The name of a sample tells the kind: torch casts state to the parameter's dtype when a plain optimizer loads it, so that the dtype of the tensor may not."""

KEYS = frozenset({MASTER, *_SAMPLES})
"""What mezzo adds to the state of a parameter."""


@dataclass(frozen=True, eq=False)
class Companion:
    """A companion tensor, with the sample that tells which parameter value it belongs to."""

    kind: Kind
    tensor: torch.Tensor
    sample: torch.Tensor | None
    """Of the parameter, where the kind needs one."""

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter: exact where this belongs to it, else the 16-bit value. Does not synchronize."""
        tensor = self.tensor if self.sample is None else torch.where(belongs(parameter, self.sample), self.tensor, 0)
        return self.kind.join(parameter.detach(), tensor)

    def entries(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their names in a parameter's state."""
        if self.sample is None:
            return {MASTER: self.tensor}
        return {MASTER: self.tensor, **{name: self.sample for name, kind in _SAMPLES.items() if kind is self.kind}}

    @classmethod
    def read(cls, state: Mapping[str, Any], parameter: torch.Tensor) -> Companion | None:
        """Read a companion for a 16-bit parameter from a state; None if there is none, or none that can be read."""
        tensor = state.get(MASTER)
        # Not always a tensor: of a flattened state, torch.distributed.checkpoint reads what is missing as an empty dict.
        if not isinstance(tensor, torch.Tensor):
            return None
        for name, kind in _SAMPLES.items():
            sample = state.get(name)
            if isinstance(sample, torch.Tensor):
                half = torch.bfloat16 if kind.master is Master.SPLIT else parameter.dtype
                if half is not parameter.dtype:
                    return None
                return cls(kind, tensor.to(parameter.device, kind.beside_dtype(half)), sample.to(parameter.device, half))
        return cls(KINDS[Master.FLOAT32], tensor.to(parameter.device), None) if tensor.dtype is torch.float32 else None


def without_companion(state: Any) -> Any:
    """Return a parameter's state without what mezzo added to it."""
    return {name: value for name, value in state.items() if name not in KEYS} if isinstance(state, Mapping) else state


def has_companion(state: Any) -> bool:
    """Return whether a parameter's state holds a companion tensor."""
    return isinstance(state, Mapping) and isinstance(state.get(MASTER), torch.Tensor)


def misfit(state: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of a companion whose shape is not that of a parameter, or of its sample; None if all fit."""
    wanted = {MASTER: parameter.shape, **dict.fromkeys(_SAMPLES, sampled(parameter).shape)}
    found = ((state[name], shape) for name, shape in wanted.items() if isinstance(state.get(name), torch.Tensor))
    return next((tensor for tensor, shape in found if tensor.shape != shape), None)
