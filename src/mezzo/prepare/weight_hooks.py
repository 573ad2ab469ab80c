"""`state_dict` and `load_state_dict` of a decorated model: exact float32 weights come out where asked for, and go in whenever they come."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from mezzo.prepare.weights import Weights


def install(model: nn.Module, weights: Weights, undo: ExitStack, *, save_exact: bool) -> None:
    """Hook every module of a model; the stack gets what takes the hooks off."""
    for module in model.modules():
        stash: dict[torch.Tensor, torch.Tensor] = {}
        undo.callback(module.register_load_state_dict_pre_hook(_BeforeLoad(weights, stash)).remove)
        undo.callback(module.register_load_state_dict_post_hook(_AfterLoad(weights, stash)).remove)
        if save_exact:
            undo.callback(module.register_state_dict_post_hook(_AfterSave(weights)).remove)


def exact_state_dict(model: nn.Module, weights: Collection[Weights]) -> dict[str, Any]:
    """A model's state with float32 weights wherever they are exact."""
    state: dict[str, Any] = model.state_dict()
    read: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _own(module):
            key = f"{prefix}.{name}" if prefix else name
            for some in weights:
                if key in state and tensor in some and some.is_exact(tensor):
                    # Once for all its names: what is tied stays tied in a file.
                    state[key] = read[tensor] = read[tensor] if tensor in read else some.read(tensor)
    return state


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


class _Hook:
    """A hook of the model that was decorated. A copy of that, deep or pickled, is a 16-bit model as any other: its hooks have nothing to do."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class _AfterSave(_Hook):
    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Put exact weights into a state."""
        for name, tensor in _own(module):
            key = prefix + name
            # With keep_vars=True the caller wants the parameters themselves.
            if key in state and tensor in self._weights and state[key] is not tensor:
                state[key] = self._weights.read(tensor)


class _BeforeLoad(_Hook):
    def __init__(self, weights: Weights, stash: dict[torch.Tensor, torch.Tensor]) -> None:
        self._weights, self._stash = weights, stash

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Remember what torch is going to round."""
        # assign=True would put other objects in the parameters' place, and the optimizer would go on with the old ones: the values are copied instead.
        if metadata.get("assign_to_params_buffers"):
            metadata["assign_to_params_buffers"] = False
        self._stash.clear()
        for name, tensor in _own(module):
            value = state.get(prefix + name)
            if tensor in self._weights and isinstance(value, torch.Tensor) and value.dtype is not tensor.dtype and value.shape == tensor.shape:
                self._stash[tensor] = value


class _AfterLoad(_Hook):
    def __init__(self, weights: Weights, stash: dict[torch.Tensor, torch.Tensor]) -> None:
        self._weights, self._stash = weights, stash

    def __call__(self, _module: nn.Module, _keys: Any) -> None:
        """Set the exact weights."""
        # What torch has copied is rounded; here is what came.
        for tensor, value in self._stash.items():
            self._weights.write(tensor, value.detach().to(tensor.device, torch.float32))
        self._stash.clear()
