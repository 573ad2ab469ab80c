"""`find_precision_loss` on a GPU, where backward runs in another thread."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo

pytestmark = pytest.mark.gpu


class Standardize(nn.Module):
    def forward(self, h):
        variance = (h * h).mean(0) - h.mean(0) ** 2
        return (h - h.mean(0)) / (variance.clamp(min=0.0) + 1e-3).sqrt()


def by_hand():
    torch.manual_seed(0)
    first = nn.Linear(16, 32)
    nn.init.constant_(first.bias, 1000.0)
    nn.init.normal_(first.weight, std=3.0)
    return nn.Sequential(first, Standardize(), nn.Linear(32, 4)).cuda()


def find(model, *args, **kwargs):
    torch.manual_seed(1)
    x, y = torch.randn(32, 16).cuda(), torch.randint(4, (32,)).cuda()
    return mezzo.find_precision_loss(model, F.cross_entropy, x, y, *args, **kwargs)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("dtype", "op"), [("float16", "mul"), ("bfloat16", "sub")])
def test_a_variance_by_hand_is_named_and_the_suggested_policy_is_clean(level, dtype, op):
    found = find(by_hand(), level, dtype=dtype)
    assert (found.op, found.module) == (op, "1")
    assert found.source.startswith("test_advising.py:")
    assert find(by_hand(), found.policy) is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_transformer_layer_is_clean(level):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Unflatten(0, (4, 8)), layer, nn.Flatten(0, 1), nn.Linear(16, 4))
    assert find(model.cuda(), level, dtype="float16") is None


def test_a_gradient_that_overflows_is_named_by_its_forward_op():
    found = mezzo.find_precision_loss(
        nn.Linear(16, 4).cuda(),
        lambda outputs: (outputs.exp() * 1e30).sum() * 1e-10,
        torch.randn(8, 16).cuda(),
        dtype="float16",
        full={"exp"},
    )
    assert found.backward
    assert found.source.startswith("test_advising.py:")
