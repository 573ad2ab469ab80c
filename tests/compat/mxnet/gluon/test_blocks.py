"""`gluon.Block`: initialization, parameters, files, and what torch does with blocks."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

import mezzo
import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import autograd, gluon, nd
from mezzo.compat.mxnet._ndarray import NDArray
from mezzo.compat.mxnet._parameter import DeferredInitializationError
from mezzo.compat.mxnet.gluon import nn


def make_network():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(
            nn.Conv2D(4, 3, activation="relu"),
            nn.BatchNorm(),
            nn.MaxPool2D(),
            nn.Flatten(),
            nn.Dense(8, activation="tanh"),
            nn.Dropout(0.5),
            nn.Dense(2),
        )
    return net


@pytest.fixture
def net():
    mx.random.seed(0)
    net = make_network()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    return net


@pytest.fixture
def images():
    return nd.random.uniform(-1, 1, shape=(4, 1, 6, 6))


def test_a_network_trains_with_the_calls_of_gluon(net, images):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=None)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    labels, losses = nd.array([0, 1, 0, 1]), []
    for _ in range(20):
        with autograd.record():
            loss = loss_function(net(images), labels)
        loss.backward()
        trainer.step(4)
        losses.append(loss.mean().asscalar())
    assert losses[-1] < losses[0] / 2


def test_the_shape_of_a_deferred_parameter_is_known_after_the_first_call(net, images):
    weight = net.collect_params()["4.weight"]
    assert weight.shape is None
    with pytest.raises(
        DeferredInitializationError, match=r"'4.weight' has not been initialized yet"
    ):
        weight.data()
    net(images)
    assert weight.shape == (8, 16)
    assert weight.data().dtype == np.float32
    assert repr(weight) == "Parameter 4.weight (shape=(8, 16), dtype=float32)"


def test_parameters_have_the_names_of_gluon_and_statistics_among_them(net, images):
    net(images)
    parameters = net.collect_params()
    assert list(parameters)[:6] == [
        "0.weight",
        "0.bias",
        "1.gamma",
        "1.beta",
        "1.running_mean",
        "1.running_var",
    ]
    assert parameters["1.running_mean"].grad_req == "null"
    assert len(net.collect_params(".*weight")) == 3
    assert list(net[1].params) == ["gamma", "beta", "running_mean", "running_var"]
    with pytest.raises(
        KeyError, match=r"Parameter '0.wight' does not exist. Did you mean '0.weight'"
    ):
        parameters["0.wight"]


def test_a_parameter_is_declared_as_in_torch(net):
    assert net.collect_params().get("0.bias").name == "0.bias"
    assert net.params.get("weight") is None
    with pytest.raises(mezzo.UnsupportedError, match=r"Declare it as self.weight = torch.nn.Para"):
        net.params.get("weight", shape=(2, 3), init=None)


def test_a_parameter_has_values_and_gradients(net, images):
    parameter = net.collect_params()["6.bias"]
    with autograd.record():
        out = net(images)
    assert parameter.grad().asnumpy().tolist() == [0.0, 0.0]
    out.backward()
    assert parameter.list_grad()[0].asnumpy().tolist() == [4.0, 4.0]
    parameter.zero_grad()
    assert parameter.grad().asnumpy().tolist() == [0.0, 0.0]
    parameter.set_data(nd.array([1, 2]))
    assert parameter.list_data()[0].asnumpy().tolist() == [1.0, 2.0]
    assert parameter.list_ctx() == [mx.cpu()]
    with pytest.raises(ValueError, match=r"'6.bias' has shape \(2,\), but set_data got \(3,\)"):
        parameter.set_data(nd.zeros((3,)))
    with pytest.raises(RuntimeError, match=r"Cannot get gradient array .*grad_req='null'"):
        net.collect_params()["1.running_mean"].grad()


def test_grad_req_freezes_parameters(net, images):
    net.collect_params("0.*").setattr("grad_req", "null")
    net(images)
    assert not net[0].weight.requires_grad
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    assert len(trainer.optimizer.param_groups[0]["params"]) == 6
    with pytest.raises(ValueError, match="Unknown grad_req 'x'"):
        net.collect_params().setattr("grad_req", "x")
    with pytest.raises(mezzo.UnsupportedError, match=r"only 'grad_req', 'lr_mult' and 'wd_mult'"):
        net.collect_params().setattr("init", 0.1)


def test_a_second_initialize_keeps_the_values(net, images):
    before = net(images)
    with pytest.warns(UserWarning, match="such as '0', are already initialized, ignoring"):
        net.initialize()
    assert torch.equal(net(images), before)
    net.initialize(mx.init.Zero(), force_reinit=True)
    assert net(images).abs().max().asscalar() == 0.0


def test_initializers_of_a_layer_come_before_that_of_the_network():
    net = nn.Sequential()
    net.add(nn.Dense(2, weight_initializer="ones", in_units=1), nn.Dense(2, in_units=2))
    net.initialize(mx.init.Constant(3.0))
    assert net[0].weight.tolist() == [[1.0], [1.0]]
    assert net[1].weight.tolist() == [[3.0, 3.0]] * 2
    assert net[0].bias.tolist() == [0.0, 0.0]


def test_a_network_moves_to_a_context(net):
    net.collect_params().reset_ctx([mx.cpu()])
    net.collect_params().initialize(ctx=mx.cpu(), force_reinit=True)
    assert net[0].weight.device.type == "cpu"
    with pytest.raises(TypeError, match="Expected a Context"):
        net.collect_params().reset_ctx("cpu")


def test_files_of_parameters_round_trip(net, images, tmp_path):
    expected = net(images)
    net.save_parameters(tmp_path / "net.params")
    other = make_network()
    other.load_parameters(tmp_path / "net.params", ctx=mx.cpu())
    assert torch.equal(other(images), expected)
    with pytest.warns(UserWarning, match="already initialized"):
        other.initialize()
    assert torch.equal(other(images), expected)


def test_a_file_that_does_not_fit_changes_nothing(net, images, tmp_path):
    net(images)
    net[:4].save_parameters(tmp_path / "part.params")
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(mezzo.CheckpointError, match=r"Parameter '4.bias' is missing .* 3 others"):
        net.load_parameters(tmp_path / "part.params")
    net.load_parameters(tmp_path / "part.params", allow_missing=True)
    net.save_parameters(tmp_path / "net.params")
    small = nn.Sequential()
    small.add(nn.Conv2D(4, 3, in_channels=1))
    with pytest.raises(
        mezzo.CheckpointError, match=r"Parameter '1.beta' .* is not in this network"
    ):
        small.load_parameters(tmp_path / "net.params")
    small.load_parameters(tmp_path / "net.params", ignore_extra=True)
    wide = nn.Sequential()
    wide.add(nn.Conv2D(4, 3, in_channels=2))
    with pytest.raises(mezzo.CheckpointError, match=r"has shape \(4, 1, 3, 3\), expected"):
        wide.load_parameters(tmp_path / "net.params", ignore_extra=True)
    wide.load_dict({"0.weight": nd.zeros((4, 2, 3, 3))}, allow_missing=True)
    assert wide[0].weight.abs().sum() == 0
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def test_a_state_dict_of_torch_is_kept_by_initialize(net, images):
    expected = net(images)
    other = make_network()
    other.load_state_dict(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.initialize()
    assert torch.equal(other(images), expected)


def test_batch_statistics_are_used_inside_record_only(net, images):
    net(images)
    before = net[1].running_mean.clone()
    assert torch.equal(net(images), net(images))
    assert torch.equal(net[1].running_mean, before)
    with autograd.record():
        net(images)
    assert not torch.equal(net[1].running_mean, before)
    net.eval()
    before = net[1].running_mean.clone()
    with autograd.record():
        net(images)
    assert torch.equal(net[1].running_mean, before)


def test_arrays_in_arrays_out_and_tensors_in_tensors_out(net, images):
    assert isinstance(net(images), NDArray)
    assert type(net(torch.ones(1, 1, 6, 6))) is torch.Tensor


def test_torch_copies_compiles_and_converts_a_network(net, images):
    data = torch.ones(2, 1, 6, 6)
    expected = net(data)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(data), expected)
    assert torch.allclose(torch.compile(net, backend="eager")(data), expected)
    converted = mezzo.convert(copy.deepcopy(net).eval(), [(data,)], policy="O0")
    assert torch.allclose(converted(data), expected)
    assert isinstance(net[1], torch.nn.BatchNorm2d)
    assert isinstance(net[6], torch.nn.Linear)


class Branches(gluon.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first, self.second = nn.Dense(4), nn.Dense(2)

    def hybrid_forward(self, F, x):  # noqa: N803
        joined = F.concat(F.relu(self.first(x)), x.expand_dims(1).reshape((0, -1)), dim=1)
        return self.second(joined).astype("float32")


def test_hybrid_forward_gets_arrays_and_the_operators(images):
    block = Branches(prefix="branches_")
    block.initialize()
    assert block.name == "branches"
    assert isinstance(block(nd.ones((2, 3))), NDArray)
    assert type(block(torch.ones(2, 3))) is torch.Tensor
    assert list(block.collect_params()) == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    ]


def test_a_block_without_forward_says_what_to_define():
    with pytest.raises(NotImplementedError, match=r"no forward\(x\) and no hybrid_forward\(F, x\)"):
        gluon.HybridBlock()(nd.ones((1,)))


def test_a_network_is_cast_and_summarized(net, images, capsys):
    net.summary(images)
    assert "Parameters: 210" in capsys.readouterr().out
    net.cast("bfloat16")
    assert net[0].weight.dtype is torch.bfloat16


def test_children_are_registered_and_sliced(net):
    block = gluon.Block()
    block.register_child(nn.Dense(1))
    block.register_child(nn.Dense(1), "named")
    assert list(dict(block.named_children())) == ["0", "named"]
    assert [type(layer).__name__ for layer in net[3:5]] == ["Flatten", "Dense"]
    assert len(net) == 7


def test_missing_names_of_gluon_say_what_to_use():
    with pytest.raises(AttributeError, match=r"Use torchvision.datasets"):
        _ = gluon.data.vision
    with pytest.raises(ImportError, match=r"gluon.nn has no PReLU. Use torch.nn.PReLU"):
        from mezzo.compat.mxnet.gluon.nn import PReLU  # noqa: F401
