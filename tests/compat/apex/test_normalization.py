"""Apex's norms are torch's."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import normalization


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (normalization.FusedLayerNorm, nn.LayerNorm),
        (normalization.MixedFusedLayerNorm, nn.LayerNorm),
        (normalization.FusedRMSNorm, nn.RMSNorm),
        (normalization.MixedFusedRMSNorm, nn.RMSNorm),
    ],
)
def test_a_norm_is_torchs(kind, theirs):
    x = torch.randn(2, 4)
    assert torch.equal(kind(4, 1e-3, True, True)(x), theirs(4, 1e-3)(x))
    assert kind(4, elementwise_affine=False).weight is None
    assert kind(4).eps == 1e-5
