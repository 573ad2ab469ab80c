"""The companion of a 16-bit parameter: what it holds, its sample, how optimizer states keep it.

A sample is a few elements of the parameter, which show whether other code has written it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzo._launch import is_dense
from mezzo._torch import foreach_norm
from mezzo.optim.master_formats import MASTER_FORMATS, MasterFormat
from mezzo.policy.types import Master
from mezzo.scaling.mesh import is_sharded, local, sharded_like

MASTER = "mezzo_master"
"""The key of a companion tensor in a parameter's state, in every format."""

_SAMPLE_KEYS = {
    f"mezzo_{master_format.master.value}_sample": master_format
    for master_format in MASTER_FORMATS.values()
    if master_format.sampled
}
"""Key of a sample in a parameter's state → format. The key tells the format because the dtype may
not: torch casts state to the parameter's dtype when a plain optimizer loads it."""

KEYS = frozenset({MASTER, *_SAMPLE_KEYS})
"""Keys that mezzo adds to the state of a parameter."""

MASTERS = "mezzo_masters"
"""Key in an optimizer's state dict, besides `state` and `param_groups`: companions of parameters
for which the optimizer has no state yet. A plain optimizer ignores it."""

SAMPLES = 128
"""The largest number of elements of a sample; a power of two, as the comparing kernel needs it."""

_MAGNITUDE = 0x7FFF
"""The bits of a 16-bit number except for its sign."""


@dataclass(frozen=True, eq=False)
class Companion:
    """A companion tensor, with a sample of the parameter value that it is for."""

    format: MasterFormat
    tensor: torch.Tensor
    sample: torch.Tensor | None
    """None if the format needs no sample. Empty if it was saved without one."""

    @property
    def has_sample(self) -> bool:
        """Whether there is a sample to compare the parameter with."""
        return self.sample is not None and self.sample.numel() > 0

    def value(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter's shard. Does not synchronize.

        If the parameter does not match the sample, this is its 16-bit value.
        """
        tensor = self.tensor
        if self.sample is not None and self.has_sample:
            tensor = torch.where(matches_sample(shard, self.sample), tensor, 0)
        return self.format.merge(shard, tensor)

    def entries(self, parameter: torch.Tensor, *, sharded: bool) -> dict[str, torch.Tensor]:
        """Return the tensors by their keys in a parameter's state.

        The companion of a sharded parameter is sharded alike, as bits of the parameter's dtype,
        because no process group sends 16-bit integers. Its sample is empty: that of a shard would
        not fit another number of processes.
        """
        tensor, sample = self.tensor, self.sample
        if sample is None:
            return {MASTER: sharded_like(parameter, tensor) if sharded else tensor}
        if sharded:
            tensor = sharded_like(parameter, tensor.view(parameter.dtype))
            sample = sample.new_empty(0)
        return {
            MASTER: tensor,
            **{
                key: sample
                for key, master_format in _SAMPLE_KEYS.items()
                if master_format is self.format
            },
        }

    @classmethod
    def read(cls, state: Mapping[str, Any], parameter: torch.Tensor) -> Companion | None:
        """Read the companion of a 16-bit parameter from its state; None if none can be read."""
        tensor = state.get(MASTER)
        # torch.distributed.checkpoint reads what is missing in a flattened state as an empty dict.
        if not isinstance(tensor, torch.Tensor):
            return None
        for key, master_format in _SAMPLE_KEYS.items():
            sample = state.get(key)
            if isinstance(sample, torch.Tensor):
                dtype = parameter.dtype
                if master_format.master is Master.SPLIT and dtype is not torch.bfloat16:
                    return None
                own = master_format.companion_dtype(dtype) or dtype
                if is_sharded(parameter):
                    sample = sample[:0]
                if sample.numel() == 0 and tensor.is_floating_point():
                    # The bits of a companion of shards.
                    tensor = local(tensor).to(dtype).view(own)
                return cls(
                    master_format,
                    local(tensor).to(parameter.device, own),
                    sample.to(parameter.device, dtype),
                )
        if tensor.dtype is not torch.float32:
            return None
        return cls(MASTER_FORMATS[Master.FLOAT32], local(tensor).to(parameter.device), None)


def has_companion(state: Any) -> bool:
    """Return whether a parameter's state holds a companion tensor."""
    return isinstance(state, Mapping) and isinstance(state.get(MASTER), torch.Tensor)


def without_companion(state: Any) -> Any:
    """Return a parameter's state without the keys that mezzo added."""
    if not isinstance(state, Mapping):
        return state
    return {name: value for name, value in state.items() if name not in KEYS}


def without_sample(state: Any) -> Any:
    """Return a parameter's state with an empty sample, which fits any number of processes."""
    if not isinstance(state, Mapping):
        return state
    return {name: value[:0] if name in _SAMPLE_KEYS else value for name, value in state.items()}


def mismatched_tensor(state: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the first companion tensor or sample in a state that does not fit a parameter."""
    samples = () if is_sharded(parameter) else _SAMPLE_KEYS
    shapes = {MASTER: parameter.shape, **dict.fromkeys(samples, sampled(parameter).shape)}
    for key, shape in shapes.items():
        tensor = state.get(key)
        if not isinstance(tensor, torch.Tensor) or tensor.shape == shape:
            continue
        # A companion of shards has an empty sample.
        if key == MASTER or tensor.numel() > 0:
            return tensor
    return None


# -- samples ---------------------------------------------------------------------------------------


def sample_spacing(numel: int) -> int:
    """Return the log2 of the distance of sampled elements: 3 samples elements 0, 8, 16 and so on.

    >>> [sample_spacing(numel) for numel in (0, 1, 128, 129, 4096)]
    [0, 0, 0, 1, 5]
    """
    return max(0, (numel - 1).bit_length() - (SAMPLES.bit_length() - 1))


def sample_size(numel: int) -> int:
    """Return the number of elements of the sample of a parameter.

    >>> [sample_size(numel) for numel in (0, 1, 128, 129, 4095)]
    [0, 1, 128, 65, 128]
    """
    return -(-numel >> sample_spacing(numel))


def sampled(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter's sampled elements, or of those of its shard.

    >>> sampled(torch.arange(256)).tolist() == list(range(0, 256, 2))
    True
    """
    value = local(parameter.detach())
    # In memory order, which is the only order that a kernel sees.
    flat = value.as_strided((value.numel(),), (1,)) if is_dense(value) else value.reshape(-1)
    return flat[:: 1 << sample_spacing(flat.numel())]


def matches_sample(parameter: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return whether a parameter still has the values of a sample, as a bool on its device.

    Does not synchronize. False if at least half of the sampled elements differ, as after `fill_` or
    a new initialization. A few may differ: if a weight that is clamped or masked after each step
    lost its whole companion, every small update would be lost. Elements that are zero now are not
    counted, because every format handles these itself.

    >>> sample = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    >>> values = ([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], [1.0, 0.0, 0.0])
    >>> [matches_sample(torch.tensor(value).bfloat16(), sample).item() for value in values]
    [True, False, True]
    """
    now = sampled(parameter).view(torch.int16)
    nonzero = (now & _MAGNITUDE) != 0
    changed = (nonzero & (now != sample.view(torch.int16))).sum()
    return (changed == 0) | (2 * changed < nonzero.sum())


def matches_samples(
    parameters: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return `matches_sample` of each parameter, computed in a few launches for all.

    >>> weights = torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([3.0]).bfloat16()
    >>> matches_samples(weights, (weights[0], weights[1] + 1))
    tensor([ True, False])
    """
    now = torch.cat([sampled(parameter) for parameter in parameters]).view(torch.int16)
    nonzero = (now & _MAGNITUDE) != 0
    changed = nonzero & (now != torch.cat(tuple(samples)).view(torch.int16))
    sizes = [sample.numel() for sample in samples]
    counts = foreach_norm([*changed.float().split(sizes), *nonzero.float().split(sizes)], ord=1)
    changes, filled = torch.stack(counts).view(2, -1).unbind()
    return (changes == 0) | (2 * changes < filled)
