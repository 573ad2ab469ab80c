"""The `list_*` functions: MXNet's op lists in its own names."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.policy.presets.mxnet import listed_as

Condition = tuple[str, str, list[str]]
"""An op, one of its parameters, and the values for which it runs in float32."""

_CONDITIONAL = {
    torch.float16: [("Activation", "act_type", ["softrelu"]), ("LeakyReLU", "act_type", ["elu", "selu"])],
    torch.bfloat16: [("LeakyReLU", "act_type", ["selu"])],
}
_LOSS_OUTPUTS = {
    torch.float16: ["SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"],
    torch.bfloat16: ["SoftmaxOutput"],
}
_FLOAT32_PARAMETERS = {name: ["", "gamma", "beta", "moving_mean", "moving_var"] for name in ("BatchNormWithReLU", "BatchNorm")}


def read_dtype(target_dtype: Any, complaint: str = "not supported type") -> torch.dtype:
    """A 16-bit dtype from MXNet's words: a name, one of NumPy's or one of torch's.

    >>> read_dtype("bfloat16")
    torch.bfloat16
    """
    for dtype in HALF_DTYPES:
        name = dtype_name(dtype)
        if target_dtype in (dtype, name) or name in (getattr(target_dtype, "__name__", None), getattr(target_dtype, "name", None)):
            return dtype
    raise AssertionError(f"{complaint}, got {target_dtype!r}. Choose float16 or bfloat16.")


def list_lp16_ops(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in the 16-bit dtype.

    >>> "Convolution" in list_lp16_ops("float16")
    True
    """
    return listed_as("half", read_dtype(target_dtype))


def list_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in float32."""
    return listed_as("full", read_dtype(target_dtype))


def list_lp16_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in the dtype they are given."""
    return listed_as("keep", read_dtype(target_dtype))


def list_widest_type_cast(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in the widest dtype of their inputs."""
    return listed_as("promote", read_dtype(target_dtype))


def list_conditional_fp32_ops(target_dtype: Any = "float16") -> list[Condition]:
    """Ops that run in float32 for some values of a parameter."""
    return [(op, parameter, list(values)) for op, parameter, values in _CONDITIONAL[read_dtype(target_dtype)]]


def list_loss_output_functions(target_dtype: Any = "float16") -> list[str]:
    """Output layers whose backward ignores the incoming gradient, and which get the scale themselves."""
    return list(_LOSS_OUTPUTS[read_dtype(target_dtype)])


def list_lp16_use_fp32_params(target_dtype: Any = "float16") -> dict[str, list[str]] | None:
    """Ops of the 16-bit lists that keep float32 parameters; None for float16, whose kernels see to it themselves."""
    if read_dtype(target_dtype) is torch.float16:
        return None
    return {name: list(parameters) for name, parameters in _FLOAT32_PARAMETERS.items()}
