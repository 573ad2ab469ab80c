"""`trace_overflow` of plain models on a GPU, where backward runs in another thread."""

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
    return mezzo.trace_overflow(model, (x, y), F.cross_entropy, *args, **kwargs)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("dtype", "op"), [("float16", "mul"), ("bfloat16", "sub")])
def test_a_variance_by_hand_is_named_and_the_suggested_policy_is_clean(level, dtype, op):
    found = find(by_hand(), level, dtype=dtype)
    assert (found.op, found.module) == (op, "1")
    assert found.line.startswith("test_precision_loss.py:")
    assert not find(by_hand(), found.policy)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_transformer_layer_is_clean(level):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Unflatten(0, (4, 8)), layer, nn.Flatten(0, 1), nn.Linear(16, 4))
    assert not find(model.cuda(), level, dtype="float16")


def test_a_gradient_that_overflows_is_named_by_its_forward_op():
    found = mezzo.trace_overflow(
        nn.Linear(16, 4).cuda(),
        torch.randn(8, 16).cuda(),
        lambda outputs: (outputs.exp() * 1e30).sum() * 1e-10,
        dtype="float16",
        full={"exp"},
    )
    assert found.direction == "backward"
    assert found.line.startswith("test_precision_loss.py:")
