"""Cache of 16-bit copies of float32 weights, which detects changes of the weights.

torch's cache is keyed on the tensor only. This one is keyed on the tensor, its dtype and whether
gradients are recorded, and compares data pointer and version. So it detects in-place changes, holds
both 16-bit dtypes, and also works for frozen weights and in inference.
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
    """Contents and use of a weight cache."""

    size: int
    """Number of 16-bit copies."""
    bytes: int
    """Memory of the copies."""
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A cached cast, with the address and version of its weight at the cast."""

    weight: weakref.ref[torch.Tensor]
    pointer: int
    version: int
    tensor: torch.Tensor


class WeightCache:
    """16-bit copies of weights, for the outermost region of a thread."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype, bool, bool, bool], _Copy] = {}
        self._hits = 0
        self._misses = 0
        self._sweep_at = _FIRST_SWEEP

    def get(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in another dtype; cast it if there is no current copy."""
        # A copy that was made without recording gradients, or of a frozen weight, has no graph back
        # to the weight. An inference tensor cannot be recorded by autograd.
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
        """Return contents and use, after dropping copies of weights that no longer exist."""
        self._sweep()
        tensors = [copy.tensor for copy in self._copies.values()]
        size = sum(tensor.nbytes for tensor in tensors)
        return CacheInfo(len(tensors), size, self._hits, self._misses)

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()

    def _sweep(self) -> None:
        """Drop the copies of weights that no longer exist.

        A copy that records gradients keeps its weight alive through autograd. Such a weight is
        recognized by its reference count.
        """
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
    """Return the reference count of a weight that only its cast keeps alive.

    Measured, because versions of torch differ.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    reference = weakref.ref(weight)
    copy = cast(weight, torch.bfloat16)
    del weight
    orphan = reference()
    count = sys.getrefcount(orphan) if orphan is not None else 0
    del orphan, copy
    return count


def is_weight(value: torch.Tensor) -> bool:
    """Return whether casts of a tensor are cached: parameters only, frozen or not.

    Another leaf may be an activation (reentrant checkpointing detaches its inputs), whose gradients
    would be summed in 16 bits if its uses shared a cast.
    """
    # Not for subclasses, such as fake tensors: they may have no data pointer.
    return type(value) is torch.nn.Parameter and not value.is_inference()
