"""Notice modules, parameters, buffers and hooks that were added, removed or replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from mezzo._torch import hook_tables
from mezzo.prepare.arguments import Optimizer

Places = Collection[tuple[int, str]]
"""Attributes that passes assign, by the id of their dictionary and their name."""


class ModelStructure:
    """Modules, parameters, buffers and hooks of models, which a captured graph depends on.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> structure = ModelStructure([model])
    >>> structure.has_changed()
    False
    >>> model[0] = nn.Identity()
    >>> structure.has_changed(), structure.has_changed()
    (True, False)
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        *,
        is_sharded: bool = False,
        with_buffers: bool = True,
        with_hooks: bool = True,
    ) -> None:
        self._models, self._optimizers, self._with_hooks = models, optimizers, with_hooks
        # FSDP2 replaces parameters in each pass.
        self._with_parameters, self._with_buffers = not is_sharded, with_buffers
        self._read()
        self._read_hooks()

    def has_changed(self, assigned: Places = ()) -> bool:
        """Return whether something has changed since the last time.

        Other buffers in `assigned` places do not count.
        """
        # This takes about as long as reading the modes of the modules.
        is_same = not any(self._empty) and _are_same(_values(self._tables), self._values)
        have_members_changed = not is_same and self._members_differ(assigned)
        # Both are read: each compares with the last time.
        return self._hooks_differ() or have_members_changed

    def _read(self) -> None:
        self.modules = [module for model in self._models for module in model.modules()]
        self.parameters = [weight for model in self._models for weight in model.parameters()]
        tables: list[dict[str, Any]] = [module._modules for module in self.modules]
        if self._with_parameters:
            tables += [module._parameters for module in self.modules]
        if self._with_buffers:
            tables += [module._buffers for module in self.modules]
        self._tables = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        """Tables without members, which are compared faster."""
        self._values = list(_values(self._tables))
        self._members = {
            (id(table), name): value for table in self._tables for name, value in table.items()
        }

    def _members_differ(self, assigned: Places) -> bool:
        before = self._members
        self._read()
        places = (before.keys() | self._members.keys()) - set(assigned)
        return any(before.get(place) is not self._members.get(place) for place in places)

    def _read_hooks(self) -> None:
        tables = hook_tables(self.modules, self.parameters, self._optimizers)
        self._handles = RemovableHandle.next_id
        self._hook_tables = [table for table in tables if table]
        self._hook_count = sum(map(len, self._hook_tables))
        self._hooks = list(chain.from_iterable(self._hook_tables))

    def _hooks_differ(self) -> bool:
        if not self._with_hooks:
            return False
        # Every new handle increments the number, and hooks are few.
        count = sum(map(len, self._hook_tables))
        if self._handles == RemovableHandle.next_id and count == self._hook_count:
            return False
        before = self._hooks
        self._read_hooks()
        return self._hooks != before


def _values(tables: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, tables))


def _are_same(values: Iterable[Any], others: list[Any]) -> bool:
    now = list(values)
    return len(now) == len(others) and all(map(is_, now, others))
