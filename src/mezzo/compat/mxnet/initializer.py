"""`mxnet.initializer`: initial values of parameters, by the parameter's name.

Biases, `beta` and running means are 0, `gamma` and running variances 1, whatever the initializer.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mezzo._errors import choices
from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = [
    "Constant",
    "Initializer",
    "MSRAPrelu",
    "Normal",
    "One",
    "Uniform",
    "Xavier",
    "Zero",
    "create",
]


class Initializer:
    """Base class: `_init_weight(name, tensor)` fills a tensor in place."""

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a parameter: biases and statistics by their names, others by the initializer."""
        fixed = _FIXED.get(name.rpartition(".")[2])
        with torch.no_grad():
            if fixed is None:
                self._init_weight(name, tensor)
            else:
                tensor.fill_(fixed)

    def _init_weight(self, name: str, tensor: torch.Tensor) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} has no _init_weight(name, tensor). Define it; it fills the"
            " tensor in place."
        )

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


_FIXED = {
    "bias": 0.0,
    "beta": 0.0,
    "running_mean": 0.0,
    "moving_mean": 0.0,
    "gamma": 1.0,
    "running_var": 1.0,
    "moving_var": 1.0,
}


class Constant(Initializer):
    """Fill with a number, or with an array of the parameter's shape; parameters of any name."""

    def __init__(self, value: Any = 0.0) -> None:
        self.value = value

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Fill a parameter."""
        with torch.no_grad():
            tensor.copy_(torch.as_tensor(self.value).expand(tensor.shape))


class Zero(Constant):
    """Fill with zeros."""

    def __init__(self) -> None:
        super().__init__(0.0)


class One(Constant):
    """Fill with ones."""

    def __init__(self) -> None:
        super().__init__(1.0)


class Uniform(Initializer):
    """Uniform values in (-scale, scale); the default of gluon.

    >>> weight = torch.ones(1000)
    >>> Uniform(0.5)("weight", weight)
    >>> bool((weight.abs() <= 0.5).all())
    True
    """

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def _init_weight(self, name: str, tensor: torch.Tensor) -> None:
        tensor.uniform_(-self.scale, self.scale)


class Normal(Initializer):
    """Normally distributed values around 0."""

    def __init__(self, sigma: float = 0.01) -> None:
        self.sigma = sigma

    def _init_weight(self, name: str, tensor: torch.Tensor) -> None:
        tensor.normal_(0.0, self.sigma)


class Xavier(Initializer):
    """Values of variance `magnitude / (3 * factor)` (uniform) or `magnitude / factor` (gaussian).

    `factor` is the number of inputs, of outputs, or their average.
    """

    def __init__(
        self, rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3.0
    ) -> None:
        if rnd_type not in ("uniform", "gaussian"):
            raise ValueError(f"Unknown rnd_type {rnd_type!r}. {choices(['uniform', 'gaussian'])}")
        if factor_type not in ("avg", "in", "out"):
            raise ValueError(
                f"Unknown factor_type {factor_type!r}. {choices(['avg', 'in', 'out'])}"
            )
        self.rnd_type, self.factor_type, self.magnitude = rnd_type, factor_type, magnitude

    def _init_weight(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 1:
            raise ValueError(
                f"Xavier needs a parameter of two dimensions or more, got {name!r} of shape"
                f" {tuple(tensor.shape)}. Use Uniform or Normal for it."
            )
        receptive = tensor[0, 0].numel()
        inputs, outputs = tensor.shape[1] * receptive, tensor.shape[0] * receptive
        fans = {"in": inputs, "out": outputs, "avg": (inputs + outputs) / 2}
        scale = math.sqrt(self.magnitude / fans[self.factor_type])
        if self.rnd_type == "uniform":
            tensor.uniform_(-scale, scale)
        else:
            tensor.normal_(0.0, scale)


class MSRAPrelu(Xavier):
    """Gaussian `Xavier` for layers before a (leaky) ReLU with this slope."""

    def __init__(self, factor_type: str = "avg", slope: float = 0.25) -> None:
        super().__init__("gaussian", factor_type, 2.0 / (1 + slope**2))


_NAMES: dict[str, type[Initializer]] = {
    "zeros": Zero,
    "ones": One,
    "uniform": Uniform,
    "normal": Normal,
    "xavier": Xavier,
    "msraprelu": MSRAPrelu,
}


def create(init: Any, default: Initializer | None = None) -> Initializer:
    """Return the initializer of a name, an initializer as it is, or the default for None.

    >>> create("zeros")
    Zero(value=0.0)
    """
    if init is None:
        return default or Uniform()
    if isinstance(init, str) and init.lower() in _NAMES:
        return _NAMES[init.lower()]()
    if not callable(init):
        raise ValueError(f"Unknown initializer {init!r}. {choices(_NAMES)}")
    made: Initializer = init
    return made


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
