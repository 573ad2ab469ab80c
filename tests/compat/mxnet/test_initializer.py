"""`mxnet.initializer`: distributions, and values that depend on the parameter's name."""

import math

import pytest
import torch

from mezzo.compat.mxnet import init, initializer


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.zeros(40, 50, 2)


@pytest.mark.parametrize(
    ("made", "deviation"),
    [
        (init.Uniform(0.3), 0.3 / math.sqrt(3)),
        (init.Normal(0.2), 0.2),
        (init.Xavier(), math.sqrt(1 / 90)),
        (init.Xavier("gaussian", "in", 2), math.sqrt(2 / 100)),
        (init.Xavier(factor_type="out"), math.sqrt(1 / 80)),
        (init.MSRAPrelu("in", slope=0.0), math.sqrt(2 / 100)),
    ],
    ids=repr,
)
def test_weights_have_the_deviation_of_the_formula(weight, made, deviation):
    made("0.weight", weight)
    assert weight.std().item() == pytest.approx(deviation, rel=0.05)


def test_biases_and_statistics_do_not_depend_on_the_initializer(weight):
    for name, value in (("1.gamma", 1), ("1.beta", 0), ("bias", 0), ("1.running_var", 1)):
        init.Normal()(name, weight)
        assert weight.unique().tolist() == [value]


def test_constants_fill_parameters_of_any_name(weight):
    init.One()("bias", weight)
    assert weight.unique().tolist() == [1]
    init.Constant(torch.tensor([1.0, 2.0]))("0.weight", weight)
    assert weight[3, 4].tolist() == [1, 2]


def test_names_and_bad_arguments(weight):
    assert isinstance(initializer.create("xavier"), init.Xavier)
    assert isinstance(initializer.create(None), init.Uniform)
    with pytest.raises(ValueError, match=r"Unknown initializer 'glorot'. Choose one of: zeros"):
        initializer.create("glorot")
    with pytest.raises(ValueError, match="Unknown rnd_type 'x'"):
        init.Xavier("x")
    with pytest.raises(ValueError, match="Unknown factor_type 'x'"):
        init.Xavier(factor_type="x")
    with pytest.raises(ValueError, match="Xavier needs a parameter of two dimensions or more"):
        init.Xavier()("scale", torch.zeros(3))
    with pytest.raises(NotImplementedError, match="Initializer has no _init_weight"):
        init.Initializer()("weight", weight)
