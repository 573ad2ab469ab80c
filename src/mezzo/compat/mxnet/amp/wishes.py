"""How a network is to be converted, and what its parameters become by the lists alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from mezzo._casting import cast
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

_OPS: Mapping[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.MultiheadAttention: "linear",
}
"""The op whose list decides over a module's parameters, as far as that can be said before an example was seen."""


@dataclass(frozen=True)
class Wishes:
    """How a network is to be converted."""

    policy: Policy
    excluded: list[str] = field(default_factory=list)
    """Modules, or nodes of the graph, that stay float32."""
    cast_params: bool = False
    """Whether parameters are stored in 16 bits, and not cast at every call."""


def expected(network: nn.Module, wishes: Wishes) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, in the dtypes that they will be stored in. Layers that the lists decide over alone can be told before an example was seen.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> stored = expected(net, Wishes(Policy("O1", "float16", preset="mxnet"), cast_params=True))
    >>> stored["0.weight"].dtype, stored["1.weight"].dtype
    (torch.float16, torch.float32)
    """
    half = {
        f"{path}.{own}" if path else own
        for path, module in network.named_modules()
        if wishes.cast_params and _is_half(wishes, path, module)
        for own, _ in module.named_parameters(recurse=False)
    }
    dtype = wishes.policy.dtype or torch.float16
    state = {name: value.detach() for name, value in network.state_dict().items()}
    return {name: cast(value, dtype) if name in half and value.dtype is torch.float32 else value for name, value in state.items()}


def _is_half(wishes: Wishes, path: str, module: nn.Module) -> bool:
    op = next((op for kind, op in _OPS.items() if isinstance(module, kind)), None)
    if op is None or any(fnmatchcase(path, name) or path.startswith(f"{name}.") for name in wishes.excluded):
        return False
    device = next((one.device.type for one in module.parameters()), "cpu")
    return wishes.policy.explain(op, device=device).rule is Rule.HALF
