"""Tensors that a forward pass assigns to its modules, such as `self.mean = 0.9 * self.mean + x`.

A captured graph reads and writes fixed memory, and an assignment in Python is no part of it. So the
graph copies what was assigned into the tensor that the module had before, and the module keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class KeptTensors:
    """The tensors of a buffer or an attribute, or of a tuple or list that one holds."""

    attributes: dict[str, Any]
    """Of the module."""
    name: str
    value: Any
    """What a captured graph reads and writes."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors themselves."""
        return _tensors(self.value)

    def prepare(self) -> bool:
        """Prepare a replay; return False if the module has no tensors here now, as after a reset.

        Tensors of another kind of inputs, which have other shapes, are left to that kind.
        """
        now = self.attributes.get(self.name)
        if now is not self.value:
            if not _tensors(now):
                return False
            if not self.update():
                self.restore()
        return True

    def update(self) -> bool:
        """Copy what the module has now into these tensors, and let it keep them.

        Returns False, and changes nothing, if there are other shapes or dtypes now, or results that
        backward passes through, which belong to one call.
        """
        tensors, new = self.tensors, _tensors(self.attributes.get(self.name))
        if len(tensors) != len(new) or not all(map(_fits, tensors, new)):
            return False
        for tensor, value in zip(tensors, new, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value.clone() if _share_memory(tensor, value) else value)
        self.attributes[self.name] = self.value
        return True

    def restore(self) -> None:
        """Let the module have these tensors again, with the values that they have."""
        self.attributes[self.name] = self.value


def module_state(models: Iterable[nn.Module]) -> list[KeptTensors]:
    """Return the tensors of modules that are not parameters.

    >>> layer = nn.Linear(2, 2)
    >>> layer.mean = mean = torch.zeros(2)
    >>> (state,) = module_state([layer])
    >>> layer.mean = torch.ones(2)
    >>> state.update(), layer.mean is mean, mean.tolist()
    (True, True, [1.0, 1.0])
    """
    return [
        KeptTensors(attributes, name, value)
        for model in models
        for module in model.modules()
        for attributes in (module._buffers, vars(module))
        for name, value in attributes.items()
        if _tensors(value)
    ]


def keep_assigned(before: Iterable[KeptTensors]) -> tuple[KeptTensors, ...]:
    """Keep the tensors before a pass where it has assigned others; return what is kept."""
    changed = [one for one in before if one.attributes.get(one.name) is not one.value]
    return tuple(kept for kept in changed if kept.update())


def _tensors(value: Any) -> list[Tensor]:
    """Return a tensor, or those of a tuple or list of nothing else."""
    if isinstance(value, Tensor):
        return [value]
    is_sequence = type(value) in (tuple, list)
    return list(value) if is_sequence and all(isinstance(one, Tensor) for one in value) else []


def _fits(tensor: Tensor, new: Tensor) -> bool:
    same = (tensor.shape, tensor.dtype, tensor.device) == (new.shape, new.dtype, new.device)
    return same and not (tensor.requires_grad or new.requires_grad)


def _share_memory(tensor: Tensor, new: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()
