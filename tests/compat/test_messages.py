"""Wrong calls in OneFlow's, MegEngine's and Apex's dialects are refused in plain words."""

import numpy as np
import pytest
import torch
from torch import nn

import mezzo.compat.megengine.functional as F
import mezzo.compat.oneflow as flow
from mezzo.compat.apex import amp, fp16_utils
from mezzo.compat.megengine import amp as megengine_amp
from mezzo.compat.megengine import optimizer as megengine_optimizer


class NotInitialized(flow.nn.Graph):
    def __init__(self):
        self.rate = 0.1

    def build(self, x):
        return x


class Empty(flow.nn.Graph):
    pass


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: NotInitialized()(1), AttributeError, r"Call super\(\).__init__\(\) first"),
        (lambda: repr(NotInitialized()), AttributeError, r"NotInitialized was not initialized"),
        (lambda: Empty().load_state_dict(None), TypeError, r"graph.state_dict\(\) returned"),
        (lambda: flow.amp.GradScaler(growth_factor=0), ValueError, r"growth_factor.*> 0.0, got 0"),
        (lambda: flow.amp.GradScaler(init_scale="a"), ValueError, r"init_scale.*number.*got 'a'"),
        (lambda: flow.amp.StaticGradScaler("x"), ValueError, r"scale_factor.*number.*got 'x'"),
    ],
    ids=["call", "repr", "state", "zero", "text", "static"],
)
def test_oneflow(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: megengine_optimizer.SGD(nn.Linear(1, 1), lr=0.1), r"module Linear. Pass net.par"),
        (lambda: F.nn.cross_entropy(np.zeros((2, 3)), np.zeros(2)), r"got ndarray as pred.*tensor"),
        (lambda: megengine_amp.GradScaler().unscale(None), r"got NoneType. Pass gm.attached_ten"),
        (lambda: megengine_amp.GradScaler().unscale(nn.Linear(1, 1)), r"takes tensors, got Linear"),
        (lambda: megengine_amp.convert_tensor_format([1]), r"takes a tensor, got list"),
        (lambda: megengine_amp.convert_module_format(torch.ones(1)), r"takes a module, got Tensor"),
    ],
    ids=["optimizer", "loss", "unscale", "module", "tensor format", "module format"],
)
def test_megengine(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.fixture
def trained():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield amp.initialize(model, optimizer, verbosity=0)
    amp.initialize(nn.Linear(1, 1), enabled=False)


def scale(loss, optimizers):
    with amp.scale_loss(loss, optimizers) as scaled:
        scaled.backward()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, o, y: scale(3.0, o), TypeError, r"takes a tensor, got float"),
        (lambda m, o, y: scale([y], o), TypeError, r"got list.*each of several losses"),
        (lambda m, o, y: scale(y, m), TypeError, r"list of optimizers, got Linear"),
        (lambda m, o, y: scale(y.detach(), o), RuntimeError, r"not depend on any trained para"),
        (lambda m, o, y: list(amp.master_params(m)), TypeError, r"takes an optimizer, got Linear"),
        (lambda m, o, y: amp.load_state_dict(None), TypeError, r"amp.state_dict\(\) returned"),
        (
            lambda m, o, y: amp.load_state_dict({"loss_scaler0": {"scale": 1}}),
            RuntimeError,
            r"Unexpected key\(s\) in state_dict: 'loss_scaler0'",
        ),
        (lambda m, o, y: fp16_utils.FP16_Optimizer(m), TypeError, r"an optimizer, got Linear"),
        (lambda m, o, y: fp16_utils.network_to_half(y), TypeError, r"a model, got Tensor"),
    ],
    ids=[
        "number",
        "losses",
        "model",
        "detached",
        "master_params",
        "no state",
        "entries",
        "FP16_Optimizer",
        "network_to_half",
    ],
)
def test_apex(trained, call, error, message):
    model, optimizer = trained
    with pytest.raises(error, match=message):
        call(model, optimizer, model(torch.ones(1, 2)).sum())
