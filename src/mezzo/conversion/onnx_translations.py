"""ONNX translations for ops that torch's exporter translates incorrectly.

Import this module only if onnxscript is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx_ir import DataType
from onnxscript import opset18

from mezzo._torch import batch_norm_functional

op: Any = opset18
"""The ONNX operators. Untyped: onnxscript annotates them for tensors that it evaluates itself, not
for the values of a graph."""


def training_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Translate batch norm in training mode, computed in float32 as torch does.

    torch's own translation uses the running statistics, as in eval mode.
    """
    axes = op.Constant(value_ints=[0, *range(2, len(input.shape))])
    mean, variance = _statistics(_wide(input), axes)
    result = _normalized(input, mean, variance, weight, bias, eps)
    return (
        result,
        op.Squeeze(mean, axes),
        op.Squeeze(variance, axes),
        op.Identity(running_mean),
        op.Identity(running_var),
    )


def instance_norm(
    input: Any,
    weight: Any = None,
    bias: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = False,
) -> Any:
    """Translate instance norm, computed in float32 as torch does.

    ONNX has no operator for 16-bit inputs with float32 parameters.
    """
    if use_input_stats:
        mean, variance = _statistics(
            _wide(input), op.Constant(value_ints=[*range(2, len(input.shape))])
        )
    else:
        mean, variance = (
            op.Reshape(statistic, _channels(input)) for statistic in (running_mean, running_var)
        )
    return _normalized(input, mean, variance, weight, bias, eps)


def _wide(value: Any) -> Any:
    return (
        op.Cast(value, to=DataType.FLOAT)
        if value.dtype in {DataType.FLOAT16, DataType.BFLOAT16}
        else value
    )


def _channels(value: Any) -> Any:
    return op.Constant(value_ints=[1, -1] + [1] * (len(value.shape) - 2))


def _statistics(wide: Any, axes: Any) -> tuple[Any, Any]:
    mean = op.ReduceMean(wide, axes, keepdims=1)
    centered = op.Sub(wide, mean)
    return mean, op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)


def _normalized(value: Any, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> Any:
    wide = _wide(value)
    result = op.Div(
        op.Sub(wide, mean),
        op.Sqrt(op.Add(variance, op.CastLike(op.Constant(value_float=eps), wide))),
    )
    if weight is not None:
        result = op.Mul(result, op.CastLike(op.Reshape(weight, _channels(value)), wide))
    if bias is not None:
        result = op.Add(result, op.CastLike(op.Reshape(bias, _channels(value)), wide))
    return op.CastLike(result, value)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    batch_norm_functional.default: training_batch_norm,
    torch.ops.aten.instance_norm.default: instance_norm,
}
"""Translations that replace torch's own."""
