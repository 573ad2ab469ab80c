"""Dispatch mode that passes ops which a filter allows to a recorder that checks their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from mezzo._torch import OpOverload, TorchDispatchMode, current_autograd_node
from mezzo.observing.nonfinite import NonFiniteOp, TensorRange
from mezzo.observing.op_places import OpPlace, PlaceTracker, leaves_of
from mezzo.policy.registry import registry
from mezzo.scaling.mesh import local

_WITH_LOGARITHMS = ("_scaled_dot_product_", "_ctc_loss")
"""Beginnings of the names of ops that return logarithms of sums beside their result. These are
minus infinity in masked rows, and for alignments that are not possible."""


@dataclass(frozen=True)
class OpFilter:
    """Which ops are checked: all by default."""

    ops: tuple[str, ...] | None = None
    skip_ops: tuple[str, ...] = ()
    modules: tuple[str, ...] | None = None
    skip_modules: tuple[str, ...] = ()
    backward: bool = True

    def allows(self, names: Sequence[str], place: OpPlace) -> bool:
        """Return whether an op with one of these names is checked at a place."""
        if place.backward and not self.backward:
            return False
        if self.ops is not None and not _any_matches(names, self.ops):
            return False
        if self.modules is not None and not _any_contains(self.modules, place.module):
            return False
        return not (
            _any_matches(names, self.skip_ops) or _any_contains(self.skip_modules, place.module)
        )


class _Flags(NamedTuple):
    """Whether tensors contain NaN or infinite values, as bool tensors."""

    nan: Tensor
    inf: Tensor


class CheckedOp(NamedTuple):
    """An op that has run."""

    name: str
    aten: str
    place: OpPlace
    inputs: list[Tensor]
    outputs: list[Tensor]
    unknown: list[Tensor]
    """Inputs that no checked op has made."""
    before: _Flags | None
    """The flags of the inputs before an op that writes to them."""
    fills: bool
    """Whether it was called with a non-finite number on purpose."""
    node: Any
    """The autograd node that computes gradients with it; None in the forward pass."""

    def made(self) -> Tensor:
        """Return whether the op made a non-finite value that no input explains."""
        if self.fills:
            return self.outputs[0].new_zeros((), dtype=torch.bool)
        results = _flags(self.outputs)
        given = self.before or (_flags(self.inputs) if self.inputs else None)
        if given is None:
            return results.nan | results.inf
        return (results.nan & ~given.nan) | (results.inf & ~(given.inf | given.nan))

    def read(self) -> Tensor | None:
        """Return whether an input from outside has NaN or plus infinity; None if there is none.

        Minus infinity masks logits, and tensors without dimensions are constants.
        """
        found = [
            tensor.isnan().any() | tensor.isposinf().any()
            for tensor in self.unknown
            if tensor.device == self.unknown[0].device
        ]
        return torch.stack(found).any() if found else None


class Recorder(Protocol):
    """Receives each op that is checked."""

    def start_step(self, step: int) -> None:
        """Begin a step."""

    def ranges(self, tensors: list[Tensor]) -> tuple[TensorRange, ...]:
        """Return the ranges of the inputs of an op that is going to write to them."""

    def add(self, op: CheckedOp, ranges: tuple[TensorRange, ...]) -> None:
        """Judge an op that has run."""

    def findings(self) -> tuple[NonFiniteOp, ...]:
        """Return what was found, in order."""


class CheckingMode(TorchDispatchMode):
    """Gives ops to a recorder while it is active."""

    def __init__(self, tracker: PlaceTracker, chosen: OpFilter, recorder: Recorder) -> None:
        super().__init__()
        self._is_on = True
        self._tracker, self._filter, self._recorder = tracker, chosen, recorder
        self._known: WeakSet[Any] = WeakSet()
        """Storages that checked ops have read or written."""

    def switch(self, *, is_on: bool) -> None:
        """Start or stop passing ops to the recorder."""
        self._is_on = is_on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_on or not isinstance(func, OpOverload) or _is_unjudged(func):
            return func(*args, **kwargs)
        place, aten = self._tracker.place(), func.overloadpacket.__name__
        name = place.function or registry().name_of(func) or aten
        if not self._filter.allows((name, aten, registry().name_of(func) or aten), place):
            return func(*args, **kwargs)
        leaves = leaves_of((*args, *kwargs.values()))
        inputs = _checkable(leaves)
        unknown = [
            input_
            for input_ in inputs
            if input_.dim() and input_.untyped_storage() not in self._known
        ]
        writes = func._schema.is_mutable
        before = _flags(inputs) if writes and inputs else None
        fills = any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves)
        ranges = self._recorder.ranges(inputs) if writes else ()
        result = func(*args, **kwargs)
        outputs = _checkable(leaves_of((result,)))
        outputs = outputs or (inputs if writes else [])
        self._known.update(tensor.untyped_storage() for tensor in (*inputs, *outputs))
        if aten.startswith(_WITH_LOGARITHMS) and not place.backward:
            outputs = outputs[:1]
        if outputs and not aten.startswith(("empty", "new_empty")):
            unknown = [] if writes else unknown
            node = gradient_node() if place.backward else None
            op = CheckedOp(name, aten, place, inputs, outputs, unknown, before, fills, node)
            self._recorder.add(op, ranges)
        return result


# -- gradients -------------------------------------------------------------------------------------


def gradient_node() -> Any:
    """Return the node that computes gradients now; None for one that only adds them up."""
    node = current_autograd_node()
    return None if hasattr(node, "variable") else node


def call_with_gradients(node: Any, function: Callable[[list[Tensor]], None]) -> None:
    """Call a function once after the node that runs now, with the gradients that it computed."""
    functions = [function]

    def hook(gradients: Any, _: Any) -> None:
        # The graph may be retained, and run again. Taken out, for the function refers to the node.
        calls = [functions.pop()] if functions else []
        checked = _checkable(gradients)
        for call in calls if checked else ():
            call(checked)

    node.register_hook(hook)


def call_after(node: Any, report: Callable[[Any], None]) -> None:
    """Call a function after the node that runs now, with whether its gradients are non-finite.

    Formulas of gradients may compute infinite values that do not reach the result: that of the norm
    of zeros divides by zero.
    """

    def check(gradients: list[Tensor]) -> None:
        flags = _flags(gradients)
        report(flags.nan | flags.inf)

    call_with_gradients(node, check)


# -- helpers --------------------------------------------------------------------------------------


def _flags(tensors: list[Tensor]) -> _Flags:
    values = [tensor.detach() for tensor in tensors]
    nan, inf = values[0].isnan().any(), values[0].isinf().any()
    for value in values[1:]:
        # Optimizers pass steps on the host along with parameters on a device.
        if value.device == nan.device:
            nan, inf = nan | value.isnan().any(), inf | value.isinf().any()
    return _Flags(nan, inf)


def _is_unjudged(func: OpOverload) -> bool:
    """Return whether an op makes no value: a view, or a collective, which writes it later."""
    return func.is_view or func.namespace in {"c10d", "_c10d_functional"}


def _checkable(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors whose values can be checked; of those that are sharded this rank's shard.

    Whether whole ones are finite would be a collective, in ops that other ranks do not check.
    """
    shards = (local(value) if isinstance(value, Tensor) else value for value in values)
    return [shard for shard in shards if _is_checkable(shard)]


def _is_checkable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.numel() > 0
        and value.device.type != "meta"
    )


def _any_matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _any_contains(patterns: Sequence[str], path: str) -> bool:
    parts = path.split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return _any_matches(prefixes, patterns)
