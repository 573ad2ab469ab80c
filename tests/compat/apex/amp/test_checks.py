"""What `initialize` refuses, in Apex's types."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp, fp16_utils


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "models", [(nn.Linear(1, 1),), "model", None, [3]], ids=["tuple", "str", "none", "list"]
)
def test_models_that_are_none_are_type_errors(models):
    with pytest.raises(TypeError, match="models should be a model or a list of models"):
        amp.initialize(models, verbosity=0)


@pytest.mark.parametrize("optimizers", [(3,), "sgd", [3]], ids=["tuple", "str", "list"])
def test_optimizers_that_are_none_are_type_errors(optimizers):
    with pytest.raises(
        TypeError, match="optimizers should be an optimizer, a list of optimizers or None"
    ):
        amp.initialize(nn.Linear(1, 1), optimizers, verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_wrapped_model_is_a_runtime_error(level):
    with pytest.raises(RuntimeError, match=r"torch\.nn\.parallel\.DataParallel.*AFTER"):
        amp.initialize(nn.DataParallel(nn.Linear(1, 1)), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_half_parameters_are_a_runtime_error(level):
    model = nn.Linear(1, 1).half()
    with pytest.raises(
        RuntimeError, match=r"Found param weight with type torch.HalfTensor.*Leave \.half\(\) out"
    ):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)


def test_half_buffers_are_a_runtime_error():
    model = nn.BatchNorm1d(2, affine=False).half()
    with pytest.raises(RuntimeError, match=r"Found buffer 1\.running_mean"):
        amp.initialize(nn.Sequential(nn.Linear(2, 2), model), verbosity=0)


def test_half_parameters_may_be_allowed():
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(nn.Linear(1, 1).half(), opt_level="O1", verbosity=0)


def test_an_fp16_optimizer_is_a_runtime_error():
    model = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="has an FP16_Optimizer"):
        amp.initialize(model, fp16_utils.FP16_Optimizer(sgd(model), verbose=False), verbosity=0)


def test_nothing_changes_when_something_is_refused():
    good, bad = nn.Linear(1, 1), nn.Linear(1, 1).half()
    with pytest.raises(RuntimeError):
        amp.initialize([good, bad], sgd(good), opt_level="O2", verbosity=0)
    assert good.weight.dtype is torch.float32
    assert not hasattr(amp._amp_state, "opt_properties")
