"""`apex.normalization`: torch's own norms, whose kernels are fused as well."""

from __future__ import annotations

import torch
from torch import nn

from mezzo.compat._missing import module_getattr
from mezzo.compat.apex._substitutions import SUBSTITUTIONS

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


class _Norm:
    """Accept Apex's arguments and pass torch's on."""

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]


class FusedLayerNorm(_Norm, nn.LayerNorm):
    """`torch.nn.LayerNorm` with Apex's arguments; `memory_efficient` has no effect.

    >>> FusedLayerNorm(4)  # doctest: +ELLIPSIS
    FusedLayerNorm((4,), eps=1e-05, elementwise_affine=True...)
    """


class FusedRMSNorm(_Norm, nn.RMSNorm):
    """`torch.nn.RMSNorm` with Apex's arguments; `memory_efficient` has no effect."""


MixedFusedLayerNorm, MixedFusedRMSNorm = FusedLayerNorm, FusedRMSNorm

__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=nn)
