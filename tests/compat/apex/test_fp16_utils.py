"""`apex.fp16_utils`: manual master weights, loss scalers, models cast to float16."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import fp16_utils
from mezzo.compat.apex.fp16_utils import DynamicLossScaler, LossScaler

# -- master weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_a_manual_loop_keeps_small_updates(flat):
    model = nn.Linear(2, 1).half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model_params, master_params = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert {master.dtype for master in master_params} == {torch.float32}
    assert len(master_params) == (1 if flat else 2)
    optimizer = torch.optim.SGD(master_params, lr=2.0**-12)
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(1, 2, dtype=torch.half)).sum().backward()
        fp16_utils.model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        optimizer.step()
        fp16_utils.master_params_to_model_params(model_params, master_params, flat_master=flat)
    assert all(torch.equal(p, torch.full_like(p, 1.0 - 2.0**-10)) for p in model_params)


def test_masters_of_parameters_without_gradient_get_none_or_flat_zeros():
    model = nn.Linear(2, 1).half()
    for flat, expected in ((False, [None, None]), (True, [torch.zeros(3)])):
        model_params, master_params = fp16_utils.prep_param_lists(model, flat_master=flat)
        fp16_utils.model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        grads = [master.grad for master in master_params]
        assert torch.equal(grads[0], expected[0]) if flat else grads == expected


def test_a_flat_master_of_several_dtypes_is_rejected():
    model = fp16_utils.convert_network(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.float16
    )
    with pytest.raises(TypeError, match=r"several dtypes\. Leave flat_master out"):
        fp16_utils.prep_param_lists(model, flat_master=True)


def test_convert_module_does_not_cast_children():
    module = nn.Sequential(nn.Linear(1, 1))
    module.own = nn.Parameter(torch.ones(1))
    fp16_utils.convert_module(module, torch.float16)
    assert (module.own.dtype, module[0].weight.dtype) == (torch.float16, torch.float32)


# -- loss scalers ----------------------------------------------------------------------------------


def weight(gradient):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([gradient])
    return parameter


def test_a_static_scale_is_constant_and_checks_nothing():
    scaler, parameter = LossScaler(8.0), torch.nn.Parameter(torch.ones(1))
    scaler.backward(parameter.sum())
    assert parameter.grad.item() == 8.0
    assert not scaler.has_overflow([weight(float("inf"))])
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    assert scaler.scale_gradient(None, (torch.ones(1),), None) == (torch.full((1,), 8.0),)


def test_a_dynamic_scale_grows_and_backs_off():
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=4.0, scale_window=2)
    assert scaler.has_overflow([weight(1.0), weight(float("nan"))])
    assert not scaler.has_overflow([weight(1.0), torch.nn.Parameter(torch.ones(1))])
    scales = []
    for overflow in (False, False, True, True, True, True, False, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8.0, 32.0, 8.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_defaults_are_those_of_apex():
    assert (
        LossScaler().loss_scale,
        DynamicLossScaler().loss_scale,
        DynamicLossScaler().scale_window,
    ) == (1, 2**32, 1000)


# -- models ----------------------------------------------------------------------------------------


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


def test_batch_norms_without_weights_are_cast():
    model = fp16_utils.convert_network(
        nn.Sequential(nn.BatchNorm1d(2, affine=False)), torch.float16
    )
    assert model[0].running_mean.dtype is torch.float16


def test_recurrent_layers_run_after_the_cast():
    model = fp16_utils.convert_network(nn.LSTM(2, 3), torch.bfloat16)
    assert model(torch.ones(1, 1, 2, dtype=torch.bfloat16))[0].dtype is torch.bfloat16


def test_wrapped_networks_cast_their_inputs():
    assert fp16_utils.network_to_half(network())(X).dtype is torch.float16
    assert fp16_utils.FP16Model(network())(X).dtype is torch.float16


def test_clip_grad_norm_and_to_python_float():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert fp16_utils.to_python_float(fp16_utils.clip_grad_norm([weight], 1.0)) == 5.0
