"""Run code beside a float64 shadow of every tensor, and find the first op that loses precision.

Each ATen op runs twice: as it is, and on float64 copies of its inputs that were never rounded to 16
bits. Views and in-place ops are repeated on the shadows, so that these alias as the tensors do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mezzo._dtypes import HALF_DTYPES
from mezzo._torch import OpOverload, TorchDispatchMode, current_autograd_node, pytree
from mezzo.policy.registry import registry

_LOST = 0.25
"""Relative error from which a result has lost its digits."""
_AMPLIFIED = 8.0
"""How much larger it must be than the error of the inputs: otherwise another op is the cause."""
_CANCELLED = 1e-7
"""Results smaller than this, relative to the inputs, are zero for float32 too."""
_MASK = -1e8
"""Smaller values fill masks: that 16 bits make them minus infinity changes nothing."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Prefixes of the files whose frames are not the user's."""
_METADATA = "mezzo_place"


@dataclass(frozen=True)
class Place:
    """Where an op was called."""

    op: str
    """The name that policies use, or ATen's name."""
    module: str = ""
    """The path of the module; empty for the model itself and for the loss function."""
    source: str = ""
    """The file and line of the user's code; empty if only torch's code was involved."""


@dataclass(frozen=True)
class Finding:
    """The first op that lost precision."""

    place: Place
    nonfinite: bool
    """Whether its result left the range of its dtype; otherwise it lost its digits."""
    dtype: torch.dtype
    largest: float
    """The largest absolute value of the exact result."""
    error: float
    """The relative error of the result; infinite if it is not finite."""
    backward: bool
    """Whether the op ran in the backward pass."""
    causes: frozenset[Place]
    """The ops that rounded to 16 bits on the way to this result."""


@dataclass(frozen=True)
class _Shadow:
    exact: Tensor
    error: float
    norm: float
    causes: frozenset[Place]


class PlaceTracker(TorchFunctionMode):
    """Keeps the torch function and the module that run now."""

    def __init__(self, model: nn.Module, caller: CodeType) -> None:
        super().__init__()
        self._function: str | None = None
        self._modules = [""]
        self._caller = caller
        """Frames below the one of this code are not the user's."""
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name))
                module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _leave(self) -> None:
        self._modules.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before, self._function = self._function, registry().name_of(func)
        try:
            result = func(*args, **(kwargs or {}))
            if self._function is not None:
                self._mark_gradient(result, self._function)
        finally:
            self._function = before
        return result

    def place_of(self, overload: Any) -> Place:
        """Return the place of an op that runs now; in backward, the place of its forward op."""
        node = current_autograd_node()
        if node is not None and (place := node.metadata.get(_METADATA)) is not None:
            return place  # type: ignore[no-any-return]
        aten = registry().name_of(overload) or overload.overloadpacket.__name__
        return Place(self._function or aten, self._modules[-1], self._source())

    def _source(self) -> str:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not self._caller:
            file = frame.f_code.co_filename
            if not file.startswith(_LIBRARIES):
                return f"{Path(file).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _mark_gradient(self, result: Any, op: str) -> None:
        """Store the place on the autograd nodes that a function has added."""
        place: Place | None = None
        nodes: list[Any] = [
            one.grad_fn for one in pytree.tree_leaves(result) if isinstance(one, Tensor)
        ]
        while nodes:
            node = nodes.pop()
            if node is None or _METADATA in node.metadata or not node.next_functions:
                continue
            place = place or Place(op, self._modules[-1], self._source())
            node.metadata[_METADATA] = place
            nodes += [parent for parent, _ in node.next_functions]


class ShadowMode(TorchDispatchMode):
    """Runs every op on shadows too, and keeps the first that loses precision in `finding`."""

    def __init__(self, tracker: PlaceTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.finding: Finding | None = None
        self._tracker = tracker
        self._shadows: dict[Any, _Shadow] = {}
        self._kept: list[Tensor] = []
        """All tensors with a shadow: freed memory would be used again, with the same key."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Higher-order operators call functions, whose ops come here one by one.
        if self.finding is not None or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        inputs = [self._shadow(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if _real(leaf)]
        exact_args, exact_kwargs = pytree.tree_map(self._exact, (args, kwargs))
        result = func(*args, **kwargs)
        exact = _run(func, exact_args, exact_kwargs)
        for index, leaf in enumerate(pytree.tree_leaves(result)):
            if _real(leaf):
                expected = exact[index] if index < len(exact) else None
                self._add(func, leaf, expected, inputs)
        return result

    def _shadow(self, tensor: Tensor) -> _Shadow:
        known = self._shadows.get(_key(tensor))
        if known is None:
            exact = tensor.detach().double()
            known = self._keep(tensor, _Shadow(exact, 0.0, _norm(exact), frozenset()))
        return known

    def _exact(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        return self._shadow(value).exact if _real(value) else value

    def _keep(self, tensor: Tensor, shadow: _Shadow) -> _Shadow:
        self._shadows[_key(tensor)] = shadow
        self._kept.append(tensor)
        return shadow

    def _add(self, func: Any, result: Tensor, exact: Any, inputs: list[_Shadow]) -> None:
        """Store the shadow of a result, and a finding if the result lost precision."""
        causes = frozenset[Place]().union(*(one.causes for one in inputs))
        if not isinstance(exact, Tensor) or exact.shape != result.shape:
            exact = result.detach().double()
        if func.is_view:
            error = max((one.error for one in inputs), default=0.0)
            self._keep(result, _Shadow(exact, error, _norm(exact), causes))
            return
        found = result.detach().double()
        is_mask = found.isneginf() & (exact <= _MASK)
        exact = exact.masked_fill(is_mask, -torch.inf) if bool(is_mask.any()) else exact
        if result.dtype in HALF_DTYPES:
            causes = frozenset({self._tracker.place_of(func)})
        norm, difference = _norm(exact), _norm(torch.where(exact.isfinite(), found - exact, 0.0))
        error = difference / norm if norm else 0.0
        self._keep(result, _Shadow(exact, error, norm, causes))
        nonfinite = bool((exact.isfinite() & ~found.isfinite()).any())
        causes = causes.union(*(one.causes for one in inputs))
        # Without a rounding to 16 bits float32 has lost these digits.
        if nonfinite or (causes and self._lost_digits(result, error, norm, inputs)):
            finite = exact[exact.isfinite()]
            self.finding = Finding(
                self._tracker.place_of(func),
                nonfinite,
                result.dtype,
                float(finite.abs().max()) if finite.numel() else 0.0,
                torch.inf if nonfinite else error,
                current_autograd_node() is not None,
                causes,
            )

    @staticmethod
    def _lost_digits(result: Tensor, error: float, norm: float, inputs: list[_Shadow]) -> bool:
        # Gradients may be zero but for rounding, such as that of a bias before a norm.
        if current_autograd_node() is not None or error < _LOST:
            return False
        before = max((one.error for one in inputs), default=0.0)
        largest = max((one.norm for one in inputs), default=0.0)
        return (
            error > _AMPLIFIED * max(before, torch.finfo(result.dtype).eps)
            and norm > _CANCELLED * largest
        )


@contextmanager
def shadowed(model: nn.Module, caller: CodeType) -> Iterator[ShadowMode]:
    """Run the block with shadows. `caller` is the code of the function that runs the user's."""
    tracker = PlaceTracker(model, caller)
    with tracker, ShadowMode(tracker) as mode:
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


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided


def _key(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(torch.where(tensor.isfinite(), tensor, 0.0)))
