"""Ops that torch's exporter translates to something else than they mean. Imported only where onnxscript is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx_ir import DataType
from onnxscript import opset18

op: Any = opset18
"""The operators. Untyped: onnxscript tells types of tensors that it runs itself, and not of a graph's values."""


def training_batch_norm(
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,  # noqa: ARG001, FBT001
    momentum: float,  # noqa: ARG001
    eps: float,
) -> tuple[Any, ...]:
    """Batch norm with the statistics of the batch, computed in float32 as torch does; torch's own translation reads the stored ones, as in eval mode."""
    wide = op.Cast(input, to=DataType.FLOAT) if input.dtype in {DataType.FLOAT16, DataType.BFLOAT16} else input
    rank = len(input.shape)
    axes, channels = op.Constant(value_ints=[0, *range(2, rank)]), op.Constant(value_ints=[1, -1] + [1] * (rank - 2))
    mean = op.ReduceMean(wide, axes, keepdims=1)
    centered = op.Sub(wide, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    result = op.Div(centered, op.Sqrt(op.Add(variance, op.CastLike(op.Constant(value_float=eps), wide))))
    if weight is not None:
        result = op.Mul(result, op.CastLike(op.Reshape(weight, channels), wide))
    if bias is not None:
        result = op.Add(result, op.CastLike(op.Reshape(bias, channels), wide))
    return op.CastLike(result, input), op.Squeeze(mean, axes), op.Squeeze(variance, axes), op.Identity(running_mean), op.Identity(running_var)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.aten._native_batch_norm_legit_functional.default: training_batch_norm}
"""What to translate instead of torch."""
