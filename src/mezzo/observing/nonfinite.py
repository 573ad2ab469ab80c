"""Records of ops that made non-finite values, with the ranges of their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mezzo._dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The values of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    low: float
    """The smallest finite value; NaN if there is none."""
    high: float
    nan: int
    """Number of NaN."""
    inf: int
    """Number of infinite values."""

    def __str__(self) -> str:
        bad = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "inf")) if count]
        values = "" if math.isnan(self.low) else f" from {self.low:.4g} to {self.high:.4g}"
        return f"{self.dtype}{list(self.shape)}{values}{', ' * bool(bad)}{' and '.join(bad)}"


@dataclass(frozen=True, slots=True)
class NonFiniteOp:
    """An op that made a non-finite value, or that first read one from outside of the block."""

    op: str
    """The torch function as policies name it, or the ATen op if no function called it."""
    aten: str
    """The ATen op, without its overload."""
    module: str
    """The path of the module; empty for the model itself and for code outside of it."""
    source: str
    """The file and line in the user's code, of a backward op those of its forward op."""
    backward: bool
    step: int
    """The step in which it happened first, from 1."""
    read: bool
    """Whether an input was non-finite already, and no op of the block had made it."""
    calls: int = 1
    """Calls with a non-finite value; more than 1 only if `mode="record"`."""
    output: TensorRange | None = None
    """The values of the output; None if `mode="record"`."""
    inputs: tuple[TensorRange, ...] = ()
    """The values of floating-point inputs; empty if `mode="record"`."""

    def __str__(self) -> str:
        name = self.op if self.op == self.aten else f"{self.op} ({self.aten})"
        what = "read a value that was not finite before" if self.read else "made a non-finite value"
        text = f"{name} {what}, in the {'backward' if self.backward else 'forward'} pass"
        text += f" of module {self.module!r}" if self.module else ""
        text += f" at {self.source}" if self.source else ""
        text += f", step {self.step}"
        text += f", {self.calls} calls" if self.calls > 1 else ""
        text += f". Output: {self.output}" if self.output is not None else ""
        inputs = "; ".join(f"{index}: {entry}" for index, entry in enumerate(self.inputs))
        return f"{text}. Inputs: {inputs}." if inputs else f"{text}."


def tensor_range(tensor: Tensor) -> TensorRange:
    """Return the range of a floating-point tensor. This synchronizes.

    >>> import torch
    >>> print(tensor_range(torch.tensor([1.0, -2.0, torch.inf])))
    float32[3] from -2 to 1, 1 inf
    """
    values = tensor.detach()
    finite = values[values.isfinite()].float()
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (math.nan,) * 2
    return TensorRange(
        dtype_name(values.dtype),
        tuple(values.shape),
        low,
        high,
        int(values.isnan().sum()),
        int(values.isinf().sum()),
    )
