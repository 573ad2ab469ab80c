"""`megengine.module.Module`: a `torch.nn.Module` with MegEngine's attributes and state dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mezzo.compat.megengine._tensor import Tensor


class Module(nn.Module):
    """`megengine.module.Module`: attributes that hold tensors or lists of modules are registered.

    >>> class Net(Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = [nn.Linear(1, 1), nn.Linear(1, 1)]
    >>> [name for name, _ in Net().named_parameters()]
    ['blocks.0.weight', 'blocks.0.bias', 'blocks.1.weight', 'blocks.1.bias']
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            if name not in self._buffers:
                self.register_buffer(name, value)
                return
        elif isinstance(value, list | tuple) and value and _all_modules(value):
            value = nn.ModuleList(value)
        elif isinstance(value, dict) and value and _all_modules(value.values()):
            value = nn.ModuleDict(value)
        super().__setattr__(name, value)

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any] | Callable[[str, torch.Tensor], Any],
        strict: bool = True,
    ) -> Any:
        """Load arrays or tensors by name; `state_dict` may be a function of name and tensor.

        A value with as many elements as its target is reshaped: MegEngine saves batch norms as
        (1, C, 1, 1) and weights of grouped convolutions with an axis of groups. None skips a name
        if `strict` is False.
        """
        own = self.state_dict()
        if callable(state_dict):
            given = {name: state_dict(name, value) for name, value in own.items()}
        elif isinstance(state_dict, Mapping):
            given = dict(state_dict)
        else:
            raise ValueError(
                "`state_dict` must load a dict or callable, got"
                f" {type(state_dict).__name__}. Pass the result of state_dict() or megengine.load."
            )
        # MegEngine does not count batches.
        counters = {name: own[name] for name in own if name.endswith("num_batches_tracked")}
        values = counters | {
            name: _fitted(value, own.get(name))
            for name, value in given.items()
            if value is not None
        }
        return super().load_state_dict(values, strict=strict)


def _all_modules(values: Any) -> bool:
    return all(isinstance(value, nn.Module) for value in values)


def _fitted(value: Any, target: torch.Tensor | None) -> torch.Tensor:
    """Return a value as a tensor, in the shape of its target if it has as many elements."""
    tensor = torch.as_tensor(value)
    if target is None or tensor.numel() != target.numel():
        return tensor
    return tensor.reshape(target.shape)
