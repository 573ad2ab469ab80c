"""Changes of modules by a forward pass that a captured graph cannot repeat, and their undoing.

A graph computes with the numbers of its capture and reads tensors at their addresses. So a pass is
not captured if it changes a number of a module (`self.calls += 1`), replaces the memory of a tensor
(`self.mean.data = mean`), or reads a tensor that it replaces in a dictionary, an object or nested
lists (`self.state["mean"] = mean`). Other tensors that it assigns are in `assigned_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mezzo._casting import tensors_of
from mezzo._torch import fsdp_shards
from mezzo.scaling.mesh import any_sharded
from mezzo.step.assigned_tensors import (
    KeptTensors,
    changed_numbers,
    flat_tensors,
    module_numbers,
)

_OWN = vars(nn.Module()).keys()
"""Attributes that every module has."""


@dataclass(frozen=True, eq=False)
class _Held:
    """What an attribute of a module holds before a pass: a container or an object."""

    attributes: dict[str, Any]
    name: str
    value: Any
    contents: Any
    """A copy of the container, or of the attributes of the object."""
    tensors: list[torch.Tensor]

    def replaced(self) -> list[torch.Tensor]:
        """Return the tensors in place of which it holds others now, or none."""
        now = tensors_of(_contents(self.attributes.get(self.name)))
        pairs = zip_longest(self.tensors, now[: len(self.tensors)])
        return [tensor for tensor, other in pairs if tensor is not other]

    def restore(self) -> None:
        """Hold the same again."""
        self.attributes[self.name], contents = self.value, _contents(self.value)
        if isinstance(contents, dict):
            contents.clear()
            contents.update(self.contents)
        elif isinstance(contents, list):
            contents[:] = self.contents


class PassChanges:
    """What a pass changes in modules, after this object was created.

    >>> layer = nn.Linear(2, 2)
    >>> layer.calls = 3
    >>> changes = PassChanges([layer], [])
    >>> layer.calls += 1
    >>> changes.obstacle({})[:51]
    "the forward pass changes the number 'calls' of a mo"
    >>> changes.restore()
    >>> layer.calls
    3
    """

    def __init__(self, models: Sequence[nn.Module], state: Sequence[KeptTensors]) -> None:
        self._models, self._numbers = models, module_numbers(models)
        # FSDP2 frees the parameters that it has gathered.
        gathered = set().union(*map(fsdp_shards, models))
        self._memory = [
            (kept.name, tensor, tensor.data)
            for kept in state
            for tensor in kept.tensors
            if tensor.layout is torch.strided
            and not any_sharded([tensor])
            and id(tensor) not in gathered
        ]
        self._held = [
            _Held(vars(module), name, value, copy(contents), tensors)
            for model in models
            for module in model.modules()
            for name, value in vars(module).items()
            if name not in _OWN
            and not flat_tensors(value)
            and (contents := _contents(value)) is not None
            and (tensors := tensors_of(contents))
        ]
        self._reads = _Reads([tensor for held in self._held for tensor in held.tensors])

    def noting_reads(self) -> AbstractContextManager[Any]:
        """Return a context that notes which of the held tensors a pass reads."""
        # Not without reason: compiled code would be compiled again under a mode.
        return self._reads if self._held else nullcontext()

    def obstacle(self, assigned: Mapping[Any, set[Any]]) -> str | None:
        """Return why a pass that has run cannot be captured; None if it can be.

        `assigned` has the numbers that passes have assigned before, such as the size of a batch.
        """
        for number in changed_numbers(self._numbers, self._models):
            if number.value not in assigned.get(number.place, ()):
                change = f"changes the number {number.name!r}"
                return _explain(change, "count in a buffer, with add_(1)")
        for name, tensor, before in self._memory:
            if tensor.data_ptr() != before.data_ptr():
                return _explain(f"replaces the memory of {name!r}", "write to it, with .copy_()")
        for held in self._held:
            if any(map(self._reads.has, held.replaced())):
                kind = type(held.value).__name__
                return _explain(
                    f"replaces tensors in the {kind} {held.name!r}", "assign them to the module"
                )
        return None

    def restore(self) -> None:
        """Undo the changes."""
        for number in changed_numbers(self._numbers, self._models):
            if number.place in self._numbers:
                number.attributes[number.name] = self._numbers[number.place].value
        for _, tensor, before in self._memory:
            if tensor.data_ptr() != before.data_ptr():
                tensor.data = before
        for held in self._held:
            if held.replaced():
                held.restore()


class _Reads(TorchFunctionMode):
    """Notes which of some tensors are read: their shape or dtype may be."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._ids = set(map(id, tensors))
        self._read: set[int] = set()

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was read."""
        return id(tensor) in self._read

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        passed = set(map(id, tensors_of([args, kwargs])))
        result = func(*args, **kwargs)
        if tensors_of(result):
            self._read |= passed & self._ids
        return result


def _contents(value: Any) -> Any:
    """Return a container, or the attributes of an object; None for other values."""
    if isinstance(value, dict | list | tuple):
        return value
    is_other = isinstance(value, torch.Tensor | nn.Module | type) or callable(value)
    return None if is_other else getattr(value, "__dict__", None)


def _explain(change: str, remedy: str) -> str:
    return f"the forward pass {change} of a module, which a captured graph cannot repeat ({remedy})"
