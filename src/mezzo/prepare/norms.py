"""Normalisation layers at O2: statistics in float32, result in the dtype of the input.

torch's autocast computes a norm in float32 and returns float32, which doubles the activations of
models that normalise between layers. The 16-bit kernels of accelerators compute the mean and the
variance in float32 as well and read and write half the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from mezzo._casting import cast
from mezzo._dtypes import HALF_DTYPES
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

NORM_OPS: Mapping[type[nn.Module], str] = {
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.RMSNorm: "rms_norm",
}
"""Layers that are run in the dtype of their input, and their ops."""


def find_norms(models: Iterable[nn.Module], policy: Policy) -> tuple[nn.Module, ...]:
    """Return the layers of `NORM_OPS`, and hand-written RMS norms, whose op is not listed.

    Subclasses with a forward of their own are left alone: it may do more than the norm.
    """
    listed = frozenset().union(*(policy.ops_with_rule(rule) for rule in Rule))
    ops = {cls: op for cls, op in NORM_OPS.items() if op not in listed}
    return tuple(
        module
        for model in models
        for module in model.modules()
        if "forward" not in module.__dict__
        and (
            any(type(module).forward is cls.forward for cls in ops)
            or (nn.RMSNorm in ops and is_rms_norm(module))
        )
    )


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a layer that is not torch's computes the RMS norm, as transformers' do.

    Found by its name and state, then by running it: with a random weight and input, in float32, it
    must return what `F.rms_norm` returns. Written out, the norm takes six passes over memory.
    """
    weight, eps = getattr(module, "weight", None), _eps(module)
    if (
        "norm" not in type(module).__name__.lower()
        or type(weight) is not nn.Parameter
        or weight.dim() != 1
        or eps is None
        or [*module.state_dict()] != ["weight"]
        or next(module.children(), None) is not None
        # self and the input
        or len(signature(type(module).forward).parameters) != 2
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    # The last row is so small that eps counts.
    scales = torch.tensor([[1.0], [1.0], [100.0], [eps**0.5]])
    values = scales * torch.randn(len(scales), len(weight), generator=generator)
    probe = copy.copy(module)
    probe.__dict__["_parameters"] = {"weight": nn.Parameter(values[0])}
    try:
        with torch.no_grad(), torch_autocast("cpu", enabled=False):
            result = type(module).forward(probe, values[1:])
            expected = F.rms_norm(values[1:], values[0].shape, values[0], eps)
    # It is the layer's own code, and takes other arguments or more than the weight.
    except Exception:  # noqa: BLE001
        return False
    return (
        isinstance(result, Tensor)
        and result.shape == expected.shape
        and torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    )


def _eps(module: nn.Module) -> float | None:
    names = ("variance_epsilon", "eps", "epsilon")
    return next(
        (eps for name in names if isinstance(eps := getattr(module, name, None), float)), None
    )


def keep_input_dtype(module: nn.Module, device: str) -> Callable[[], None]:
    """Replace the forward of a layer; return a function that restores it."""
    module.__dict__["forward"] = NormForward(module, device)
    return partial(module.__dict__.pop, "forward", None)


class NormForward:
    """The forward of a normalisation layer: float32 inside, the dtype of the input outside.

    An object rather than a function, so that a layer can be copied and pickled with it.
    """

    def __init__(self, module: nn.Module, device: str) -> None:
        self._module, self._device = module, device

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch's forward
        """Run the layer without autocast, which would cast the input to float32."""
        if is_dynamo_compiling():
            with torch_autocast(self._device, enabled=False):
                return _normalize(self._module, input)
        if not torch.is_autocast_enabled(self._device):
            return _normalize(self._module, input)
        # Twice as fast as a region.
        torch.set_autocast_enabled(self._device, False)
        try:
            return _normalize(self._module, input)
        finally:
            torch.set_autocast_enabled(self._device, True)


def _normalize(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
    dtype = input.dtype
    match module:
        case nn.LayerNorm() | nn.GroupNorm():
            # Kernels of accelerators need the weights in the dtype of the input. Those of CPUs
            # save the statistics for backward in the dtype of the weights, and 1 / sqrt(eps), as
            # of a row of zeros, is beyond the range of float16.
            if input.device.type == "cpu" and dtype in HALF_DTYPES:
                dtype = torch.float32
            if module.weight is None:
                return cast(_layer_or_group_norm(module, cast(input, dtype), dtype), input.dtype)
            return _layer_or_group_norm(module, input, dtype)
        case nn.RMSNorm():
            return F.rms_norm(input, module.normalized_shape, _as(module.weight, dtype), module.eps)
    own: Any = module.weight
    return F.rms_norm(input, own.shape, _as(own, dtype), _eps(module))


def _layer_or_group_norm(
    module: nn.LayerNorm | nn.GroupNorm,
    input: Tensor,  # noqa: A002 - torch's name
    dtype: torch.dtype,
) -> Tensor:
    weight, bias = _as(module.weight, dtype), _as(module.bias, dtype)
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(input, module.normalized_shape, weight, bias, module.eps)
    return F.group_norm(input, module.num_groups, weight, bias, module.eps)


def _as(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else cast(weight, dtype)
