"""What is wrong with an op or a tensor: its kind, its place, and the ranges of the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from mezzo._dtypes import dtype_name
from mezzo.observing.function_places import Place


class Kind(StrEnum):
    """What happened to a result."""

    OVERFLOW = "overflow"
    """It is not finite, and the exact result is."""
    DIGITS = "digits"
    """It has no correct digits."""
    UNDERFLOW = "underflow"
    """It became zero."""
    NONFINITE = "nonfinite"
    """It is not finite, and neither is the exact result; or the exact one could not be computed."""
    DATA = "data"
    """A tensor of the batch was not finite."""
    PARAMETERS = "parameters"
    """A parameter or buffer was not finite."""


@dataclass(frozen=True)
class InputRange:
    """One floating-point input of an op."""

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    """The smallest value, without NaN."""
    largest: float
    """The largest value, without NaN."""
    nan: int = 0
    """Number of NaN."""

    @classmethod
    def of(cls, tensor: Tensor) -> InputRange:
        """Read the range of a tensor. Synchronizes."""
        values = tensor.detach().double().flatten()
        known = values[~values.isnan()]
        low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
        name = dtype_name(tensor.dtype)
        return cls(name, tuple(tensor.shape), low, high, values.numel() - known.numel())

    def __str__(self) -> str:
        nan = f", {self.nan} NaN" if self.nan else ""
        return (
            f"{self.dtype} {list(self.shape)} from {self.smallest:.3g} to {self.largest:.3g}{nan}"
        )


@dataclass(frozen=True)
class Finding:
    """An op that lost precision or made a non-finite value, or a tensor that was not finite."""

    kind: Kind
    place: Place
    """For a tensor of the batch or a parameter, the op is its name."""
    dtype: torch.dtype
    largest: float = 0.0
    """The largest absolute value of the exact result."""
    error: float = torch.inf
    """The relative error of the result; infinite if it is not finite."""
    backward: bool = False
    """Whether the op ran in the backward pass."""
    causes: frozenset[Place] = frozenset()
    """The ops that rounded to 16 bits on the way to this result."""
    inputs: tuple[InputRange, ...] = ()
    number: int = 0
    """How many ops ran before."""
    is_nan: bool = False
    """Whether the result has NaN, not only infinities."""

    @property
    def nonfinite(self) -> bool:
        """Whether the result is not finite."""
        return self.kind not in {Kind.DIGITS, Kind.UNDERFLOW}


@dataclass(frozen=True)
class NamedTensor:
    """A tensor that existed before the run."""

    kind: Kind
    name: str
    tensor: Tensor
