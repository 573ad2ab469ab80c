"""State dict hooks of a decorated model: save and load exact float32 values."""

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
    """Register the hooks on every module of a model; `undo` gets callbacks that remove them."""
    weights = decoration.weights
    saved: dict[torch.Tensor, tuple[str, ref[torch.Tensor]]] = {}
    """Weight → the key under which it was last saved, and the value there."""
    for module in model.modules():
        loading: dict[torch.Tensor, torch.Tensor] = {}
        before, after = _BeforeLoad(weights, loading), _AfterLoad(decoration, loading)
        undo.callback(module.register_load_state_dict_pre_hook(before).remove)
        undo.callback(module.register_load_state_dict_post_hook(after).remove)
        if save_exact:
            undo.callback(module.register_state_dict_post_hook(_AfterSave(weights, saved)).remove)


def decorations_of(model: nn.Module) -> list[Decoration]:
    """Return every decoration that tensors of a model belong to.

    These are the model's own, those of its submodules, and that of a model it is a submodule of.
    """
    # Only the decorated model itself is marked, but every module of it has the hooks.
    hooks = (
        hook for module in model.modules() for hook in module._load_state_dict_post_hooks.values()
    )
    return list(dict.fromkeys(hook.decoration for hook in hooks if isinstance(hook, _AfterLoad)))


def exact_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict with float32 values of all tensors that have exact masters."""
    state: dict[str, Any] = model.state_dict()
    weights = [decoration.weights for decoration in decorations_of(model)]
    read: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _tensors(module):
            key = f"{prefix}.{name}" if prefix else name
            for weight in weights:
                if key in state and tensor in weight and weight.is_exact(tensor):
                    # Read once, so that tied weights stay tied in a file.
                    if tensor not in read:
                        read[tensor] = weight.read(tensor)
                    state[key] = read[tensor]
    return state


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a module itself, without submodules."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


class _Hook:
    """A hook of a decorated model. In a copy or a pickle of the model it does nothing.

    Pickles of decorated models refer to this class by name.
    """

    def __call__(self, *_: Any) -> None:
        """Do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class _AfterSave(_Hook):
    """Replaces 16-bit weights in a saved state dict by exact ones."""

    def __init__(
        self, weights: HalfWeights, saved: dict[torch.Tensor, tuple[str, ref[torch.Tensor]]]
    ) -> None:
        self._weights, self._saved = weights, saved

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Replace 16-bit weights in a state dict by exact ones."""
        for name, tensor in _tensors(module):
            key = prefix + name
            # With keep_vars=True the state dict holds the parameters themselves, and keeps them.
            if key in state and tensor in self._weights and state[key] is not tensor:
                exact = self._saved_already(state, tensor)
                if exact is None:
                    exact = self._weights.read(tensor)
                    self._saved[tensor] = key, ref(exact)
                state[key] = exact

    def _saved_already(self, state: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the exact value of a tied weight that the state has under another key.

        Not a copy, because safetensors refuses to load copies into a tied model.
        """
        key, last = self._saved.get(tensor, ("", None))
        value = None if last is None else last()
        return value if state.get(key) is value else None


class _BeforeLoad(_Hook):
    """Keeps the exact values of a state dict before torch loads it."""

    def __init__(self, weights: HalfWeights, loading: dict[torch.Tensor, torch.Tensor]) -> None:
        self._weights, self._loading = weights, loading

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Keep the values that torch is going to round."""
        # assign=True would replace the parameters, and the optimizer would continue with the old
        # ones: copy the values instead.
        if metadata.get("assign_to_params_buffers"):
            metadata["assign_to_params_buffers"] = False
        self._loading.clear()
        for name, tensor in _tensors(module):
            value = state.get(prefix + name)
            if (
                tensor in self._weights
                and isinstance(value, torch.Tensor)
                and value.dtype is not tensor.dtype
                and value.shape == tensor.shape
            ):
                self._loading[tensor] = value


class _AfterLoad(_Hook):
    """Sets the exact weights after torch has loaded rounded ones."""

    def __init__(self, decoration: Decoration, loading: dict[torch.Tensor, torch.Tensor]) -> None:
        self.decoration, self._loading = decoration, loading

    def __call__(self, _module: nn.Module, _keys: Any) -> None:
        """Set the exact weights where torch has copied rounded ones."""
        for tensor, value in self._loading.items():
            self.decoration.weights.write(tensor, value.detach().to(tensor.device, torch.float32))
        self._loading.clear()
