"""Which decorated optimizers declare that they unscale gradients themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo


def decorated(dtype: str, policy: str = "O2", **options):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.decorate(model, optimizer, policy, dtype=dtype, **options)


@pytest.mark.parametrize("options", [{}, {"policy": "O1", "clip_norm": 1.0}], ids=["O2", "O1"])
def test_only_float16_optimizers_declare_that_they_unscale(options):
    # Lightning refuses to clip the gradients of optimizers that do.
    assert decorated("float16", **options)[1]._step_supports_amp_scaling
    assert not getattr(decorated("bfloat16", **options)[1], "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("scaler_class", [mezzo.GradScaler, torch.amp.GradScaler])
def test_a_scaler_works_with_bfloat16_all_the_same(scaler_class, recwarn):
    torch.manual_seed(0)
    models = [decorated("bfloat16"), decorated("bfloat16")]
    models[1][0].load_state_dict(models[0][0].state_dict())
    x = torch.randn(8, 4)
    for (model, optimizer), scaler in zip(models, (None, scaler_class("cpu", 8.0)), strict=True):
        loss = model(x).square().sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    for one, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)
