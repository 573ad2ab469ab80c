"""16-bit copies of float32 weights, remembered for as long as they are true.

torch's own cache is keyed on the tensor alone. This one is keyed on the tensor, where its data
lies, its version, the dtype and whether gradients are recorded, so that an in-place change is seen,
another dtype is another entry, and frozen weights and inference are served too.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from functools import cache

import torch

from mezzo._casting import cast
from mezzo._torch import is_functorch_tensor

_FIRST_SWEEP = 64


@dataclass(frozen=True)
class CacheInfo:
    """What a weight cache holds and how it was used."""

    size: int
    """How many 16-bit copies are held."""
    bytes: int
    """How much memory they take."""
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class _Copy:
    weight: weakref.ref[torch.Tensor]
    pointer: int
    version: int
    tensor: torch.Tensor


class WeightCache:
    """The copies of one thread's outermost region."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype, bool, bool, bool], _Copy] = {}
        self._hits = 0
        self._misses = 0
        self._sweep_at = _FIRST_SWEEP

    def get(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in another dtype, cast once for as long as nobody changes it."""
        # A copy made without recording gradients would cut them off later, as would one of a weight
        # that was frozen then; an inference tensor may not be recorded.
        key = (
            id(weight),
            dtype,
            weight.requires_grad,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        if is_functorch_tensor(weight):
            return cast(weight, dtype)
        copy = self._copies.get(key)
        if (
            copy is not None
            and copy.weight() is weight
            and copy.version == weight._version
            and copy.pointer == weight.data_ptr()
        ):
            self._hits += 1
            return copy.tensor
        self._misses += 1
        copied = cast(weight, dtype)
        self._copies[key] = _Copy(
            weakref.ref(weight, lambda _: self._copies.pop(key, None)),
            weight.data_ptr(),
            weight._version,
            copied,
        )
        if len(self._copies) >= self._sweep_at:
            self._sweep()
        return copied

    def info(self) -> CacheInfo:
        """What is held now; copies of weights that nobody owns any more are dropped first."""
        self._sweep()
        held = [copy.tensor for copy in self._copies.values()]
        return CacheInfo(len(held), sum(tensor.nbytes for tensor in held), self._hits, self._misses)

    def clear(self) -> None:
        """Forget every copy."""
        self._copies.clear()

    def _sweep(self) -> None:
        """Drop the copies of dead weights. A copy that records gradients keeps its weight alive through autograd, so a dead one is told by who refers to it."""
        for key, copy in list(self._copies.items()):
            weight = copy.weight()
            if weight is None or (
                copy.tensor.requires_grad and sys.getrefcount(weight) <= _orphan_references()
            ):
                self._copies.pop(key, None)
            del weight
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._copies))


@cache
def _orphan_references() -> int:
    """How many references are counted for a weight that only its own cast keeps alive: torch's versions differ, so it is tried."""
    weight = torch.nn.Parameter(torch.zeros(1))
    seen = weakref.ref(weight)
    copy = cast(weight, torch.bfloat16)
    del weight
    orphan = seen()
    count = sys.getrefcount(orphan) if orphan is not None else 0
    del orphan, copy
    return count


def is_weight(value: torch.Tensor) -> bool:
    """Whether a tensor is worth remembering: a parameter, frozen or not.

    No other leaf is: it may be an activation (reentrant checkpointing detaches its inputs), whose
    gradients would be summed in 16 bits if its uses shared a cast.
    """
    # Not a subclass: those (a tracer's fake tensors among them) have ideas of their own about where
    # their data is.
    return type(value) is torch.nn.Parameter and not value.is_inference()
