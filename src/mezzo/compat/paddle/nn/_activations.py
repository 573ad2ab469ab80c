"""Activations of `paddle.nn`: subclasses of torch's, with Paddle's arguments and defaults."""

from __future__ import annotations

from typing import Any

from torch import nn

from mezzo.compat.paddle.nn import functional as F
from mezzo.compat.paddle.nn._layer import Layer
from mezzo.compat.paddle.nn.initializer import Constant


class ReLU(nn.ReLU, Layer):
    """`paddle.nn.ReLU`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class ReLU6(nn.ReLU6, Layer):
    """`paddle.nn.ReLU6`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class LeakyReLU(nn.LeakyReLU, Layer):
    """`paddle.nn.LeakyReLU`."""

    def __init__(self, negative_slope: float = 0.01, name: str | None = None) -> None:
        super().__init__(negative_slope)


class Tanh(nn.Tanh, Layer):
    """`paddle.nn.Tanh`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class Sigmoid(nn.Sigmoid, Layer):
    """`paddle.nn.Sigmoid`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class Silu(nn.SiLU, Layer):
    """`paddle.nn.Silu`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


Swish = Silu


class Hardswish(nn.Hardswish, Layer):
    """`paddle.nn.Hardswish`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class GELU(nn.GELU, Layer):
    """`paddle.nn.GELU`; `approximate=True` uses tanh."""

    def __init__(self, approximate: bool = False, name: str | None = None) -> None:
        super().__init__("tanh" if approximate else "none")


class Softmax(nn.Softmax, Layer):
    """`paddle.nn.Softmax`, along the last axis by default."""

    def __init__(self, axis: int = -1, name: str | None = None) -> None:
        super().__init__(axis)


class Hardsigmoid(nn.Hardsigmoid, Layer):
    """`paddle.nn.Hardsigmoid`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class Mish(nn.Mish, Layer):
    """`paddle.nn.Mish`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class Softsign(nn.Softsign, Layer):
    """`paddle.nn.Softsign`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class LogSigmoid(nn.LogSigmoid, Layer):
    """`paddle.nn.LogSigmoid`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class Tanhshrink(nn.Tanhshrink, Layer):
    """`paddle.nn.Tanhshrink`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class SELU(nn.SELU, Layer):
    """`paddle.nn.SELU`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()


class ELU(nn.ELU, Layer):
    """`paddle.nn.ELU`."""

    def __init__(self, alpha: float = 1.0, name: str | None = None) -> None:
        super().__init__(alpha)


class CELU(nn.CELU, Layer):
    """`paddle.nn.CELU`."""

    def __init__(self, alpha: float = 1.0, name: str | None = None) -> None:
        super().__init__(alpha)


class Hardtanh(nn.Hardtanh, Layer):
    """`paddle.nn.Hardtanh`."""

    def __init__(self, min: float = -1.0, max: float = 1.0, name: str | None = None) -> None:
        super().__init__(min, max)


class Hardshrink(nn.Hardshrink, Layer):
    """`paddle.nn.Hardshrink`."""

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(threshold)


class Softshrink(nn.Softshrink, Layer):
    """`paddle.nn.Softshrink`."""

    def __init__(self, threshold: float = 0.5, name: str | None = None) -> None:
        super().__init__(threshold)


class Softplus(nn.Softplus, Layer):
    """`paddle.nn.Softplus`."""

    def __init__(self, beta: float = 1, threshold: float = 20, name: str | None = None) -> None:
        super().__init__(beta, threshold)


class LogSoftmax(nn.LogSoftmax, Layer):
    """`paddle.nn.LogSoftmax`, along the last axis by default."""

    def __init__(self, axis: int = -1, name: str | None = None) -> None:
        super().__init__(axis)


class PReLU(Layer):
    """`paddle.nn.PReLU`: a leaky ReLU whose slope is trained; the parameter is `_weight`."""

    def __init__(
        self,
        num_parameters: int = 1,
        init: float = 0.25,
        weight_attr: Any = None,
        data_format: str = "NCHW",
        name: str | None = None,
    ) -> None:
        super().__init__()
        F.check_channels_first(data_format, "NCHW")
        self._weight = self.create_parameter(
            [num_parameters], weight_attr, default_initializer=Constant(init)
        )

    def forward(self, x: Any) -> Any:
        """Return the positive part, plus the negative part times the slope."""
        return F.prelu(x, self._weight)
