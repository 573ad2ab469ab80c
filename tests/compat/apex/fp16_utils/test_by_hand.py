"""Masters kept by hand."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import fp16_utils


@pytest.mark.parametrize("flat", [False, True])
def test_a_loop_by_hand_loses_no_small_update(flat):
    model = nn.Linear(2, 1).half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model_params, master_params = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert {one.dtype for one in master_params} == {torch.float32}
    assert len(master_params) == (1 if flat else 2)
    optimizer = torch.optim.SGD(master_params, lr=2.0**-12)
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(1, 2, dtype=torch.half)).sum().backward()
        fp16_utils.model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        optimizer.step()
        fp16_utils.master_params_to_model_params(model_params, master_params, flat_master=flat)
    assert all(torch.equal(one, torch.full_like(one, 1.0 - 2.0**-10)) for one in model_params)


def test_parameters_without_a_gradient_have_none_or_zeros():
    model = nn.Linear(2, 1).half()
    for flat, expected in ((False, [None, None]), (True, [torch.zeros(3)])):
        model_params, master_params = fp16_utils.prep_param_lists(model, flat_master=flat)
        fp16_utils.model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        found = [one.grad for one in master_params]
        assert found == expected if not flat else torch.equal(found[0], expected[0])


def test_one_flat_master_of_several_dtypes_is_refused():
    model = fp16_utils.convert_network(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.float16
    )
    with pytest.raises(TypeError, match=r"several dtypes\. Leave flat_master out"):
        fp16_utils.prep_param_lists(model, flat_master=True)


def test_a_module_is_cast_without_its_parts():
    module = nn.Sequential(nn.Linear(1, 1))
    module.own = nn.Parameter(torch.ones(1))
    fp16_utils.convert_module(module, torch.float16)
    assert (module.own.dtype, module[0].weight.dtype) == (torch.float16, torch.float32)
