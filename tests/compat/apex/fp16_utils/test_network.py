"""Models made 16-bit by hand."""

import torch
from torch import nn

from mezzo.compat.apex import fp16_utils


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


X = torch.randn(2, 3, 8, 8)


def test_batch_norms_stay_float32():
    for model in (
        fp16_utils.convert_network(network(), torch.float16),
        fp16_utils.BN_convert_float(network().half()),
    ):
        assert (model[0].weight.dtype, model[1].weight.dtype, model[1].running_mean.dtype) == (
            torch.float16,
            torch.float32,
            torch.float32,
        )


def test_batch_norms_without_weights_follow():
    model = fp16_utils.convert_network(
        nn.Sequential(nn.BatchNorm1d(2, affine=False)), torch.float16
    )
    assert model[0].running_mean.dtype is torch.float16


def test_recurrent_layers_still_run():
    model = fp16_utils.convert_network(nn.LSTM(2, 3), torch.bfloat16)
    assert model(torch.ones(1, 1, 2, dtype=torch.bfloat16))[0].dtype is torch.bfloat16


def test_inputs_are_cast():
    assert fp16_utils.network_to_half(network())(X).dtype is torch.float16
    assert fp16_utils.FP16Model(network())(X).dtype is torch.float16


def test_small_tools():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert fp16_utils.to_python_float(fp16_utils.clip_grad_norm([weight], 1.0)) == 5.0
