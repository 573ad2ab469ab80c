"""Run code with a float64 shadow of every tensor, and find the first op that loses precision.

Each ATen op runs twice: as it is, and on float64 copies of its inputs that were never rounded to 16
bits. Views and in-place ops are repeated on the shadows, so that these alias as the tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isinf
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._dtypes import HALF_DTYPES
from mezzo._torch import OpOverload, TorchDispatchMode, current_autograd_node, pytree
from mezzo.observing.checking_mode import call_after, gradient_node
from mezzo.observing.finding import Finding, InputRange, Kind, NamedTensor
from mezzo.observing.function_places import FunctionPlaces, Pausable, Place

_LOST = 0.25
"""Relative error from which a result has lost its digits."""
_AMPLIFIED = 8.0
"""How much larger it must be than the error of the inputs: otherwise another op is the cause."""
_CANCELLED = 1e-7
"""Results smaller than this, relative to the inputs, are zero for float32 too."""
_NOISE = 1e-12
"""Results smaller than this, relative to the inputs, may be rounding errors of float64."""
_FLUSHED = 0.5
"""Share of a result, by its norm, from which it has underflowed."""
_MASK = -1e8
"""Smaller values fill masks: that 16 bits make them minus infinity changes nothing."""


@dataclass(frozen=True)
class Shadow:
    """The exact value of a tensor, and how far the tensor is from it."""

    exact: Tensor
    error: float
    norm: float
    causes: frozenset[Place]
    """The ops whose rounding to 16 bits is in the value."""
    origin: Finding | None = None
    """What made the exact value non-finite; None if it is finite, or a mask."""
    flushed: Finding | None = None
    """The op that underflowed on the way to this value, if that matters for it."""


@dataclass(frozen=True)
class OpError:
    """The relative error of one result of one op."""

    place: Place
    dtype: torch.dtype
    backward: bool
    error: float
    before: float
    """The largest error of the inputs."""


class ShadowMode(Pausable, TorchDispatchMode):
    """Runs every op on shadows too, and keeps the first that loses precision in `finding`."""

    def __init__(
        self,
        tracker: FunctionPlaces,
        named: Iterable[NamedTensor] = (),
        observe: Callable[[OpError], None] | None = None,
    ) -> None:
        super().__init__()
        self.finding: Finding | None = None
        self._nonfinite: Finding | None = None
        """What made the first value that is not finite, and no mask."""
        self._tracker = tracker
        self._observe = observe
        """Called with every result; then nothing ends the run."""
        listed = list(named)
        self._named = {_storage(named.tensor): named for named in listed if _real(named.tensor)}
        self._order = {argument.name: index - len(listed) for index, argument in enumerate(listed)}
        self._shadows: dict[Any, Shadow] = {}
        self._kept: list[Tensor] = []
        """All tensors with a shadow: freed memory would be used again, with the same key."""
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Higher-order operators call functions, whose ops come here one by one.
        if self.is_paused or self.finding is not None or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _real(leaf)]
        inputs = [self.shadow_of(leaf) for leaf in leaves]
        writes = func._schema.is_mutable
        exact_args, exact_kwargs = pytree.tree_map(
            lambda value: self._exact(value, writes=writes), (args, kwargs)
        )
        # Read now, since the op overwrites what is to be reported.
        ranges = tuple(map(InputRange.of, leaves)) if writes else ()
        result = func(*args, **kwargs)
        call = _Call(func, args, kwargs, leaves, inputs, ranges)
        exact = _run(func, exact_args, exact_kwargs)
        self._number += 1
        for index, leaf in enumerate(pytree.tree_leaves(result)):
            if _real(leaf):
                expected = exact[index] if index < len(exact) else None
                self._add(replace(call, index=index), leaf, expected)
        return result

    def shadow_of(self, tensor: Tensor) -> Shadow:
        """Return the shadow of a tensor; one that no op has made is exact."""
        known = self._shadows.get(_key(tensor))
        if known is None:
            exact = tensor.detach().double()
            origin = None if _is_finite_or_mask(exact) else self._origin_outside(tensor)
            shadow = Shadow(exact, 0.0, _norm(exact), frozenset(), origin)
            known = self._keep(tensor, shadow)
        return known

    def _origin_outside(self, tensor: Tensor) -> Finding:
        named = self._named.get(_storage(tensor))
        kind = Kind.DATA if named is None else named.kind
        name = "a tensor made outside of the step" if named is None else named.name
        # Before all ops, and in the order of the parameters.
        number = self._order.get(name, 0)
        inputs = (InputRange.of(tensor),)
        return Finding(kind, Place(name), tensor.dtype, inputs=inputs, number=number)

    def _exact(self, value: Any, *, writes: bool) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        if _real(value):
            return self.shadow_of(value).exact
        # Integers have no shadow: an op that adds to them in place must not do so twice.
        return value.clone() if writes and isinstance(value, Tensor) else value

    def _keep(self, tensor: Tensor, shadow: Shadow) -> Shadow:
        self._shadows[_key(tensor)] = shadow
        self._kept.append(tensor)
        return shadow

    def _add(self, call: _Call, result: Tensor, exact: Any) -> None:
        """Store the shadow of a result, and a finding if the result lost precision."""
        if "empty" in call.name:
            # Not initialised: an op that writes it follows.
            zeros = torch.zeros_like(result).double()
            self._keep(result, Shadow(zeros, 0.0, 0.0, call.causes))
            return
        if not isinstance(exact, Tensor) or exact.shape != result.shape:
            exact = result.detach().double()
        is_finite = bool(exact.isfinite().all())
        origin = None if is_finite else self._origin(call, result, exact)
        self._nonfinite = self._nonfinite or origin
        if call.func.is_view:
            shadow = Shadow(exact, call.error, _norm(exact), call.causes, origin, call.flushed)
            self._keep(result, shadow)
            return
        found = result.detach().double()
        is_mask = found.isneginf() & (exact <= _MASK)
        exact = exact.masked_fill(is_mask, -torch.inf) if bool(is_mask.any()) else exact
        shadow = self._keep(result, self._compare(call, result, found, exact, origin))
        if self._observe is None:
            # An op may have several results, and the first may be the one that failed.
            finding = self._judge(call, result, found, shadow)
            node = gradient_node()
            if finding is not None and finding.kind is Kind.OVERFLOW and node is not None:
                call_after(node, partial(self._confirm, finding))
            else:
                self.finding = self.finding or finding
        else:
            self._observe(self._error_of(call, result, found, shadow))

    def _confirm(self, finding: Finding, is_bad: Tensor) -> None:
        """Keep the finding of an op in the formula of a gradient if that is not finite.

        That of `cdist` divides by distances, and leaves out those that are zero.
        """
        is_first = self.finding is None or finding.number < self.finding.number
        if is_first and bool(is_bad):
            self.finding = finding

    def _compare(
        self, call: _Call, result: Tensor, found: Tensor, exact: Tensor, origin: Finding | None
    ) -> Shadow:
        """Return the shadow of a result with its error, and whether it underflowed."""
        norm, difference = _norm(exact), _norm(torch.where(exact.isfinite(), found - exact, 0.0))
        error = difference / norm if norm else 0.0
        rounds = result.dtype in HALF_DTYPES
        causes = frozenset({self._tracker.place_of(call.func)}) if rounds else call.causes
        shadow = Shadow(exact, error, norm, causes, origin)
        if error < _LOST:
            return shadow
        flushed = call.flushed
        if flushed is None and rounds and self._is_flushed(found, shadow, call, result.dtype):
            flushed = self._found(Kind.UNDERFLOW, call, result, exact, error)
        return replace(shadow, flushed=flushed)

    def _judge(self, call: _Call, result: Tensor, found: Tensor, shadow: Shadow) -> Finding | None:
        """Return a finding if a result lost precision; that of an underflow if one is the cause."""
        exact = shadow.exact
        if bool((exact.isfinite() & ~found.isfinite()).any()):
            overflow = self._found(Kind.OVERFLOW, call, result, exact, torch.inf)
            return call.flushed or self._of_parameter(call, overflow) or overflow
        # Without a rounding to 16 bits float32 has lost these digits.
        rounded = (call.causes or shadow.causes) and not _subtracts_itself(found, call)
        if rounded and _lost_digits(result, shadow, call):
            return call.flushed or self._found(Kind.DIGITS, call, result, exact, shadow.error)
        return None

    def _of_parameter(self, call: _Call, overflow: Finding) -> Finding | None:
        """Return the finding of a parameter that leaves the range where an op casts it."""
        named = self._named.get(_storage(call.leaves[0])) if call.name == "_to_copy" else None
        if named is None or named.kind is not Kind.PARAMETERS:
            return None
        return replace(overflow, kind=Kind.PARAMETERS, place=Place(named.name))

    def _error_of(self, call: _Call, result: Tensor, found: Tensor, shadow: Shadow) -> OpError:
        """Return the error of a result; infinite where only the exact result is finite."""
        is_lost = bool((shadow.exact.isfinite() & ~found.isfinite()).any())
        error = torch.inf if is_lost else shadow.error
        if shadow.norm < _CANCELLED * call.norm:
            # Zero but for rounding, such as the gradient of a bias before a norm.
            error *= shadow.norm / call.norm
        backward = current_autograd_node() is not None
        return OpError(self._tracker.place_of(call.func), result.dtype, backward, error, call.error)

    def _found(
        self,
        kind: Kind,
        call: _Call,
        result: Tensor,
        exact: Tensor,
        error: float,
    ) -> Finding:
        finite, place = exact[exact.isfinite()], self._tracker.place_of(call.func)
        rounds = result.dtype in HALF_DTYPES
        return Finding(
            kind,
            place,
            result.dtype,
            float(finite.abs().max()) if finite.numel() else 0.0,
            error,
            current_autograd_node() is not None,
            call.causes | {place} if rounds else call.causes,
            call.ranges or tuple(map(InputRange.of, call.leaves)),
            self._number,
            bool(result.isnan().any()),
        )

    def _origin(self, call: _Call, result: Tensor, exact: Tensor) -> Finding | None:
        """Return what made an exact result non-finite; None if it is a mask."""
        before = [shadow.origin for shadow in call.read if shadow.origin is not None]
        if before:
            return min(before, key=lambda op: op.number)
        # Nothing masks gradients with infinities.
        in_forward = current_autograd_node() is None
        is_given = in_forward and (call.has_infinite_number or call.reads_infinity)
        if (call.func.is_view or is_given) and not bool(exact.isnan().any()):
            return None
        return self._found(Kind.NONFINITE, call, result, exact, torch.inf)

    @staticmethod
    def _is_flushed(found: Tensor, shadow: Shadow, call: _Call, dtype: torch.dtype) -> bool:
        """Return whether most of a result became zero, which was more than rounding errors.

        A larger value that is zero has cancelled.
        """
        is_small = shadow.exact.abs() < torch.finfo(dtype).tiny
        zeros = _norm(torch.where((found == 0.0) & is_small, shadow.exact, 0.0))
        return (
            zeros > _FLUSHED * shadow.norm
            and shadow.norm > max(_NOISE * call.norm, torch.finfo(torch.float32).tiny)
            and call.error < _LOST
        )

    def cause_of_error(self) -> Finding | None:
        """Return what was wrong before the model raised, as those do that check for NaN."""
        return None if self._observe is not None else self.finding or self._nonfinite

    def outcome(self, results: Iterable[Tensor]) -> Finding | None:
        """Return what made one of these results, a loss and gradients, non-finite or zero."""
        if self.finding is not None:
            return self.finding
        found = []
        for result in filter(_real, results):
            shadow = self.shadow_of(result)
            if not bool(result.isfinite().all()):
                found.append(shadow.origin or Finding(Kind.NONFINITE, Place(""), result.dtype))
            elif shadow.flushed is not None and shadow.error >= _FLUSHED:
                found.append(shadow.flushed)
        return min(found, key=lambda op: op.number, default=None)


@dataclass(frozen=True)
class _Call:
    """One call of an op."""

    func: Any
    args: Any
    kwargs: Any
    leaves: list[Tensor]
    inputs: list[Shadow]
    ranges: tuple[InputRange, ...]
    index: int = 0
    """Which of its results is compared."""

    @property
    def name(self) -> str:
        name: str = self.func.overloadpacket.__name__
        return name

    @property
    def read(self) -> list[Shadow]:
        """The inputs that the results depend on.

        A batch that failed has made the running statistics of norms NaN: training only writes them.
        """
        unread = {id(statistic) for statistic in _unread_statistics(self)}
        pairs = zip(self.leaves, self.inputs, strict=True)
        return [shadow for leaf, shadow in pairs if id(leaf) not in unread]

    @property
    def causes(self) -> frozenset[Place]:
        """The ops whose rounding to 16 bits is in the inputs."""
        return frozenset[Place]().union(*(input_.causes for input_ in self.inputs))

    @property
    def flushed(self) -> Finding | None:
        """The op that underflowed on the way to the inputs."""
        return next((input_.flushed for input_ in self.inputs if input_.flushed is not None), None)

    @property
    def error(self) -> float:
        """The largest error of the inputs."""
        return max((input_.error for input_ in self.inputs), default=0.0)

    @property
    def norm(self) -> float:
        """The largest norm of the inputs."""
        return max((input_.norm for input_ in self.inputs), default=0.0)

    @property
    def has_infinite_number(self) -> bool:
        """Whether an argument is infinity itself, as the value of `masked_fill`."""
        numbers = pytree.tree_leaves((self.args, self.kwargs))
        return any(isinstance(number, float) and isinf(number) for number in numbers)

    @property
    def reads_infinity(self) -> bool:
        return any(not bool(input_.exact.isfinite().all()) for input_ in self.inputs)


def _unread_statistics(call: _Call) -> tuple[Any, ...]:
    """Return the running statistics of a batch norm in training, which it writes only."""
    if "batch_norm" not in call.name:
        return ()
    arguments = {
        argument.name: value
        for argument, value in zip(call.func._schema.arguments, call.args, strict=False)
    }
    is_training = arguments.get("training", arguments.get("train", True))
    names = ("running_mean", "running_var") if is_training else ()
    return tuple(arguments[name] for name in names if arguments.get(name) is not None)


def _lost_digits(result: Tensor, shadow: Shadow, call: _Call) -> bool:
    # Gradients may be zero but for rounding, such as that of a bias before a norm, and so may the
    # statistics that a norm returns besides its result.
    if current_autograd_node() is not None or call.index or shadow.error < _LOST:
        return False
    return (
        shadow.error > _AMPLIFIED * max(call.error, torch.finfo(result.dtype).eps)
        and shadow.norm > _CANCELLED * call.norm
    )


def _subtracts_itself(found: Tensor, call: _Call) -> bool:
    """Return whether a number on the host was subtracted from the tensor it is of: `x - x.item()`.

    The number was rounded, and has no shadow. Such a zero is meant to be one.
    """
    is_number = any(isinstance(leaf, float) for leaf in pytree.tree_leaves(call.args))
    return call.name in {"sub", "rsub", "add"} and is_number and not bool(found.any())


@contextmanager
def shadowed(
    modules: Mapping[str, nn.Module],
    caller: CodeType,
    named: Iterable[NamedTensor] = (),
    observe: Callable[[OpError], None] | None = None,
) -> Iterator[ShadowMode]:
    """Run the block with shadows. `caller` is the code of the function that runs the user's."""
    tracker = FunctionPlaces(modules, caller)
    with tracker, ShadowMode(tracker, named, observe) as mode:
        yield mode


def _run(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Run an op on shadows.

    Empty if the result is random or not initialised, or if the op has no float64 kernel.
    """
    name = func.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in func.tags or "empty" in name:
        return []
    if name in {"_softmax", "_log_softmax"}:
        args = (*args[:2], False)
    try:
        return pytree.tree_leaves(func(*args, **kwargs))
    except Exception:  # noqa: BLE001 - a custom op may raise anything for a dtype it does not know
        return []


def _is_finite_or_mask(exact: Tensor) -> bool:
    """Return whether a tensor is finite, or a mask of zeros and minus infinities."""
    if bool(exact.isfinite().all()):
        return True
    return bool((exact.isneginf() | (exact == 0.0)).all())


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key(tensor: Tensor) -> Any:
    return (
        _storage(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(torch.where(tensor.isfinite(), tensor, 0.0)))
