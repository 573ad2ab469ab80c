"""State dict hooks of a decorated model: save and load exact values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import nn

from mezzo.prepare.decoration import Decoration
from mezzo.prepare.half_weights import HalfWeights


def hook_model_state_dict(
    model: nn.Module, decoration: Decoration, undo: ExitStack, *, save_exact: bool
) -> None:
    """Hook every module of a model; the stack gets what takes the hooks off."""
    weights = decoration.weights
    saved: dict[torch.Tensor, tuple[str, ref[torch.Tensor]]] = {}
    """Weight → the name under which it was last put into a state, and its value there."""
    for module in model.modules():
        stash: dict[torch.Tensor, torch.Tensor] = {}
        undo.callback(module.register_load_state_dict_pre_hook(_BeforeLoad(weights, stash)).remove)
        undo.callback(
            module.register_load_state_dict_post_hook(_AfterLoad(decoration, stash)).remove
        )
        if save_exact:
            undo.callback(module.register_state_dict_post_hook(_AfterSave(weights, saved)).remove)


def decorations_of(model: nn.Module) -> list[Decoration]:
    """Every decoration that tensors of a model belong to: the model's own, those of its parts, and that of a model which it is a part of."""
    # Only the whole of a decorated model is marked, but every module of it has the hooks.
    hooks = (
        hook for module in model.modules() for hook in module._load_state_dict_post_hooks.values()
    )
    return list(dict.fromkeys(hook.decoration for hook in hooks if isinstance(hook, _AfterLoad)))


def exact_state_dict(model: nn.Module) -> dict[str, Any]:
    """A model's state with float32 weights wherever they are exact."""
    state: dict[str, Any] = model.state_dict()
    weights = [decoration.weights for decoration in decorations_of(model)]
    read: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _own(module):
            key = f"{prefix}.{name}" if prefix else name
            for some in weights:
                if key in state and tensor in some and some.is_exact(tensor):
                    # Once for all its names: what is tied stays tied in a file.
                    state[key] = read[tensor] = (
                        read[tensor] if tensor in read else some.read(tensor)
                    )
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
    def __init__(
        self, weights: HalfWeights, saved: dict[torch.Tensor, tuple[str, ref[torch.Tensor]]]
    ) -> None:
        self._weights, self._saved = weights, saved

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Put exact weights into a state."""
        for name, tensor in _own(module):
            key = prefix + name
            # With keep_vars=True the caller wants the parameters themselves.
            if key in state and tensor in self._weights and state[key] is not tensor:
                exact = self._saved_already(state, tensor)
                if exact is None:
                    exact = self._weights.read(tensor)
                    self._saved[tensor] = key, ref(exact)
                state[key] = exact

    def _saved_already(self, state: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor | None:
        """The exact value of a tied weight, where the state has it under another name: safetensors refuses to load copies into a tied model."""
        name, last = self._saved.get(tensor, ("", None))
        value = None if last is None else last()
        return value if state.get(name) is value else None


class _BeforeLoad(_Hook):
    def __init__(self, weights: HalfWeights, stash: dict[torch.Tensor, torch.Tensor]) -> None:
        self._weights, self._stash = weights, stash

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Remember what torch is going to round."""
        # assign=True would put other objects in the parameters' place, and the optimizer would go
        # on with the old ones: the values are copied instead.
        if metadata.get("assign_to_params_buffers"):
            metadata["assign_to_params_buffers"] = False
        self._stash.clear()
        for name, tensor in _own(module):
            value = state.get(prefix + name)
            if (
                tensor in self._weights
                and isinstance(value, torch.Tensor)
                and value.dtype is not tensor.dtype
                and value.shape == tensor.shape
            ):
                self._stash[tensor] = value


class _AfterLoad(_Hook):
    def __init__(self, decoration: Decoration, stash: dict[torch.Tensor, torch.Tensor]) -> None:
        self.decoration, self._stash = decoration, stash

    def __call__(self, _module: nn.Module, _keys: Any) -> None:
        """Set the exact weights."""
        # What torch has copied is rounded; here is what came.
        for tensor, value in self._stash.items():
            self.decoration.weights.write(tensor, value.detach().to(tensor.device, torch.float32))
        self._stash.clear()
