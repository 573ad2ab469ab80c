"""Tensors that a forward pass assigns to its modules, such as `self.mean = 0.9 * self.mean + x`.

A captured graph reads and writes fixed memory, and an assignment in Python is no part of it. So the
graph copies what was assigned into the tensor that the module had before, and the module keeps it.
That tensor is a copy which the graph owns: other code may have the one that the module had, such as
a batch or an initial state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mezzo._torch import shards
from mezzo.scaling.mesh import any_sharded

MISSING = object()


class Number(NamedTuple):
    """A number that a module has."""

    attributes: dict[str, Any]
    """Of the module."""
    name: str
    value: complex

    @property
    def place(self) -> tuple[int, str]:
        """The attribute, as a key."""
        return id(self.attributes), self.name


Numbers = dict[tuple[int, str], Number]


@dataclass(frozen=True, eq=False)
class KeptTensors:
    """The tensors of a buffer or an attribute, or of a tuple or list that one holds."""

    attributes: dict[str, Any]
    """Of the module."""
    name: str
    value: Any
    """What the module keeps; `MISSING` if it has no such attribute."""
    tensors: list[Tensor]
    """The tensors in it, which a captured graph reads and writes; none after a reset."""

    @property
    def place(self) -> tuple[int, str]:
        """The buffer or attribute, as a key."""
        return id(self.attributes), self.name

    @property
    def are_values(self) -> bool:
        """Whether a graph can copy others into all of them."""
        return all(map(_is_value, self.tensors))

    @property
    def are_current(self) -> bool:
        """Whether the module has them now; the elements of a list may be others."""
        now = self.attributes.get(self.name)
        return now is self.value and (
            type(now) is not list
            or (len(now) == len(self.tensors) and all(map(is_, now, self.tensors)))
        )

    def pairs(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return each tensor with the one that the module has now in its place.

        None if there are other shapes or dtypes now, or sparse tensors, or results that backward
        passes through, which belong to one call.
        """
        new = flat_tensors(self.attributes.get(self.name))
        fits = len(self.tensors) == len(new) and all(map(_fits, self.tensors, new))
        return list(zip(self.tensors, new, strict=True)) if fits else None

    def restore(self) -> None:
        """Let the module have these tensors again, with the values that they have."""
        if isinstance(self.value, list):
            self.value[:] = self.tensors
        if self.value is MISSING:
            self.attributes.pop(self.name, None)
        else:
            self.attributes[self.name] = self.value

    def replace(self, copies: dict[int, Tensor]) -> KeptTensors:
        """Let the module have copies of these tensors; return them. `copies` has those by id."""
        for tensor in self.tensors:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
        tensors, value = [copies[id(tensor)] for tensor in self.tensors], self.value
        if not isinstance(value, list):
            value = tensors[0] if isinstance(value, Tensor) else tuple(tensors)
        replaced = KeptTensors(self.attributes, self.name, value, tensors)
        replaced.restore()
        return replaced


class Assignments:
    """The buffers and attributes that passes have assigned.

    >>> layer, assignments, batch = nn.Linear(2, 2), Assignments(), torch.ones(2)
    >>> with assignments.noting([layer]):
    ...     layer.last = batch
    >>> (kept,) = assignments.own(module_state([layer]), [layer])
    >>> kept.name, layer.last is batch, layer.last is kept.value
    ('last', False, True)
    """

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], dict[str, Any]] = {}
        """Attributes of a module by place. Their number is part of the recapture key: graphs that
        were captured before do not own the tensors of a new place."""
        self.numbers: dict[tuple[int, str], set[Any]] = {}
        """The numbers that passes have assigned, by place."""
        self.replaced_parameter: str | None = None
        """Name of a parameter that passes replace; see `replaced_parameter`."""

    @property
    def empty_places(self) -> tuple[tuple[int, str], ...]:
        """The places without tensors now, as after a reset.

        Models read whether there are any, so that a captured graph depends on it.
        """
        return tuple(
            [
                place
                for place, attributes in self.places.items()
                if not flat_tensors(attributes.get(place[1]))
            ]
        )

    @contextmanager
    def noting(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Note what a pass in this block assigns."""
        state, numbers = module_state(models), module_numbers(models)
        before = {kept.place: kept for kept in state if kept.are_values}
        yield
        self.replaced_parameter = replaced_parameter(state)
        for number in changed_numbers(numbers, models):
            self.numbers.setdefault(number.place, set()).add(number.value)
        for kept in module_state(models):
            known = before.get(kept.place)
            if kept.are_values and (known is None or not known.are_current):
                self.places[kept.place] = kept.attributes

    def other_buffers(self, model: nn.Module) -> list[tuple[dict[str, Any], str]]:
        """Return the buffers that passes do not assign, as dictionaries of modules and names.

        Without sparse ones, which have no address.
        """
        return [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
            and buffer.layout is torch.strided
            and (id(module._buffers), name) not in self.places
        ]

    def empty(self) -> list[KeptTensors]:
        """Return what modules have in the empty places."""
        return [
            KeptTensors(attributes, place[1], attributes.get(place[1], MISSING), [])
            for place in self.empty_places
            for attributes in (self.places[place],)
        ]

    def own(self, state: Iterable[KeptTensors], models: Sequence[nn.Module]) -> list[KeptTensors]:
        """Let modules have copies of the tensors in places that passes assign; return the copies.

        Only a captured graph has these, so that it may write them. Tensors that are the memory of a
        parameter stay: they change with it.
        """
        copies: dict[int, Tensor] = {}
        weights = {_address(weight) for model in models for weight in model.parameters()}
        return [
            kept.replace(copies)
            for kept in state
            if kept.place in self.places
            and kept.tensors
            and kept.are_values
            and weights.isdisjoint(map(_address, kept.tensors))
        ]


def module_state(models: Iterable[nn.Module]) -> list[KeptTensors]:
    """Return the tensors of modules.

    >>> layer = nn.Linear(2, 2)
    >>> layer.mean = mean = torch.zeros(2)
    >>> before = module_state([layer])
    >>> layer.mean = torch.ones(2)
    >>> (kept,) = keep_assigned(before)
    >>> layer.mean is mean, mean.tolist()
    (True, [1.0, 1.0])
    """
    return [
        KeptTensors(attributes, name, value, tensors)
        for model in models
        for module in model.modules()
        for attributes in (module._parameters, module._buffers, vars(module))
        for name, value in attributes.items()
        if (tensors := flat_tensors(value))
    ]


def module_numbers(models: Iterable[nn.Module]) -> Numbers:
    """Return the numbers of modules, by place."""
    numbers = (
        Number(vars(module), name, value)
        for model in models
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float)
    )
    return {number.place: number for number in numbers}


def changed_numbers(before: Numbers, models: Iterable[nn.Module]) -> list[Number]:
    """Return the numbers of modules that are new or others than before."""
    # A NaN is not equal to itself.
    return [
        now
        for place, now in module_numbers(models).items()
        if (old := before.get(place)) is None
        or (now.value is not old.value and now.value != old.value)
    ]


def made_tensors(empty: Iterable[KeptTensors]) -> tuple[KeptTensors, ...]:
    """Return what a pass has assigned in empty places: modules get it after each replay."""
    made = [
        KeptTensors(kept.attributes, kept.name, value, flat_tensors(value))
        for kept in empty
        for value in (kept.attributes.get(kept.name),)
    ]
    for kept in empty:
        kept.restore()
    return tuple(kept for kept in made if kept.tensors and kept.are_values)


def replaced_parameter(before: Iterable[KeptTensors]) -> str | None:
    """Return the name of a parameter in place of which a module has another one; None if none has.

    FSDP2 replaces sharded ones by whole ones in a pass, and these by the sharded ones after it.
    """
    changed = (
        (kept.name, (kept.value, kept.attributes.get(kept.name, kept.value)))
        for kept in before
        if isinstance(kept.value, nn.Parameter) and not kept.are_current
    )
    return next((name for name, values in changed if not any_sharded(values)), None)


def explain_replaced(name: str) -> str:
    """Return why a pass that replaces a parameter cannot be captured."""
    return (
        f"the forward pass replaces the parameter {name!r} of a module, which a captured graph"
        " cannot do (write to it instead, as with .data.copy_())"
    )


def keep_assigned(before: Iterable[KeptTensors]) -> tuple[KeptTensors, ...]:
    """Copy what a pass has assigned into the tensors before it, and let modules keep those.

    Returns what is kept. Tensors that do not fit are left as they are.
    """
    changed = [(tensors, tensors.pairs()) for tensors in before if not tensors.are_current]
    kept = [(tensors, pairs) for tensors, pairs in changed if pairs is not None]
    all_pairs = [pair for _, pairs in kept for pair in pairs]
    written = {_address(tensor) for tensor, _ in all_pairs}
    # Modules may exchange tensors: none is overwritten before it is read.
    values = [new.clone() if _address(new) in written else new for _, new in all_pairs]
    for (tensor, _), value in zip(all_pairs, values, strict=True):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(value)
    for tensors, _ in kept:
        tensors.restore()
    return tuple(tensors for tensors, _ in kept)


def prepare_replay(assigned: Iterable[KeptTensors]) -> bool:
    """Let modules have these tensors again, with what eager calls have assigned meanwhile.

    Returns False if a module has no tensors in a place now, as after a reset: the graph cannot be
    replayed. Tensors of another kind of inputs, which have other shapes, are left to that kind.
    """
    changed = [tensors for tensors in assigned if not tensors.are_current]
    if not all(flat_tensors(tensors.attributes.get(tensors.name)) for tensors in changed):
        return False
    keep_assigned(changed)
    for tensors in changed:
        tensors.restore()
    return True


def flat_tensors(value: Any) -> list[Tensor]:
    """Return a tensor, or those of a tuple or list of nothing else."""
    if isinstance(value, Tensor):
        return [value]
    is_sequence = type(value) in (tuple, list)
    return list(value) if is_sequence and all(isinstance(item, Tensor) for item in value) else []


def _is_value(tensor: Tensor) -> bool:
    """Return whether a tensor is memory, through which backward does not pass."""
    return tensor.layout is torch.strided and not tensor.requires_grad


def _fits(tensor: Tensor, new: Tensor) -> bool:
    same = (tensor.shape, tensor.dtype, tensor.device) == (new.shape, new.dtype, new.device)
    return same and _is_value(tensor) and _is_value(new)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; what another tensor does not have if it has none."""
    (shard,) = shards([tensor])
    try:
        return shard.untyped_storage().data_ptr()
    except RuntimeError:
        return id(tensor)
