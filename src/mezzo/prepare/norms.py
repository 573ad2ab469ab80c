"""Normalisation layers at O2: statistics in float32, result in the dtype of the input.

torch's autocast computes a norm in float32 and returns float32, which doubles the activations of
models that normalise between layers. The 16-bit kernels of accelerators compute the mean and the
variance in float32 as well and read and write half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from mezzo._casting import cast
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

NORM_OPS: Mapping[type[nn.Module], str] = {
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.RMSNorm: "rms_norm",
}
"""Layers that are run in the dtype of their input, and their ops."""


def find_norms(models: Iterable[nn.Module], policy: Policy) -> tuple[nn.Module, ...]:
    """Return the layers of `NORM_OPS` whose op the policy does not list.

    Subclasses with a forward of their own are left alone: it may do more than the norm.
    """
    listed = frozenset().union(*(policy.ops_with_rule(rule) for rule in Rule))
    ops = {cls: op for cls, op in NORM_OPS.items() if op not in listed}
    return tuple(
        module
        for model in models
        for module in model.modules()
        if any(type(module).forward is cls.forward for cls in ops)
        and "forward" not in module.__dict__
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


def _normalize(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    # Kernels of accelerators need the weights in the dtype of the input.
    match module:
        case nn.LayerNorm():
            weight, bias = _as(module.weight, input), _as(module.bias, input)
            return F.layer_norm(input, module.normalized_shape, weight, bias, module.eps)
        case nn.GroupNorm():
            weight, bias = _as(module.weight, input), _as(module.bias, input)
            return F.group_norm(input, module.num_groups, weight, bias, module.eps)
        case nn.RMSNorm():
            return F.rms_norm(input, module.normalized_shape, _as(module.weight, input), module.eps)
    raise TypeError(f"{type(module).__name__} is not a normalisation layer.")


def _as(weight: Tensor | None, input: Tensor) -> Tensor | None:  # noqa: A002
    return None if weight is None else cast(weight, input.dtype)
