"""The scalers of loops written by hand."""

import torch

from mezzo.compat.apex.fp16_utils import DynamicLossScaler, LossScaler


def weight(gradient):
    made = torch.nn.Parameter(torch.ones(1))
    made.grad = torch.tensor([gradient])
    return made


def test_a_static_scale_stays_and_looks_at_nothing():
    scaler, one = LossScaler(8.0), torch.nn.Parameter(torch.ones(1))
    scaler.backward(one.sum())
    assert one.grad.item() == 8.0
    assert not scaler.has_overflow([weight(float("inf"))])
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    assert scaler.scale_gradient(None, (torch.ones(1),), None) == (torch.full((1,), 8.0),)


def test_a_dynamic_scale_follows_what_it_is_told():
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=4.0, scale_window=2)
    assert scaler.has_overflow([weight(1.0), weight(float("nan"))])
    assert not scaler.has_overflow([weight(1.0), torch.nn.Parameter(torch.ones(1))])
    seen = []
    for overflow in (False, False, True, True, True, True, False, True):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [8.0, 32.0, 8.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_the_defaults_are_apexs():
    assert (
        LossScaler().loss_scale,
        DynamicLossScaler().loss_scale,
        DynamicLossScaler().scale_window,
    ) == (1, 2**32, 1000)
